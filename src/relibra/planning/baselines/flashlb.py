"""FlashLB (github.com/vllm-project/vllm-ascend, 182b75e): static replicas placed by mean, spread and correlation.

Looks at loads over time. Here the times are micro-batches, summed into at most 64 groups; copies share tokens evenly.
An expert counts as mean + z x standard deviation of its load, a rank as the same of its experts' summed load: so
experts busy at the same time are parted. Different from the original:
  - every step is planned;
  - an expert gets at most R copies (the original fails where it wants more);
  - one copy of each expert is its home, E / R on every rank, which costs up to 2 % of balance.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from jaxtyping import Float64, Int, Int64
from numpy import ndarray

from relibra.parallel_map import parallel_map
from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.physical_placement import relabel_ranks
from relibra.planning.baselines.from_physical import placement_from_physical
from relibra.planning.placement import Placement
from relibra.routing.compiled import compiled

Z = 0.6744897501960817  # the upper quartile of a normal distribution
TIERS, REACH, MAX_SUMS = 4, 8, 64  # bound the time: parts of the experts, slots tried around a guess, sums over time


def decide(request: PlacementRequest) -> Placement:
    """Place every layer from its micro-batches and share tokens evenly."""
    R, B = request.cluster.num_ranks, request.slots
    load_MLE, home_LE = request.demand.load_MLE, request.previous.home_LE.copy()
    per_rank = home_LE.shape[1] // R

    def place(layer: int) -> ndarray:
        placement_RP = flashlb_placement(load_MLE[:, layer], R, B)
        return relabel_ranks(placement_RP, np.argsort(home_LE[layer], kind="stable").reshape(R, per_rank))

    layers = parallel_map(place, home_LE.shape[0])
    return placement_from_physical(request, np.stack(layers), "even")


def flashlb_placement(load_TE: Int[ndarray, "T E"], num_ranks: int, slots: int) -> Int64[ndarray, "R P"]:
    """Choose the expert of each slot of one layer from loads over time.

    slots     spare slots of a rank, beside E / R homes
    returns   experts of the E / R + slots slots of each rank
    """
    T, E = load_TE.shape
    if T > MAX_SUMS:
        load_TE = np.add.reduceat(load_TE, np.arange(0, T, -(-T // MAX_SUMS)), axis=0)
    x_TE = (load_TE if T else np.zeros((1, E))) + 1.0
    mean_E, cov_EE = x_TE.mean(axis=0), np.atleast_2d(np.cov(x_TE, rowvar=False, bias=True))
    weight_E = mean_E + Z * np.sqrt(np.diagonal(cov_EE))
    order = np.argsort(-weight_E, kind="stable")
    count_E = np.ones(E, dtype=np.int64)
    spare = num_ranks * slots
    size = -(-E // TIERS)
    for start in range(0, E, size):
        tier, later = order[start : start + size], order[start + size :]
        guess = int(_hand_out(weight_E, count_E, order[start:], spare, num_ranks)[tier].sum()) - len(tier)
        best = (np.inf, count_E, guess)
        tried = range(max(0, guess - REACH), min(spare, guess + REACH) + 1) if len(later) else [spare]
        for given in tried:
            fixed_E = _hand_out(weight_E, count_E, tier, given, num_ranks)
            trial_E = _hand_out(weight_E, fixed_E, later, spare - given, num_ranks)
            placement_RP = _place(mean_E, cov_EE, trial_E, num_ranks, slots)
            score = _score(x_TE, trial_E, placement_RP)
            if score < best[0]:
                best = (score, fixed_E, given)
        _, count_E, given = best
        spare -= int(given)
    return _place(mean_E, cov_EE, count_E, num_ranks, slots)


def _score(x_TE: Float64[ndarray, "T E"], count_E: Int64[ndarray, " E"], placement_RP: ndarray) -> float:
    """Return the mean over time of the busiest rank / the mean rank, under an even split."""
    share_TE = x_TE / count_E
    load_TR = np.where(placement_RP >= 0, share_TE[:, placement_RP], 0).sum(axis=2)
    return float((load_TR.max(axis=1) / load_TR.mean(axis=1)).mean())


def _hand_out(weight_E: ndarray, count_E: ndarray, experts: ndarray, slots: int, most: int) -> Int64[ndarray, " E"]:
    """Return copies per expert: a slot goes to the one of `experts` with most weight per copy, at most `most` each."""
    count_E = count_E.copy()
    _hand_out_slots(weight_E, count_E, experts, slots, most)
    return count_E


@compiled
@no_type_check
def _hand_out_slots(weight_E, count_E, experts, slots, most) -> None:
    for _ in range(slots):
        best = -1
        for e in experts:
            if count_E[e] < most and (best < 0 or weight_E[e] * count_E[best] > weight_E[best] * count_E[e]):
                best = e
        if best < 0:
            return
        count_E[best] += 1


@compiled
@no_type_check
def _place(mean_E, cov_EE, count_E, num_ranks, slots) -> ndarray:
    """Lay copies by falling mean per copy, each on the rank with room that ends lowest (mean + z x deviation).

    A rank that holds the expert gets another copy only if no other has room. One copy of each expert is its home (E / R
    per rank), the others are guests (`slots` per rank). If only a home slot is free, the home moves there as a copy is
    laid, and the old home becomes a guest.
    """
    per_rank = len(mean_E) // num_ranks + slots
    placement_RP = np.full((num_ranks, per_rank), -1, np.int64)
    homes_R, guests_R = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    mean_R, var_R = np.zeros(num_ranks), np.zeros(num_ranks)
    for e in np.argsort(-mean_E / count_E, kind="mergesort"):
        home = -1
        for copy in range(count_E[e]):
            best, best_value, best_var, best_held = -1, 0.0, 0.0, True
            for r in range(num_ranks):
                guest = guests_R[r] < slots and (home >= 0 or copy < count_E[e] - 1)
                owner = homes_R[r] < per_rank - slots and (home < 0 or guests_R[home] < slots)
                if not guest and not owner:
                    continue
                held, var = False, var_R[r] + cov_EE[e, e] / count_E[e] ** 2
                for p in range(homes_R[r] + guests_R[r]):
                    h = placement_RP[r, p]
                    held = held or h == e
                    var += 2 * cov_EE[e, h] / (count_E[e] * count_E[h])
                value = mean_R[r] + mean_E[e] / count_E[e] + Z * np.sqrt(max(var, 0.0))
                if best < 0 or (best_held and not held) or (held == best_held and value < best_value):
                    best, best_value, best_var, best_held = r, value, var, held
            if best < 0:
                break  # no rank has room for this copy
            placement_RP[best, homes_R[best] + guests_R[best]] = e
            mean_R[best] += mean_E[e] / count_E[e]
            var_R[best] = best_var
            if home >= 0 and guests_R[best] == slots:  # the home moves here, and stays a guest where it was
                homes_R[home] -= 1
                guests_R[home] += 1
                home = -1
            if home < 0 and homes_R[best] < per_rank - slots:
                home = best
                homes_R[best] += 1
            else:
                guests_R[best] += 1
    return placement_RP
