"""Read `.npz` archives of per-token expert choices, the form in which published recordings come.

Two layouts are understood, told apart by their arrays:

    ids [T, L, K], seqlen [S]                     one set of samples; optional dataset [S] and dataset_names name groups
    NAME_ids [T, L, K], NAME_seqlen [S], ...      one set of samples per group NAME; optional layers [L]
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.trace import RoutingTrace, expert_dtype

MAX_ARRAY_BYTES = 32 << 30


def read_token_choices(path: Path | str, num_experts: int | None = None) -> RoutingTrace:
    """Read one archive; every row is valid, because recordings of this form hold only rows that were routed.

    num_experts   the format does not hold it; None: the next multiple of 8 above the largest id, which is right for
                  most models (32, 64, 128, 160, 256, 384) and wrong for one with, say, 60 experts
    raises        TraceError when the archive is damaged, has other arrays, or ids beyond `num_experts`
    """
    path = Path(path)
    arrays = _load(path)
    if "ids" in arrays:
        sets = {"": ("ids", "seqlen")}
    else:
        names = [name.removesuffix("_ids") for name in arrays if name.endswith("_ids")]
        sets = {name: (f"{name}_ids", f"{name}_seqlen") for name in names}
    missing = [name for pair in sets.values() for name in pair if name not in arrays]
    if not sets or missing:
        raise TraceError(
            f"{path} holds {sorted(arrays)}: expected 'ids' with 'seqlen', or pairs 'NAME_ids' with 'NAME_seqlen'"
        )
    experts = [_checked_ids(path, name, arrays[name]) for name, _ in sets.values()]
    if len({array.shape[1:] for array in experts}) > 1:
        raise TraceError(f"{path}: sets differ in layers or choices: {[array.shape for array in experts]}")
    rows = [
        _checked_lengths(path, name, arrays[name], len(ids))
        for (_, name), ids in zip(sets.values(), experts, strict=True)
    ]
    experts_TLK = np.concatenate(experts)
    lengths_S = np.concatenate(rows)
    groups_S, group_names = _groups(path, arrays, list(sets), rows)
    layer_ids = arrays.get("layers", np.arange(experts_TLK.shape[1]))
    largest = int(experts_TLK.max())
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


def _load(path: Path) -> dict[str, ndarray]:
    """Load every array, sizes checked first: a small archive may unpack to more than memory holds."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > MAX_ARRAY_BYTES:
                raise TraceError(f"{path} would unpack to {size} bytes: at most {MAX_ARRAY_BYTES} are read at once")
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, EOFError, KeyError) as error:
        raise TraceError(f"{path} cannot be read as an .npz archive: {error}") from error


def _checked_ids(path: Path, name: str, array: ndarray) -> ndarray:
    if array.ndim != 3 or array.dtype.kind not in "iu" or array.size == 0:
        raise TraceError(f"{path}: {name} is {array.dtype} {array.shape}: expected integer [tokens, layers, choices]")
    if not 0 <= array.min() <= array.max() < 1 << 16:
        raise TraceError(f"{path}: {name} holds ids {array.min()}..{array.max()}: allowed are 0..65535")
    return array


def _checked_lengths(path: Path, name: str, array: ndarray, rows: int) -> ndarray:
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any() or array.sum(dtype=np.int64) != rows:
        raise TraceError(f"{path}: {name} must hold the lengths of samples that sum to {rows} rows")
    return array.astype(np.int64)


def _groups(
    path: Path, arrays: Mapping[str, ndarray], sets: list[str], rows: list[ndarray]
) -> tuple[ndarray, tuple[str, ...]]:
    if sets != [""]:
        return np.repeat(np.arange(len(sets)), [len(lengths) for lengths in rows]), tuple(sets)
    if "dataset" not in arrays or "dataset_names" not in arrays:
        return np.full(len(rows[0]), -1), ()
    dataset_S, names = arrays["dataset"], tuple(str(name) for name in arrays["dataset_names"])
    if dataset_S.shape != rows[0].shape or not 0 <= dataset_S.min() <= dataset_S.max() < len(names):
        raise TraceError(
            f"{path}: 'dataset' must name one of {len(names)} data sets for each of {len(rows[0])} samples"
        )
    return dataset_S.astype(np.int64), names
