"""`check_sampler`: do a sampler's log-probs come from the trainer's weights? By server, age, positions and expert.

For tokens that the trainer scores before it changes its weights, d = log-prob by the trainer - by the sampler is
rounding, and what was learned since they were sampled (`age`), unless something is wrong. u is the limited square of d.
v = root of u / mean root of u in the response. Each test compares a mean of this step with that of accepted steps.
Coarse strata: d, the share of large d, and x = log of a response's mean u, of all tokens, and x by server, age of the
weights and range of positions (minus x of earlier ones). Experts, with few tokens each: v, which has fewer outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Integer
from numpy import ndarray
from scipy.special import fdtrc, stdtr

ALPHA = 1e-4
"""Most false alarms per step of the tests of coarse strata together, and again of those of experts (Holm)."""
LARGEST_SHARE, LARGEST_GEOMETRIC = 0.01, 0.1
"""Share of tokens with a ratio or its inverse above 2, size of a response's mean d: a step above either is refused."""
_CAP, _FLOOR = 0.05, 1e-8
"""Squares of d count up to the cap, so that no token decides; those below the floor are alike."""
_AGES, _RANGES, _RANGE_TOKENS = 10, 32, 256
"""Ages of weights, the last one open; ranges of positions, two from each power of two to the next, from 256 on."""
_FEWEST_TOKENS, _FEWEST_SLOTS = 8, 32
"""Fewest tokens of a response in a stratum, else left out; slots of an expert, else tested with others like it."""
_RECENT, _FIRST, _KEPT = 20, 8, 0.9
"""Of coarse sums the last and the first steps that are kept; share of the experts' sums that each step keeps."""
_WHOLE = ("all tokens", "mean log-ratio", "share of ratios above 2")
_SPREAD_4, _MARGIN_4 = np.array([0.15, 1e-3, 1e-3, 0.15]), np.array([np.log(2), 5e-3, 5e-3, np.log(2)])
"""Of each of `_WHOLE`, then of all other coarse strata. Spread: standard deviation between steps before it is known.
Margin: excess over the first steps that is no fault, because rounding follows entropy and lengths."""
_GUESSES = 8
"""The assumed spread weighs as much as this many steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledTokens:
    """X response tokens of S responses, scored by the trainer before the first optimizer step of a step.

    log_ratio_X   log-prob by the trainer - by the sampler
    response_X    response of each, 0 .. S - 1
    position_X    in its sequence
    age_X         steps that its weights are older than the newest
    server_S      that sampled the response, 0 .. num_servers - 1
    experts_XLK   recorded experts of the row that predicts the token, 0 .. num_experts - 1; L = 0: no experts
    """

    log_ratio_X: Float[ndarray, " X"]
    response_X: Int[ndarray, " X"]
    position_X: Int[ndarray, " X"]
    age_X: Int[ndarray, " X"]
    server_S: Int[ndarray, " S"]
    num_servers: int
    experts_XLK: Integer[ndarray, "X L K"]
    num_experts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerSums:
    """What the check reads of a step: sums, which add up over micro-batches and ranks.

    coarse_Z3    of each coarse stratum: responses, sum and sum of squares of its statistic
    tokens_4     tokens, sum of squares of v, tokens with a ratio or its inverse above 2, responses of large mean d
    slots_YLE    token-slots by server, layer and expert
    excess_YLE   sum of v over them
    """

    coarse_Z3: Float64[ndarray, "Z 3"]
    tokens_4: Float64[ndarray, " 4"]
    slots_YLE: Float64[ndarray, "Y L E"]
    excess_YLE: Float64[ndarray, "Y L E"]

    def flat(self) -> Float64[ndarray, " X"]:
        """Return all sums end to end, to add them up."""
        return np.concatenate([getattr(self, name).ravel() for name in _ADDED])

    def shaped(self, flat_X: Float64[ndarray, " X"]) -> SamplerSums:
        """Return sums of these shapes from sums of `flat`."""
        arrays = [getattr(self, name) for name in _ADDED]
        pieces = np.split(flat_X, np.cumsum([one.size for one in arrays])[:-1])
        shaped = {name: piece.reshape(one.shape) for name, piece, one in zip(_ADDED, pieces, arrays, strict=True)}
        return SamplerSums(**shaped)


_ADDED = ("coarse_Z3", "tokens_4", "slots_YLE", "excess_YLE")


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerHistory:
    """Sums of accepted steps, kept by the caller; without arguments, of none.

    recent_XZ3, first_XZ3   coarse sums of the last and of the first steps
    recent_2LE, first_2LE   slots and excess of experts: over all steps, older ones weighing less; over the first steps
    """

    recent_XZ3: Float64[ndarray, "X Z 3"] = field(default_factory=lambda: np.zeros((0, 0, 3)))
    first_XZ3: Float64[ndarray, "Y Z 3"] = field(default_factory=lambda: np.zeros((0, 0, 3)))
    recent_2LE: Float64[ndarray, "2 L E"] = field(default_factory=lambda: np.zeros((2, 0, 0)))
    first_2LE: Float64[ndarray, "2 L E"] = field(default_factory=lambda: np.zeros((2, 0, 0)))

    def with_step(self, sums: SamplerSums) -> SamplerHistory:
        """Return the history with an accepted step; one of other servers, layers or experts begins anew."""
        coarse_1Z3, now_2LE = sums.coarse_Z3[None], np.stack([sums.slots_YLE.sum(0), sums.excess_YLE.sum(0)])
        if not self.fits(sums):
            return SamplerHistory(recent_XZ3=coarse_1Z3, first_XZ3=coarse_1Z3, recent_2LE=now_2LE, first_2LE=now_2LE)
        grows = len(self.first_XZ3) < _FIRST
        return SamplerHistory(
            recent_XZ3=np.concatenate([self.recent_XZ3, coarse_1Z3])[-_RECENT:],
            first_XZ3=np.concatenate([self.first_XZ3, coarse_1Z3]) if grows else self.first_XZ3,
            recent_2LE=_KEPT * self.recent_2LE + now_2LE,
            first_2LE=self.first_2LE + now_2LE if grows else self.first_2LE,
        )

    def fits(self, sums: SamplerSums) -> bool:
        """Return whether a step has as many servers, layers and experts."""
        same = self.recent_XZ3.shape[1:] == sums.coarse_Z3.shape
        return same and self.recent_2LE.shape[1:] == sums.slots_YLE.shape[1:]

    def as_state(self) -> dict[str, Any]:
        """Return JSON data, for `from_state`."""
        return {name: getattr(self, name).tolist() for name in ("recent_XZ3", "first_XZ3", "recent_2LE", "first_2LE")}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SamplerHistory:
        """Return the history of `as_state`."""
        arrays = {name: np.array(values, dtype=np.float64) for name, values in state.items()}
        return cls(**{name: one.reshape(one.shape + (0,) * (3 - one.ndim)) for name, one in arrays.items()})


@dataclass(frozen=True, kw_only=True)
class SamplerVerdict:
    """Whether tokens are those of the trainer's weights, but for rounding.

    accepted   nothing differs
    differs    what does, by p: "layer 17, expert 41, server 2", "server 2", "positions 6144 to 8191"
    clearest   stratum of the smallest p, also of an accepted step; "": nothing was tested
    p          smallest p, of one test
    count      responses, or token-slots of an expert, in that stratum
    ratio      its mean u, or v, divided by that of steps before
    """

    accepted: bool
    differs: tuple[str, ...] = ()
    clearest: str = ""
    p: float = 1.0
    count: int = 0
    ratio: float = 1.0

    @property
    def sentence(self) -> str:
        """Return what differs, in a sentence; "": nothing."""
        listed = ", ".join(self.differs[:5]) + ", ..." * (len(self.differs) > 5)
        return f"trainer and sampler differ more than in steps before, or than is allowed: {listed}" if listed else ""


def sampler_sums(tokens: SampledTokens) -> SamplerSums:
    """Return the sums of whole responses."""
    S, (X, L, K), E = len(tokens.server_S), tokens.experts_XLK.shape, tokens.num_experts
    d_X, response_X = tokens.log_ratio_X.astype(np.float64), tokens.response_X
    d_X = np.where(np.isnan(d_X), 20.0, d_X.clip(-20.0, 20.0))
    u_X, above_X = np.minimum(d_X**2, _CAP) + _FLOOR, np.abs(d_X) > np.log(2)
    [count_S], [sum_S] = _cells(np.zeros_like(response_X), 1, u_X, response_X, S)
    size_S = np.bincount(response_X, np.sqrt(u_X), S)
    v_X = np.sqrt(u_X) * (count_S / np.maximum(size_S, _FLOOR))[response_X]
    share_S, mean_S = (np.bincount(response_X, values_X, S) / np.maximum(count_S, 1) for values_X in (above_X, d_X))
    x_S, long_S = _log_means(count_S, sum_S)
    rows = [_moments(values_S, long_S) for values_S in (x_S, mean_S, share_S)]
    rows += [_moments(x_S, long_S & (tokens.server_S == server)) for server in range(tokens.num_servers)]
    count_YS, sum_YS = _cells(np.minimum(tokens.age_X, _AGES - 1), _AGES, u_X, response_X, S)
    rows += [_moments(*one) for one in zip(*_log_means(count_YS, sum_YS), strict=True)]
    octave_X = np.frexp(tokens.position_X // _RANGE_TOKENS)[1]
    second_X = (octave_X > 1) & (2 * tokens.position_X >= 3 * (_RANGE_TOKENS // 2 << octave_X))
    range_X = np.minimum(2 * octave_X + second_X, _RANGES - 1)
    count_YS, sum_YS = _cells(range_X, _RANGES, u_X, response_X, S)
    x_YS, enough_YS = _log_means(count_YS, sum_YS)
    early_YS, enough_early_YS = _log_means(count_YS.cumsum(0) - count_YS, sum_YS.cumsum(0) - sum_YS)
    rows += [_moments(*one) for one in zip(x_YS - early_YS, enough_YS & enough_early_YS, strict=True)]
    counted_2LYE = np.zeros((2, L, tokens.num_servers * E))
    first_X1, v_XK = E * tokens.server_S[response_X].astype(np.int64)[:, None], np.repeat(v_X, K)
    for layer in range(L):
        place_X = (first_X1 + tokens.experts_XLK[:, layer]).ravel()
        counted_2LYE[0, layer] = np.bincount(place_X, minlength=tokens.num_servers * E)
        counted_2LYE[1, layer] = np.bincount(place_X, v_XK, tokens.num_servers * E)
    slots_YLE, excess_YLE = counted_2LYE.reshape(2, L, tokens.num_servers, E).swapaxes(1, 2)
    return SamplerSums(
        coarse_Z3=np.array(rows),
        tokens_4=np.array(
            [X, (v_X**2).sum(), above_X.sum(), (long_S & (np.abs(mean_S) > LARGEST_GEOMETRIC)).sum()], dtype=np.float64
        ),
        slots_YLE=slots_YLE,
        excess_YLE=excess_YLE,
    )


def _cells(
    stratum_X: Int[ndarray, " X"], num_strata: int, u_X: Float64[ndarray, " X"], response_X: Int[ndarray, " X"], S: int
) -> tuple[Int[ndarray, "Y S"], Float64[ndarray, "Y S"]]:
    """Return tokens and sum of u of each response in each stratum."""
    cell_X, cells = stratum_X * S + response_X, num_strata * S
    count_YS, sum_YS = np.bincount(cell_X, minlength=cells), np.bincount(cell_X, u_X, cells).astype(np.float64)
    return count_YS.reshape(num_strata, S), sum_YS.reshape(num_strata, S)


def _log_means(
    count_X: Int[ndarray, "*batch S"], sum_X: Float64[ndarray, "*batch S"]
) -> tuple[Float64[ndarray, "*batch S"], Bool[ndarray, "*batch S"]]:
    """Return the log of the mean u of each response, and where it has enough tokens."""
    return np.log((sum_X.clip(min=0) + 1e-300) / np.maximum(count_X, 1)), count_X >= _FEWEST_TOKENS


def _moments(x_S: Float64[ndarray, " S"], chosen_S: Bool[ndarray, " S"]) -> tuple[float, float, float]:
    chosen = x_S[chosen_S]
    return float(len(chosen)), float(chosen.sum()), float((chosen**2).sum())


class _Tests(NamedTuple):
    """X tests of one family: p, what was counted, ratio to steps before, and the name of the stratum of a test."""

    p_X: Float64[ndarray, " X"]
    count_X: Float64[ndarray, " X"]
    ratio_X: Float64[ndarray, " X"]
    name: Callable[[int], str]

    def rejected(self) -> list[int]:
        """Return the tests that Holm's method rejects, those of smallest p first."""
        order, m = np.argsort(self.p_X, kind="stable"), len(self.p_X)
        kept = np.append(self.p_X[order] > ALPHA / (m - np.arange(m)), True)
        return order[: int(kept.argmax())].tolist()


def check_sampler(
    sums: SamplerSums, history: SamplerHistory, *, layer_ids: Sequence[int] | None = None
) -> SamplerVerdict:
    """Return whether the tokens of a step differ from those of steps before, and where.

    Coarse strata raise a false alarm in a share `ALPHA` of steps, and experts in as many. Against the first steps
    of the history u and v may double without an alarm.

    sums        of all responses of all ranks
    history     without steps of these servers, layers and experts, only what is always refused is looked for
    layer_ids   names of layers; None: 0 .. L - 1
    """
    tokens, _, above, beyond = sums.tokens_4.tolist()
    limits = [f"{above / tokens:.2%} of ratios above 2"] if above > LARGEST_SHARE * tokens else []
    limits += [f"{beyond:.0f} responses with a mean log-ratio beyond {LARGEST_GEOMETRIC:g}"] if beyond else []
    if not history.fits(sums) or not tokens:
        return SamplerVerdict(accepted=not limits, differs=tuple(limits))
    families = (_coarse_tests(sums, history), _expert_tests(sums, history, layer_ids))
    differs = tuple(dict.fromkeys(one.name(x) for one in families for x in one.rejected()))
    verdict = SamplerVerdict(accepted=not (limits or differs), differs=(*limits, *differs))
    tested = [(float(one.p_X.min()), one) for one in families if len(one.p_X)]
    if not tested:
        return verdict
    p, family = min(tested, key=lambda one: one[0])
    x = int(family.p_X.argmin())
    count, ratio = int(family.count_X[x]), float(family.ratio_X[x])
    return replace(verdict, clearest=family.name(x), p=p, count=count, ratio=ratio)


def _coarse_tests(sums: SamplerSums, history: SamplerHistory) -> _Tests:
    """Return tests of coarse means against the last and the first steps: Student's t, one-sided but for mean d.

    The variance of a mean has a part within the step, and one between steps that strata of a kind share.
    """
    num_servers, now_Z3 = len(sums.slots_YLE), sums.coarse_Z3
    kind_Z = np.repeat(np.arange(6), [1, 1, 1, num_servers, _AGES, _RANGES])
    places, found = [], []
    for before_XZ3, margin in ((history.recent_XZ3, 0.0), (history.first_XZ3, 1.0)):
        count_XZ, mean_XZ = before_XZ3[..., 0], before_XZ3[..., 1] / np.maximum(before_XZ3[..., 0], 1)
        steps_Z = (count_XZ > 0).sum(0)
        reference_Z = mean_XZ.sum(0) / np.maximum(steps_Z, 1)  # the mean of no response is 0
        within_Z = (before_XZ3[..., 2] - count_XZ * mean_XZ**2).sum(0)
        inverse_Z = np.divide(1.0, count_XZ, out=np.zeros_like(count_XZ), where=count_XZ > 0).sum(0)
        between_Z = ((count_XZ > 0) * (mean_XZ - reference_Z) ** 2).sum(0)
        for kind in range(6):
            of_kind = (kind_Z == kind) & (steps_Z > 0)
            z_X = np.flatnonzero(of_kind & (now_Z3[:, 0] > 0))
            if not len(z_X):
                continue
            spread, allowed = _SPREAD_4[min(kind, 3)], margin * _MARGIN_4[min(kind, 3)]
            responses = np.maximum(count_XZ[:, of_kind] - 1, 0).sum()
            within = within_Z[of_kind].sum() / responses if responses else spread**2
            steps = float((steps_Z[of_kind] - 1).sum())
            explained_Z = within * inverse_Z * (1 - 1 / np.maximum(steps_Z, 1))
            between = max(0.0, float((between_Z - explained_Z)[of_kind].sum()))
            between = (_GUESSES * spread**2 + between) / (_GUESSES + steps)
            count_X, steps_X = now_Z3[z_X, 0], steps_Z[z_X]
            of_reference_X = (between + within * inverse_Z[z_X] / steps_X) / steps_X
            difference_X = now_Z3[z_X, 1] / count_X - reference_Z[z_X]
            shift_X = (np.abs(difference_X) if kind == 1 else difference_X) - allowed
            t_X = shift_X / np.sqrt(between + within / count_X + of_reference_X)
            p_X = stdtr(_GUESSES + steps, -t_X) * (2 if kind == 1 else 1)
            places += z_X.tolist()
            found.append([p_X, count_X, np.exp(difference_X)])
    p_X, count_X, ratio_X = np.concatenate(found, axis=1) if found else np.zeros((3, 0))
    return _Tests(p_X, count_X, ratio_X, lambda x: _coarse_name(places[x], num_servers))


def _coarse_name(place: int, num_servers: int) -> str:
    if place < len(_WHOLE):
        return _WHOLE[place]
    place -= len(_WHOLE)
    if place < num_servers:
        return f"server {place}"
    place -= num_servers
    if place < _AGES:
        return f"weights of age {place}"
    octave, second = divmod(place - _AGES, 2)
    start = _RANGE_TOKENS // 2 << octave if octave else 0
    half = start // 2 if octave > 1 else _RANGE_TOKENS
    return f"positions {start + second * half} to {start + (second + 1) * half - 1}"


def _expert_tests(sums: SamplerSums, history: SamplerHistory, layer_ids: Sequence[int] | None) -> _Tests:
    """Return tests of the mean v of every (layer, expert) against its own before: a ratio of gamma variables, F.

    Where n values of mean m and squared coefficient of variation c2 are added up, the sum is about a gamma variable of
    shape n / c2. c2 is that of v, or more where most experts scatter more. Experts with few slots are tested together.
    """
    tokens, squares, _, _ = sums.tokens_4.tolist()
    now_2YLE = np.stack([sums.slots_YLE, sums.excess_YLE])
    found, places = [], []
    for before_2LE, factor in ((history.recent_2LE, 1.0), (history.first_2LE, 2.0)):
        now_2LE = now_2YLE.sum(1)
        few_LE = (now_2LE[0] < _FEWEST_SLOTS) | (before_2LE[0] < _FEWEST_SLOTS)
        slots_LX, excess_LX, slots_before_LX, excess_before_LX = (
            np.concatenate([values_LE * ~few_LE, (values_LE * few_LE).sum(1, keepdims=True)], axis=1)
            for values_LE in (*now_2LE, *before_2LE)
        )
        place_X2 = np.argwhere((slots_LX >= _FEWEST_SLOTS) & (slots_before_LX >= _FEWEST_SLOTS))
        n_X, v_X, before_X, v_before_X = (
            values_LX[tuple(place_X2.T)] for values_LX in (slots_LX, excess_LX, slots_before_LX, excess_before_LX)
        )
        ratio_X, c2 = (v_X / n_X) / (v_before_X / before_X), max(0.1, squares / tokens - 1)
        scaled_X = (ratio_X - 1) / np.sqrt(c2 / n_X + c2 / before_X)
        if len(scaled_X):
            c2 *= max(1.0, 1.4826 * float(np.median(np.abs(scaled_X - np.median(scaled_X))))) ** 2
        found.append([fdtrc(2 * n_X / c2, 2 * before_X / c2, ratio_X / factor), n_X, ratio_X])
        places += [(layer, expert, before_2LE, c2) for layer, expert in place_X2.tolist()]

    def name(x: int) -> str:
        layer, expert, before_2LE, c2 = places[x]
        where = f"layer {layer if layer_ids is None else layer_ids[layer]}"
        if expert == before_2LE.shape[-1]:
            return f"{where}, experts with few tokens"
        n_Y, v_Y = now_2YLE[:, :, layer, expert]
        before, v_before = before_2LE[:, layer, expert]
        ratio_Y = v_Y / np.maximum(n_Y, 1) / (v_before / before)
        p_Y = np.where(n_Y > 0, fdtrc(2 * np.maximum(n_Y, 1) / c2, 2 * before / c2, ratio_Y), 1.0)
        alone = np.flatnonzero(p_Y < 0.01 / len(p_Y))
        return f"{where}, expert {expert}" + (f", server {alone[0]}" if len(alone) == 1 < len(p_Y) else "")

    p_X, count_X, ratio_X = np.concatenate(found, axis=1)
    return _Tests(p_X, count_X, ratio_X, name)
