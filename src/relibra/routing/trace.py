"""`RoutingTrace`: the experts of every token in every MoE layer, as a router chose them.

Row `t` of a sample is the routing used while *processing* its token `t`. The last sampled token is never fed to the
model, so it has no routing: its row exists, to keep rows and tokens aligned, and is marked invalid. Ids are logical:
the numbers the checkpoint uses, before any placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Bool, Int, Shaped, UInt16
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_SAMPLES, MAX_TOP_K, check_model_size
from relibra.routing.compiled import compiled

MAX_EXPERTS = 1 << 16
"""Ids are stored as uint8 or uint16."""

_PER_ROW = ("experts_TLK", "valid_T", "token_hash_T")
PER_SAMPLE = {"sample_ids": -1, "group_ids": -1, "prompt_lengths": 0, "weight_versions": 0}
"""Per-sample columns and their values where the recorder gave none."""


def expert_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """Return the narrowest id type: uint8 up to 256 experts, uint16 beyond."""
    return np.uint8 if num_experts <= 256 else np.uint16


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """Recorded expert choices of `S` samples with `T` token rows together, `L` MoE layers, `K` choices per token.

    experts_TLK      logical expert ids, uint8 if `num_experts` <= 256 else uint16; the K ids of a valid row differ
    offsets          sample `s` owns rows `offsets[s]:offsets[s + 1]`
    valid_T          False where nothing was recorded (the last token of a sample, lost rows); such rows hold any ids
    layer_ids        absolute 0-based decoder layer of each entry of the layer axis, ascending
    num_experts      logical experts per layer
    sample_ids       id of the sample; `group_ids`: of the prompt it answers; -1 when unknown
    prompt_lengths   rows that belong to the prompt; the rest is the response
    weight_versions  policy version that routed the sample
    token_hash_T     `hash_tokens` of the token of each row, or None; replay detects shifted rows with it
    group_names      names of groups 0, 1, ... (tasks, data sets); empty: groups have no names
    source           recorder or file that the trace comes from
    """

    experts_TLK: Shaped[ndarray, "T L K"]
    offsets: Int[ndarray, " S1"]
    valid_T: Bool[ndarray, " T"]
    layer_ids: Int[ndarray, " L"]
    num_experts: int
    sample_ids: Int[ndarray, " S"]
    group_ids: Int[ndarray, " S"]
    prompt_lengths: Int[ndarray, " S"]
    weight_versions: Int[ndarray, " S"]
    token_hash_T: UInt16[ndarray, " T"] | None = None
    group_names: tuple[str, ...] = ()
    source: str = "unknown"

    def __repr__(self) -> str:
        """Return its sizes; the arrays of a real trace fill screens."""
        T, L, K = self.experts_TLK.shape
        sizes = f"{self.num_samples:,} samples, {T:,} token rows, {L} MoE layers, {K} of {self.num_experts} experts"
        return f"RoutingTrace({sizes}, source {self.source!r})"

    def __post_init__(self) -> None:
        """Make the arrays read-only: several stages share the same bytes."""
        for field in fields(self):
            array = getattr(self, field.name)
            if isinstance(array, ndarray):
                frozen = array.view()
                frozen.setflags(write=False)
                object.__setattr__(self, field.name, frozen)

    @classmethod
    def from_samples(
        cls,
        experts: Sequence[ndarray],
        *,
        num_experts: int,
        layer_ids: Sequence[int] | None = None,
        moe_layers: Sequence[int] | None = None,
        valid: Sequence[ndarray] | None = None,
        tokens: Sequence[ndarray] | None = None,
        sample_ids: Sequence[int] | None = None,
        group_ids: Sequence[int] | None = None,
        prompt_lengths: Sequence[int] | None = None,
        weight_versions: Sequence[int] | None = None,
        group_names: Sequence[str] = (),
        source: str = "unknown",
    ) -> RoutingTrace:
        """Build and validate a trace from one `[n, L, K]` array of expert ids per sample.

        experts      `[n, L, K]` of any integer type; one row per token
        layer_ids    decoder layer of each entry of the layer axis; default: 0, 1, ...
        moe_layers   keep these layers only: engines report dense layers too, filled with zeros; default: all
        valid        one mask `[n]` per sample; default: every row valid
        tokens       token ids `[n]` per sample, kept only as a 16-bit hash per row; default: no hash
        raises       TraceError when shapes of the arrays differ or ids are out of range
        """
        if not 1 <= num_experts <= MAX_EXPERTS:
            raise TraceError(f"num_experts is {num_experts}: allowed are 1 to {MAX_EXPERTS}")
        arrays, layers = _select_layers(experts, layer_ids, moe_layers)
        rows = [len(array) for array in arrays]
        _check_row_counts(rows, valid=valid, tokens=tokens)
        offsets = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)
        valid_T = np.ones(offsets[-1], dtype=bool) if valid is None else np.concatenate(valid) != 0
        flat = np.concatenate([one.astype(np.int64) if one.dtype == np.uint64 else one for one in arrays])
        dtype = expert_dtype(num_experts)
        if flat.dtype != dtype:
            flat = np.where(valid_T[:, None, None], flat, np.arange(flat.shape[2]))  # invalid rows hold any ids
        given = {"group_ids": group_ids, "prompt_lengths": prompt_lengths, "weight_versions": weight_versions}
        given["sample_ids"] = range(len(arrays)) if sample_ids is None else sample_ids
        columns = {
            name: np.full(len(arrays), PER_SAMPLE[name]) if column is None else np.asarray(column, dtype=np.int64)
            for name, column in given.items()
        }
        trace = cls(
            experts_TLK=flat.astype(dtype, copy=False),
            offsets=offsets,
            valid_T=valid_T,
            layer_ids=np.asarray(layers, dtype=np.int32),
            num_experts=num_experts,
            token_hash_T=None if tokens is None else np.concatenate([hash_tokens(array) for array in tokens]),
            group_names=tuple(group_names),
            source=source,
            **columns,
        )
        trace._validate_shapes()
        trace._validate_ids(flat)  # before they are narrowed: ids beyond the type would wrap around
        return trace

    @property
    def num_samples(self) -> int:
        """Return the number of samples, `S`."""
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        """Return the token rows of all samples, `T`, invalid ones included."""
        return self.experts_TLK.shape[0]

    @property
    def num_layers(self) -> int:
        """Return the number of MoE layers, `L`."""
        return self.experts_TLK.shape[1]

    @property
    def top_k(self) -> int:
        """Return the choices per token, `K`."""
        return self.experts_TLK.shape[2]

    @property
    def rows_per_sample(self) -> Int[ndarray, " S"]:
        """Return the token rows of each sample, `[S]`."""
        return np.diff(self.offsets)

    def sample_rows(self, sample: int) -> slice:
        """Return the rows of one sample as a slice into the row axis."""
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))

    def select(self, samples: Iterable[int] | Int[ndarray, " n"]) -> RoutingTrace:
        """Return the trace of these samples, in this order; consecutive samples are a view, not a copy.

        samples   positions on the sample axis (not sample ids, not a mask)
        raises    TraceError when a position does not exist
        """
        given = samples if isinstance(samples, ndarray) else np.array([*samples])
        if len(given) and given.dtype.kind not in "iu":
            raise TraceError(f"select takes positions, got {given.dtype}: for a mask pass np.flatnonzero(mask)")
        index = given.astype(np.int64)
        outside = index[(index < 0) | (index >= self.num_samples)]
        if len(outside):
            raise TraceError(f"sample position {outside[0]} does not exist: the trace has 0..{self.num_samples - 1}")
        neighbours = len(index) > 0 and np.array_equal(index, np.arange(index[0], index[0] + len(index)))
        if neighbours:
            rows: slice | ndarray = slice(int(self.offsets[index[0]]), int(self.offsets[index[-1] + 1]))
        else:
            pieces = [np.arange(self.offsets[s], self.offsets[s + 1]) for s in index]
            rows = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
        return replace(
            self,
            offsets=np.concatenate([[0], np.cumsum(self.rows_per_sample[index])]).astype(np.int64),
            **{name: array[rows] for name in _PER_ROW if (array := getattr(self, name)) is not None},
            **{name: getattr(self, name)[index] for name in PER_SAMPLE},
        )

    def validate(self) -> None:
        """Check every rule of the class docstring, in O(T L K); raises TraceError that names the first fault."""
        self._validate_shapes()
        self._validate_ids(self.experts_TLK)

    def _validate_ids(self, experts_TLK: Shaped[ndarray, "T L K"]) -> None:
        if _is_legal_at_a_glance(experts_TLK, self.valid_T, self.num_experts):
            return
        row, layer, fault = first_illegal_row(experts_TLK, self.valid_T, self.num_experts)
        if fault:
            sample = int(np.searchsorted(self.offsets, row, side="right")) - 1
            where = f"sample {self.sample_ids[sample]}, row {row - self.offsets[sample]}, layer {self.layer_ids[layer]}"
            got = experts_TLK[row, layer].tolist()
            twice = f"hold the same id twice: a token takes {self.top_k} different experts"
            outside = f"leave the allowed range 0..{self.num_experts - 1}"
            raise TraceError(
                f"{where}: expert ids {got} {twice if fault == _TWICE else outside}; mark rows that were not recorded "
                "as invalid instead of filling them"
            )

    def _validate_shapes(self) -> None:
        T, L, K = self.experts_TLK.shape
        check_model_size(f"malformed trace (source {self.source!r}): it", L, self.num_experts)
        S, E, offsets, dtype = self.num_samples, self.num_experts, self.offsets, expert_dtype(self.num_experts)
        rising = bool(len(offsets)) and bool((offsets[1:] >= offsets[:-1]).all())  # np.diff would wrap around
        ids, hashes = self.layer_ids, self.token_hash_T
        ascending = ids.shape == (L,) and L >= 1 and ids[0] >= 0 and bool((np.diff(ids) > 0).all())
        required = {
            f"at most {MAX_SAMPLES:,} samples, got {S:,}": S <= MAX_SAMPLES,
            f"num_experts {E} is in 1..{MAX_EXPERTS}": 1 <= E <= MAX_EXPERTS,
            f"{K} choices fit into {E} experts, and are at most {MAX_TOP_K}": 1 <= K <= min(E, MAX_TOP_K),
            f"ids are stored as {dtype.__name__}, got {self.experts_TLK.dtype}": self.experts_TLK.dtype == dtype,
            f"offsets start at 0, never fall and end at {T} rows": rising and offsets[0] == 0 and offsets[-1] == T,
            f"offsets are int64 and valid_T is bool, got {offsets.dtype} and {self.valid_T.dtype}": (
                offsets.dtype == np.int64 and self.valid_T.dtype == np.bool_
            ),
            f"valid_T has one entry for each of {T} rows": self.valid_T.shape == (T,),
            f"token_hash_T has one entry for each of {T} rows": hashes is None or hashes.shape == (T,),
            f"layer_ids are {L} ascending layer numbers, got {ids.tolist()}": ascending,
        }
        for name in PER_SAMPLE:
            required[f"{name} has one entry for each of {S} samples"] = getattr(self, name).shape == (S,)
        for fact, holds in required.items():
            if not holds:
                raise TraceError(f"malformed trace (source {self.source!r}): required: {fact}")
        inside_S = (self.prompt_lengths >= 0) & (self.prompt_lengths <= self.rows_per_sample)
        if not inside_S.all():
            sample = int(np.flatnonzero(~inside_S)[0])
            raise TraceError(
                f"sample {self.sample_ids[sample]} has a prompt of {self.prompt_lengths[sample]} rows: allowed are "
                f"0 to {self.rows_per_sample[sample]}, the rows it has"
            )


def concatenate(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Join traces of one model, with hashes if all have them; raises TraceError where models or groups differ."""
    if not traces:
        raise TraceError("no traces to concatenate")
    first = traces[0]
    for i, other in enumerate(traces[1:], start=1):
        for name in ("num_experts", "top_k", "group_names", "layers"):
            got, of_0 = (t.layer_ids.tolist() if name == "layers" else getattr(t, name) for t in (other, first))
            if got != of_0:
                raise TraceError(f"trace {i} has {name} {got}, trace 0 has {of_0}: only traces of one model are joined")
    hashes = [trace.token_hash_T for trace in traces if trace.token_hash_T is not None]
    rows = np.concatenate([trace.rows_per_sample for trace in traces])
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces])
        for name in ("experts_TLK", "valid_T", *PER_SAMPLE)
    }
    return replace(
        first,
        token_hash_T=np.concatenate(hashes) if len(hashes) == len(traces) else None,
        offsets=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        **columns,
    )


def hash_tokens(tokens_n: Shaped[ndarray, " n"]) -> UInt16[ndarray, " n"]:
    """Hash each token id together with its position to 16 bits (Fibonacci hashing).

    If two neighbouring rows are swapped, each one's hash is wrong with probability 1 - 2^-16; so a shifted sample is
    detected. The text can be recovered from the hashes with the vocabulary: protect a trace with hashes like the text
    itself.

    >>> hash_tokens(np.array([7, 7])).tolist()
    [6464, 46968]
    """
    position_n = np.arange(1, len(tokens_n) + 1, dtype=np.uint64)
    mixed_n: ndarray = ((tokens_n.astype(np.uint64) << 32) + position_n) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed_n >> 48).astype(np.uint16)


_OUT_OF_RANGE, _TWICE = 1, 2


@compiled
@no_type_check
def first_illegal_row(experts_TLK: ndarray, valid_T: ndarray, num_experts: int) -> tuple[int, int, int]:
    """Return (row, layer, fault) of the first valid row with an id out of range or repeated; fault 0: none."""
    T, L, K = experts_TLK.shape
    seen_E = np.full(num_experts, -1, dtype=np.int64)
    for t in range(T):
        if not valid_T[t]:
            continue
        for layer in range(L):
            for k in range(K):
                expert = experts_TLK[t, layer, k]
                if expert < 0 or expert >= num_experts:
                    return t, layer, _OUT_OF_RANGE
                if seen_E[expert] == t * L + layer:
                    return t, layer, _TWICE
                seen_E[expert] = t * L + layer
    return 0, 0, 0


def _is_legal_at_a_glance(experts_TLK: ndarray, valid_T: ndarray, num_experts: int) -> bool:
    """Return True for rows that are legal for sure, at memory speed; False says nothing."""
    if experts_TLK.shape[2:] != (8,) or experts_TLK.dtype != np.uint8 or not experts_TLK.flags.c_contiguous:
        return False
    return int(experts_TLK.max(initial=0)) < num_experts and _differ_in_words(
        experts_TLK.view(np.uint64)[..., 0], valid_T
    )


@compiled
@no_type_check
def _differ_in_words(words_TL: ndarray, valid_T: ndarray) -> bool:
    """Return whether the eight bytes of each word of valid rows differ: a word equals its rotations in no byte."""
    low = np.uint64(0x7F7F7F7F7F7F7F7F)
    for t in range(len(words_TL)):
        same = np.uint64(0)
        for layer in range(words_TL.shape[1]):
            word = words_TL[t, layer]
            for step in (8, 16, 24, 32):
                other = word ^ ((word << np.uint64(step)) | (word >> np.uint64(64 - step)))
                same |= ~(((other & low) + low) | other | low)  # bit 7 of each byte that is zero
        if same and valid_T[t]:
            return False
    return True


def _select_layers(
    experts: Sequence[ndarray], layer_ids: Sequence[int] | None, moe_layers: Sequence[int] | None
) -> tuple[list[ndarray], list[int]]:
    """Return the routes of the layers to keep, and their layer ids."""
    if len(experts) == 0:
        raise TraceError("a trace needs at least one sample: got none; pass one [rows, layers, choices] array each")
    arrays = [np.asarray(array) for array in experts]  # torch tensors on the CPU included
    for s, array in enumerate(arrays):
        if array.ndim != 3 or array.shape[1:] != arrays[0].shape[1:] or array.dtype.kind not in "iu":
            raise TraceError(
                f"sample {s} has routes of type {array.dtype} and shape {array.shape}: expected integers "
                f"[rows, layers, choices], layers and choices as in sample 0, {arrays[0].shape}; "
                "give a list with one array per sample"
            )
    layers = list(range(arrays[0].shape[1]) if layer_ids is None else layer_ids)
    if moe_layers is None:
        return arrays, layers
    if len(layers) != arrays[0].shape[1] or not set(moe_layers) <= set(layers):
        raise TraceError(f"moe_layers {list(moe_layers)} are not all among the layers of the routes, {layers}")
    kept = [layers.index(layer) for layer in moe_layers]
    return [array[:, kept] for array in arrays], list(moe_layers)


def _check_row_counts(rows: Sequence[int], **columns: Sequence[ndarray] | None) -> None:
    for name, column in columns.items():
        lengths = None if column is None else [len(array) for array in column]
        if lengths is not None and lengths != rows:
            s = next((i for i, n in enumerate(rows) if i >= len(lengths) or lengths[i] != n), len(rows))
            raise TraceError(f"'{name}' and 'experts' disagree on the number of rows, first in sample {s}")
