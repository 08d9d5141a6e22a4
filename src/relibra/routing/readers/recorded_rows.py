"""Rows of recorded ids as a trace holds them: sample after sample, with a mask of the rows that were recorded.

Recorders that preallocate write ids [samples, tokens, layers, choices] and fill what they did not record with -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64, Integer
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_SAMPLES, MAX_TOP_K
from relibra.routing.trace import MAX_EXPERTS

HOW_TO_SAVE = 'numpy.savez("x.npz", ids=numpy.concatenate(samples), seqlen=[len(one) for one in samples])'
"""The line that saves a list of arrays [tokens, layers, choices], one per sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRows:
    """Rows of one set of samples, sample after sample.

    experts_TLK   ids of any integer type; 0 in rows that were not recorded
    valid_T       rows that were recorded
    length_S      rows of each sample
    """

    experts_TLK: Integer[ndarray, "T L K"]
    valid_T: Bool[ndarray, " T"]
    length_S: Int64[ndarray, " S"]


def join_rows(where: str, ids: ndarray, lengths: ndarray | None, valid: ndarray | None) -> RecordedRows:
    """Return the rows of an array of ids; rows that are -1 throughout are not recorded.

    where     begins messages: file and array
    ids       [tokens, layers, choices] sample after sample, or padded [samples, tokens, layers, choices]
    lengths   tokens of each sample; None: of padded samples, up to the last recorded row
    valid     whether a row was recorded, axes as `ids` without the last two; None: all rows but those of -1
    raises    TraceError for another shape or type, lengths that do not fit, or rows that are -1 in a part only
    """
    _check_axes(where, ids, samples=1 if lengths is None else lengths.size)
    if valid is not None:
        valid = check_mask(f"{where}: its mask (valid)", valid, ids.shape[:-2])
    if lengths is not None:
        lengths = check_whole_numbers(f"{where}: its lengths", lengths, high=ids.shape[-3] + 1)
    if ids.ndim == 4:
        ids, lengths, valid = _without_padding(where, ids, lengths, valid)
    if lengths is None:
        raise TraceError(
            f"{where} has no lengths of its samples ('seqlen': tokens of each, in order): save them beside the ids, "
            f"{HOW_TO_SAVE}"
        )
    if lengths.sum() != len(ids):
        raise TraceError(
            f"{where} has {len(ids):,} rows, and lengths (seqlen) of {len(lengths):,} samples sum to "
            f"{int(lengths.sum()):,}: give the tokens of each sample, in the order of the rows"
        )
    valid_T = recorded_rows(where, ids, valid) & (True if valid is None else valid)
    if not valid_T.any():
        raise TraceError(f"{where} has no recorded row: all are -1 or marked as not valid")
    if not valid_T.all():
        ids = np.where(valid_T[:, None, None], ids, 0)
    if not 0 <= ids.min() <= ids.max() < MAX_EXPERTS:
        raise TraceError(f"{where} holds ids {ids.min()}..{ids.max()}: allowed are 0..{MAX_EXPERTS - 1}")
    return RecordedRows(experts_TLK=ids, valid_T=valid_T, length_S=lengths)


def check_whole_numbers(where: str, array: ndarray, *, high: int) -> Int64[ndarray, " n"]:
    """Return a vector of whole numbers in 0..high-1 as int64; raises TraceError for anything else."""
    whole = array.ndim == 1 and array.dtype.kind in "iu"
    if not whole or (len(array) and not (array.min() >= 0 and array.max() < high)):
        raise TraceError(f"{where}: got {array.dtype} {array.shape}, expected whole numbers in 0..{high - 1}")
    return array.astype(np.int64)


def check_mask(where: str, mask: ndarray, shape: tuple[int, ...]) -> ndarray:
    """Return a mask as booleans; raises TraceError for another shape, and for fractions and texts."""
    if mask.shape != shape or mask.dtype.kind not in "biu":
        raise TraceError(f"{where} is {mask.dtype} {mask.shape}: expected true or false for each row, {shape}")
    return np.asarray(mask != 0)


def _check_axes(where: str, ids: ndarray, samples: int) -> None:
    if ids.ndim not in (3, 4) or ids.dtype.kind not in "iu":
        raise TraceError(
            f"{where} is {ids.dtype} {ids.shape}: expected integer [tokens, layers, choices], or padded "
            "[samples, tokens, layers, choices]"
        )
    if ids.size == 0:
        raise TraceError(f"{where} is {ids.dtype} {ids.shape} and holds no tokens: record some first")
    samples = max(samples, len(ids) if ids.ndim == 4 else 1)
    if ids.shape[-1] > MAX_TOP_K or samples > MAX_SAMPLES:
        raise TraceError(
            f"{where} has {ids.shape[-1]:,} choices and {samples:,} samples: allowed are {MAX_TOP_K} choices and "
            f"{MAX_SAMPLES:,} samples"
        )


def _without_padding(
    where: str, ids: ndarray, lengths: ndarray | None, valid: ndarray | None
) -> tuple[ndarray, ndarray, ndarray | None]:
    """Return ids, lengths and mask of padded samples with the rows of one sample after those of the other."""
    S, T = ids.shape[:2]
    if lengths is None:
        used_ST = (ids != -1).any(axis=(2, 3)) if ids.dtype.kind == "i" else np.ones((S, T), dtype=bool)
        used_ST = used_ST if valid is None else used_ST & valid
        lengths = np.where(used_ST.any(axis=1), T - used_ST[:, ::-1].argmax(axis=1), 0)
    elif len(lengths) != S:
        raise TraceError(f"{where} has {S:,} samples and {len(lengths):,} lengths: give the tokens of each sample")
    kept_ST = np.arange(T) < lengths[:, None]
    return ids[kept_ST], lengths, None if valid is None else valid[kept_ST]


def recorded_rows(where: str, experts_TLK: ndarray, valid_T: ndarray | None = None) -> Bool[ndarray, " T"]:
    """Return which rows are not -1 throughout; raises TraceError for those that are in a part, where they are valid."""
    if experts_TLK.dtype.kind == "u" or experts_TLK.min(initial=0) >= 0:
        return np.ones(len(experts_TLK), dtype=bool)
    absent_TLK = experts_TLK == -1
    absent_T = absent_TLK.all(axis=(1, 2))
    kept_T = ~absent_T if valid_T is None else valid_T & ~absent_T
    partly_T = absent_TLK.any(axis=(1, 2)) & kept_T
    if partly_T.any():
        _refuse_partial_rows(where, absent_TLK[kept_T], absent_TLK[partly_T][0], int(partly_T.argmax()))
    return np.asarray(~absent_T)


def _refuse_partial_rows(where: str, absent_TLK: ndarray, first_LK: ndarray, row: int) -> None:
    """Raise a TraceError for rows that are -1 in some layers, or in some choices; `first_LK` is the first of them."""
    dense_L: ndarray = np.all(absent_TLK, axis=(0, 2))
    if (absent_TLK == dense_L[:, None]).all():
        dense, kept = _few(np.flatnonzero(dense_L)), _few(np.flatnonzero(~dense_L))
        raise TraceError(
            f"{where} is -1 in every row of layers {dense}: leave out layers without experts, ids[..., {kept}, :] with "
            f"layers={kept} (an import: --layers)"
        )
    raise TraceError(
        f"{where}: row {row} is -1 in a part of layers {_few(np.flatnonzero(first_LK.any(axis=1)))}: a row is "
        "recorded in all layers and choices, or in none; ids[(ids < 0).any(axis=(-2, -1))] = -1 marks such rows as not "
        "recorded"
    )


def _few(numbers: ndarray) -> str:
    """Write a list of numbers, a long one in short."""
    texts = [str(number) for number in numbers.tolist()]
    return f"[{', '.join(texts if len(texts) <= 64 else [*texts[:4], '...', texts[-1]])}]"
