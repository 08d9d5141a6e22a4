"""Turn samples as other programs recorded them into pieces of a trace, and count what was not recorded.

Padding, fillers and missing rows become rows without a route. What could mean two things is refused; the message names
the option that says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from relibra.errors import TraceError
from relibra.number_ranges import format_ranges
from relibra.routing.array_sizes import MAX_SAMPLES, MAX_TOP_K, check_array_size
from relibra.routing.import_choices import ShortRows, ZeroRows
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.recorded_rows import recorded_rows
from relibra.routing.trace import RoutingTrace, expert_dtype

PIECE_BYTES = 64 << 20
"""Bytes of routes, one per id, at which a piece ends; its last sample may exceed them."""
SAMPLE_BYTES = 1 << 10
"""Memory of a sample beside its routes, counted for each: samples without tokens fill a piece too."""
MAX_TOKENS = 1 << 28
"""Most tokens of a sample."""


@dataclass(kw_only=True)
class ImportCounts:
    """What an import found: samples and rows written, rows without a route, zero rows, samples left out."""

    samples: int = 0
    rows: int = 0
    missing_rows: int = 0
    zero_rows: int = 0
    dropped_samples: int = 0


def iterate_pieces(
    samples: Iterable[RoutedSample], rules: ImportRules, counts: ImportCounts, *, source: str
) -> Iterator[RoutingTrace]:
    """Yield traces of about `PIECE_BYTES`, samples in the order given.

    counts    counted while pieces are taken
    raises    TraceError for shapes that differ, illegal ids, and everything that could mean two things
    """
    waiting: list[RoutedSample] = []
    names: dict[str, int] = {}
    held, first, number = 0, None, 0
    for number, sample in enumerate(samples, start=1):
        if number > MAX_SAMPLES:
            raise TraceError(f"{source} has more than {MAX_SAMPLES:,} samples: import it in parts")
        checked = _checked(sample, rules, counts, first)
        first = first or sample
        if checked is None:
            continue
        waiting.append(checked)
        held += (checked.tokens or 0) * math.prod(checked.ids_TLK.shape[1:]) + SAMPLE_BYTES
        if held >= PIECE_BYTES:
            yield _piece(waiting, rules, counts, names, source)
            waiting, held = [], 0
    if waiting:
        yield _piece(waiting, rules, counts, names, source)
    if first is None:
        raise TraceError(f"{source} holds no routes: nothing to import")
    if counts.samples == 0:
        raise TraceError(f"{source}: all of {number:,} samples were left out: nothing to import")


def _checked(
    sample: RoutedSample, rules: ImportRules, counts: ImportCounts, first: RoutedSample | None
) -> RoutedSample | None:
    """Return a sample with its number of tokens, first token and rows without a route; None: it is left out."""
    ids_TLK, where = sample.ids_TLK, sample.where
    whole_numbers = ids_TLK.ndim == 3 and ids_TLK.dtype.kind in "iu"
    if not whole_numbers or not ids_TLK.shape[1] or not 1 <= ids_TLK.shape[2] <= MAX_TOP_K:
        raise TraceError(
            f"{where} has routes of type {ids_TLK.dtype} and shape {ids_TLK.shape}: expected integers [rows, layers, "
            f"choices] with 1 to {MAX_TOP_K} choices"
        )
    if first is not None and ids_TLK.shape[1:] != first.ids_TLK.shape[1:]:
        raise TraceError(
            f"{where} has routes of shape {ids_TLK.shape}, {first.where} of {first.ids_TLK.shape}: import samples of "
            "one model, with its layers and choices"
        )
    ids_TLK = ids_TLK[:, _layer_places(where, ids_TLK.shape[1], rules)]
    tokens, start = _tokens_and_start(sample, rules)
    recorded_T = np.ones(len(ids_TLK), dtype=bool) if sample.absent_T is None else ~sample.absent_T
    if sample.last_absent and len(ids_TLK) and start + len(ids_TLK) == tokens:
        recorded_T[-1] = False
    lowest = ids_TLK.min(initial=0) if ids_TLK.dtype.kind == "i" else 0
    highest = ids_TLK.max(initial=0)
    if lowest < 0:
        recorded_T &= recorded_rows(where, ids_TLK, recorded_T)
    zero_T = recorded_T & _zero_rows(ids_TLK)
    if zero_T.any():
        counts.zero_rows += int(zero_T.sum())
        if rules.zero_rows is ZeroRows.REFUSE:
            _refuse_zero_rows(where, zero_T, recorded_T)
        if rules.zero_rows is ZeroRows.DROP_SAMPLE:
            counts.dropped_samples += 1
            return None
        recorded_T &= ~zero_T
    _refuse_zero_layers(where, ids_TLK, recorded_T, rules)
    if not 0 <= lowest <= highest < rules.num_experts:
        bad_T = recorded_T & ((ids_TLK < 0) | (ids_TLK >= rules.num_experts)).any(axis=(1, 2))
        if bad_T.any():
            row = int(bad_T.argmax())
            raise TraceError(
                f"{where}, row {row} holds ids {ids_TLK[row].min()} to {ids_TLK[row].max()}: with {rules.num_experts} "
                f"experts allowed are 0 to {rules.num_experts - 1}"
            )
    return replace(sample, ids_TLK=ids_TLK, tokens=tokens, start=start, absent_T=~recorded_T)


def _layer_places(where: str, recorded: int, rules: ImportRules) -> slice | list[int]:
    """Return which entries of the layer axis are kept."""
    layers = rules.layers
    if layers is None or len(layers) == recorded:
        return slice(None)
    if layers[-1] >= recorded:
        raise TraceError(
            f"{where} has {recorded} layers, and --layers names {len(layers)}, up to layer {layers[-1]}: the layer "
            f"axis holds either all decoder layers or those with experts alone; name the layers of this model"
        )
    if layers == tuple(range(layers[0], layers[-1] + 1)):
        return slice(layers[0], layers[-1] + 1)
    return list(layers)


def _tokens_and_start(sample: RoutedSample, rules: ImportRules) -> tuple[int, int]:
    """Return the tokens of a sample and the token of its first row."""
    rows, start = len(sample.ids_TLK), sample.start
    tokens = rows + start if sample.tokens is None else sample.tokens
    if not 0 <= start <= tokens <= MAX_TOKENS:
        raise TraceError(f"{sample.where} has {tokens:,} tokens and rows from token {start:,} on")
    if not 0 <= sample.prompt_tokens <= tokens:
        raise TraceError(f"{sample.where} has a prompt of {sample.prompt_tokens:,} tokens and {tokens:,} in all")
    short = tokens - 1 - start - rows
    if short < -1:
        raise TraceError(
            f"{sample.where} has {rows:,} rows from token {start:,} on for {tokens:,} tokens: expected one for each, "
            "or one less; these routes are of another sample"
        )
    if short > 0 and rules.short_rows is ShortRows.REFUSE:
        raise TraceError(
            f"{sample.where} has {rows:,} rows for {tokens:,} tokens, {short:,} less than were processed: say which "
            "tokens lack them, --short-rows first (rows of the prompt were not asked for) or --short-rows last (the "
            "recording was cut)"
        )
    if short > 0 and rules.short_rows is ShortRows.FIRST:
        start += short
    return tokens, start


def _zero_rows(ids_TLK: ndarray) -> Bool[ndarray, " T"]:
    """Return which rows are zero throughout; none with one choice per token, where zeros are legal."""
    T, L, K = ids_TLK.shape
    if K < 2 or L == 0:
        return np.zeros(T, dtype=bool)
    zero_T: ndarray = (ids_TLK[:, 0, 0] == 0) & (ids_TLK[:, 0, 1] == 0)
    candidates = np.flatnonzero(zero_T)
    zero_T[candidates] = ~ids_TLK[candidates].any(axis=(1, 2))
    return zero_T


def _refuse_zero_rows(where: str, zero_T: ndarray, recorded_T: ndarray) -> None:
    zeros = int(zero_T.sum())
    if zeros == recorded_T.sum():
        raise TraceError(
            f"{where}: all of its {zeros:,} rows are zero: the engine captured nothing (vLLM: --enforce-eager, or a "
            "capture plug-in); --zero-rows drop-sample leaves such samples out"
        )
    raise TraceError(
        f"{where}: {zeros:,} of {len(zero_T):,} rows are zero in every layer, the first is row {zero_T.argmax()}: "
        "the engine did not compute them (a prefix from a cache, a hybrid model); choose --zero-rows missing (rows "
        "without a route) or --zero-rows drop-sample"
    )


def _refuse_zero_layers(where: str, ids_TLK: ndarray, recorded_T: ndarray, rules: ImportRules) -> None:
    """Raise TraceError for layers that are zero in each recorded row: dense, or not captured."""
    if ids_TLK.shape[2] < 2 or not recorded_T.any():
        return
    suspects = np.flatnonzero(~ids_TLK[int(recorded_T.argmax())].any(axis=1)).tolist()
    zero = [layer for layer in suspects if not ids_TLK[recorded_T, layer].any()]
    if zero and rules.layers is not None:
        zero = [rules.layers[layer] for layer in zero]
        raise TraceError(f"{where}: layers {zero} of --layers are zero in every row: the engine did not capture them")
    if zero:
        kept = format_ranges([layer for layer in range(ids_TLK.shape[1]) if layer not in zero], ",")
        raise TraceError(
            f"{where}: layers {zero} are zero in every row: they have no experts, or were not captured; --layers "
            f"{kept} imports the others"
        )


def _piece(
    samples: list[RoutedSample], rules: ImportRules, counts: ImportCounts, names: dict[str, int], source: str
) -> RoutingTrace:
    """Return one trace of checked samples; every id is copied once, and rows without a route hold 0."""
    offsets = np.cumsum([0, *(sample.tokens or 0 for sample in samples)], dtype=np.int64)
    T, L, K = int(offsets[-1]), *samples[0].ids_TLK.shape[1:]
    check_array_size(f"routes of {source}", 2, sum(sample.ids_TLK.nbytes for sample in samples), T=T, L=L, K=K)
    experts_TLK, valid_T = np.empty((T, L, K), dtype=expert_dtype(rules.num_experts)), np.zeros(T, dtype=bool)
    for sample, offset in zip(samples, offsets.tolist(), strict=False):
        rows = slice(offset + sample.start, offset + sample.start + len(sample.ids_TLK))
        np.copyto(experts_TLK[rows], sample.ids_TLK, casting="unsafe")
        valid_T[rows] = True if sample.absent_T is None else ~sample.absent_T
    experts_TLK[~valid_T] = 0
    groups = [-1 if sample.group is None else names.setdefault(sample.group, len(names)) for sample in samples]
    ids = [counts.samples + i if sample.sample_id is None else sample.sample_id for i, sample in enumerate(samples)]
    trace = RoutingTrace(
        experts_TLK=experts_TLK,
        offsets=offsets,
        valid_T=valid_T,
        layer_ids=np.array(rules.layers if rules.layers is not None else range(L), dtype=np.int32),
        num_experts=rules.num_experts,
        sample_ids=np.array(ids, dtype=np.int64),
        group_ids=np.array(groups, dtype=np.int64),
        prompt_lengths=np.array([sample.prompt_tokens for sample in samples], dtype=np.int64),
        weight_versions=np.array([sample.version for sample in samples], dtype=np.int64),
        source=source,
    )
    try:
        trace.validate()
    except TraceError as error:
        raise TraceError(f"{samples[0].where} and the samples after it: {error}") from error
    counts.samples += len(samples)
    counts.rows += T
    counts.missing_rows += int((~valid_T).sum())
    return trace
