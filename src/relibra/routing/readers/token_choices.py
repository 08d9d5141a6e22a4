"""Read `.npz` archives of per-token expert choices, the format of published recordings.

Two layouts are supported:

    ids [T, L, K], seqlen [S]                     one set of samples; optional dataset [S] and dataset_names name groups
    NAME_ids [T, L, K], NAME_seqlen [S], ...      one set of samples per group NAME; optional layers [L]

Arrays of a trainer's schedule (`given_schedule`) may lie beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_SAMPLES, MAX_TOP_K, check_model_size
from relibra.routing.readers.given_schedule import NAMES as SCHEDULE_NAMES
from relibra.routing.readers.npz_arrays import load_arrays
from relibra.routing.trace import RoutingTrace, expert_dtype


def read_token_choices(path: Path | str, num_experts: int | None = None) -> RoutingTrace:
    """Read one archive; every row is valid, because this format holds only routed rows.

    num_experts   experts per layer, not in the archive; None: the next multiple of 8 above the largest id (right for
                  32, 64, 128, 160, 256, 384 experts, wrong for 60)
    raises        TraceError when the archive is damaged, has other arrays, or ids above `num_experts` - 1
    """
    path = Path(path)
    arrays = {name: array for name, array in load_arrays(path).items() if name not in SCHEDULE_NAMES}
    if "ids" in arrays:
        sets = {"": ("ids", "seqlen")}
    else:
        names = [name.removesuffix("_ids") for name in arrays if name.endswith("_ids")]
        sets = {name: (f"{name}_ids", f"{name}_seqlen") for name in names}
    if "layers" in arrays:
        _checked_vector(path, "layers", arrays["layers"], high=1 << 31)
    missing = [name for pair in sets.values() for name in pair if name not in arrays]
    if not sets or missing:
        raise TraceError(
            f"{path} holds {sorted(arrays)}: expected 'ids' with 'seqlen', or pairs 'NAME_ids' with 'NAME_seqlen'"
        )
    experts = [_checked_ids(path, name, arrays[name]) for name, _ in sets.values()]
    if len({array.shape[1:] for array in experts}) > 1:
        raise TraceError(f"{path}: sets differ in layers or choices: {[array.shape for array in experts]}")
    _, L, K = experts[0].shape
    samples = sum(len(arrays[name]) for _, name in sets.values() if arrays[name].ndim)
    if K > MAX_TOP_K or samples > MAX_SAMPLES:
        raise TraceError(
            f"{path} has {K:,} choices and {samples:,} samples: allowed are {MAX_TOP_K} choices and "
            f"{MAX_SAMPLES:,} samples"
        )
    largest = max(int(array.max()) for array in experts)
    check_model_size(str(path), L, largest + 1)
    rows = [
        _checked_lengths(path, name, arrays[name], len(ids))
        for (_, name), ids in zip(sets.values(), experts, strict=True)
    ]
    experts_TLK = np.concatenate(experts)
    lengths_S = np.concatenate(rows)
    groups_S, group_names = _groups(path, arrays, list(sets), rows)
    layer_ids = arrays.get("layers", np.arange(L))
    if num_experts is None:
        num_experts = -(-(largest + 1) // 8) * 8
    elif largest >= num_experts:
        raise TraceError(f"{path} holds expert id {largest}: with {num_experts} experts ids end at {num_experts - 1}")
    trace = RoutingTrace(
        experts_TLK=experts_TLK.astype(expert_dtype(num_experts)),
        offsets=np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int64),
        valid_T=np.ones(len(experts_TLK), dtype=bool),
        layer_ids=layer_ids.astype(np.int32),
        num_experts=num_experts,
        sample_ids=np.arange(len(lengths_S)),
        group_ids=groups_S,
        prompt_lengths=np.zeros(len(lengths_S), dtype=np.int64),
        weight_versions=np.zeros(len(lengths_S), dtype=np.int64),
        group_names=group_names,
        source=path.name,
    )
    trace.validate()
    return trace


def _checked_ids(path: Path, name: str, array: ndarray) -> ndarray:
    if array.ndim != 3 or array.dtype.kind not in "iu" or array.size == 0:
        if array.ndim == 3 and not len(array):
            raise TraceError(f"{path}: {name} holds no tokens: record some first")
        raise TraceError(f"{path}: {name} is {array.dtype} {array.shape}: expected integer [tokens, layers, choices]")
    if not 0 <= array.min() <= array.max() < 1 << 16:
        raise TraceError(f"{path}: {name} holds ids {array.min()}..{array.max()}: allowed are 0..65535")
    return array


def _checked_lengths(path: Path, name: str, array: ndarray, rows: int) -> ndarray:
    lengths = _checked_vector(path, name, array, high=rows + 1)  # each is bounded: the sum alone could wrap around
    if lengths.sum() != rows:
        raise TraceError(f"{path}: {name} must hold the lengths of samples that sum to {rows} rows")
    return lengths


def _checked_vector(path: Path, name: str, array: ndarray, *, high: int) -> ndarray:
    """Return a vector of whole numbers in 0..high-1 as int64."""
    whole = array.ndim == 1 and array.dtype.kind in "iu"
    if not whole or (len(array) and not (array.min() >= 0 and array.max() < high)):
        raise TraceError(f"{path}: {name} is {array.dtype} {array.shape}: expected whole numbers in 0..{high - 1}")
    return array.astype(np.int64)


def _groups(
    path: Path, arrays: Mapping[str, ndarray], sets: list[str], rows: list[ndarray]
) -> tuple[ndarray, tuple[str, ...]]:
    if sets != [""]:
        return np.repeat(np.arange(len(sets)), [len(lengths) for lengths in rows]), tuple(sets)
    if "dataset" not in arrays or "dataset_names" not in arrays:
        return np.full(len(rows[0]), -1), ()
    try:
        names = tuple(str(name) for name in np.atleast_1d(arrays["dataset_names"]).reshape(-1))
    except (SystemError, ValueError) as error:  # numbers that are no characters
        raise TraceError(f"{path}: 'dataset_names' holds no text: {error}") from error
    dataset_S = _checked_vector(path, "dataset", arrays["dataset"], high=len(names))
    if dataset_S.shape != rows[0].shape:
        raise TraceError(
            f"{path}: 'dataset' must name one of {len(names)} data sets for each of {len(rows[0])} samples"
        )
    return dataset_S, names
