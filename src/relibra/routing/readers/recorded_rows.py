"""Checks of recorded arrays that several readers share: rows of -1, masks, vectors of whole numbers."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int64
from numpy import ndarray

from relibra.errors import TraceError


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


def recorded_rows(where: str, experts_TLK: ndarray, valid_T: ndarray | None = None) -> Bool[ndarray, " T"]:
    """Return which rows are not -1 throughout; raises TraceError for a valid row that is -1 in a part only."""
    if experts_TLK.dtype.kind == "u" or experts_TLK.min(initial=0) >= 0:
        return np.ones(len(experts_TLK), dtype=bool)
    absent_TLK = experts_TLK == -1
    absent_T = absent_TLK.all(axis=(1, 2))
    kept_T = ~absent_T if valid_T is None else valid_T & ~absent_T
    partly_T = absent_TLK.any(axis=(1, 2)) & kept_T
    if partly_T.any():
        dense_L: ndarray = np.all(absent_TLK[kept_T], axis=(0, 2))
        if (absent_TLK[kept_T] == dense_L[:, None]).all():
            kept = _few(np.flatnonzero(~dense_L))
            raise TraceError(
                f"{where} is -1 in every row of layers {_few(np.flatnonzero(dense_L))}: leave out layers without "
                f"experts, ids[..., {kept}, :] with layers={kept} (an import: --layers)"
            )
        row = int(partly_T.argmax())
        raise TraceError(
            f"{where}: row {row} is -1 in a part of layers {_few(np.flatnonzero(absent_TLK[row].any(axis=1)))}: a row "
            "is recorded in all layers and choices, or in none; ids[(ids < 0).any(axis=(-2, -1))] = -1 marks such rows "
            "as not recorded"
        )
    return np.asarray(~absent_T)


def _few(numbers: ndarray) -> str:
    """Write a list of numbers, a long one in short."""
    texts = [str(number) for number in numbers.tolist()]
    return f"[{', '.join(texts if len(texts) <= 64 else [*texts[:4], '...', texts[-1]])}]"
