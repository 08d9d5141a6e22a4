"""Read `.npz` and `.npy` files of per-token expert choices, the formats of published recordings.

Two layouts of an `.npz` are supported, with ids [T, L, K], sample after sample, or padded [S, T, L, K]:

    ids, seqlen [S]                     one set of samples; optional dataset [S] and dataset_names name groups
    NAME_ids, NAME_seqlen [S], ...      one set of samples per group NAME

Optional are layers [L], and valid or NAME_valid [T] or [S, T]: rows that were recorded. Rows of -1 were not. seqlen may
be missing where ids are padded: samples end at their last recorded row. An `.npy` is ids alone, of one sample or of
padded samples. Arrays of a trainer's schedule (`given_schedule`) may lie beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_SAMPLES, MAX_TOP_K, check_model_size
from relibra.routing.readers.given_schedule import NAMES as SCHEDULE_NAMES
from relibra.routing.readers.npz_arrays import load_array, load_arrays
from relibra.routing.readers.recorded_rows import check_mask, check_whole_numbers, recorded_rows
from relibra.routing.trace import MAX_EXPERTS, RoutingTrace, expert_dtype

MAX_NAMES = 1 << 20
"""Most groups of an archive: short names take ten times their bytes in memory."""
HOW_TO_SAVE = 'numpy.savez("x.npz", ids=numpy.concatenate(samples), seqlen=[len(one) for one in samples])'
"""The line that saves a list of arrays [tokens, layers, choices], one per sample."""
_Rows = tuple[ndarray, ndarray, ndarray]
"""Rows of a set of samples, sample after sample: ids, 0 where not recorded; mask of recorded rows; rows per sample."""


def read_token_choices(path: Path | str, num_experts: int | None = None) -> RoutingTrace:
    """Read one file; rows of -1, or outside of a given mask, are invalid, as nothing was recorded there.

    num_experts   experts per layer, not in the file; None: the next multiple of 8 above the largest id (right for
                  32, 64, 128, 160, 256, 384 experts, wrong for 60)
    raises        TraceError when the file is damaged, has other arrays, or ids above `num_experts` - 1
    """
    path = Path(path)
    if path.suffix == ".npy":
        ids = load_array(path)
        arrays, sets = {}, {"": _rows_of(str(path), ids, np.array([len(ids)]) if ids.ndim == 3 else None, None)}
    else:
        arrays = {name: array for name, array in load_arrays(path).items() if name not in SCHEDULE_NAMES}
        sets = _sets(path, arrays)
    shapes = [ids.shape for ids, _, _ in sets.values()]
    if len({shape[1:] for shape in shapes}) > 1:
        raise TraceError(f"{path}: sets differ in layers or choices: {shapes}")
    lengths_S = np.concatenate([lengths for _, _, lengths in sets.values()])
    if len(lengths_S) > MAX_SAMPLES:
        raise TraceError(f"{path} has {len(lengths_S):,} samples: allowed are {MAX_SAMPLES:,}")
    layer_ids = check_whole_numbers(f"{path}: layers", arrays.get("layers", np.arange(shapes[0][1])), high=1 << 31)
    largest = max(int(ids.max()) for ids, _, _ in sets.values())
    check_model_size(str(path), shapes[0][1], largest + 1)
    if num_experts is None:
        num_experts = -(-(largest + 1) // 8) * 8
    elif largest >= num_experts:
        raise TraceError(f"{path} holds expert id {largest}: with {num_experts} experts ids end at {num_experts - 1}")
    groups_S, group_names = _groups(path, arrays, sets)
    trace = RoutingTrace(
        experts_TLK=np.concatenate([ids for ids, _, _ in sets.values()]).astype(expert_dtype(num_experts)),
        offsets=np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int64),
        valid_T=np.concatenate([valid for _, valid, _ in sets.values()]),
        layer_ids=layer_ids.astype(np.int32),
        num_experts=num_experts,
        sample_ids=np.arange(len(lengths_S)),
        group_ids=groups_S,
        prompt_lengths=np.zeros(len(lengths_S), dtype=np.int64),
        weight_versions=np.zeros(len(lengths_S), dtype=np.int64),
        group_names=group_names,
        source=path.name,
    )
    try:
        trace.validate()
    except TraceError as error:
        raise TraceError(
            f"{path}: {error} (as not recorded count rows of -1, rows beyond seqlen where ids are padded, and rows "
            "that an array 'valid' leaves out)"
        ) from error
    return trace


def _sets(path: Path, arrays: Mapping[str, ndarray]) -> dict[str, _Rows]:
    """Return the rows of each set of samples, in the order of the archive; the name of the set 'ids' is empty."""
    names = [""] if "ids" in arrays else [name.removesuffix("_ids") for name in arrays if name.endswith("_ids")]
    if not names:
        raise TraceError(
            f"{path} holds {sorted(arrays)}: expected 'ids' with 'seqlen', or pairs 'NAME_ids' with 'NAME_seqlen': "
            f"{HOW_TO_SAVE}"
        )
    prefixes = {name: f"{name}_" * bool(name) for name in names}
    return {
        name: _rows_of(f"{path}: {pre}ids", arrays[f"{pre}ids"], arrays.get(f"{pre}seqlen"), arrays.get(f"{pre}valid"))
        for name, pre in prefixes.items()
    }


def _rows_of(where: str, ids: ndarray, lengths: ndarray | None, valid: ndarray | None) -> _Rows:
    """Return the rows of an array of ids in either layout."""
    if ids.ndim not in (3, 4) or ids.dtype.kind not in "iu":
        raise TraceError(
            f"{where} is {ids.dtype} {ids.shape}: expected integer [tokens, layers, choices], or padded "
            "[samples, tokens, layers, choices]"
        )
    if ids.size == 0:
        raise TraceError(f"{where} is {ids.dtype} {ids.shape} and holds no tokens: record some first")
    samples = max(1 if lengths is None else lengths.size, len(ids) if ids.ndim == 4 else 1)
    if ids.shape[-1] > MAX_TOP_K or samples > MAX_SAMPLES:
        raise TraceError(
            f"{where} has {ids.shape[-1]:,} choices and {samples:,} samples: allowed are {MAX_TOP_K} choices and "
            f"{MAX_SAMPLES:,} samples"
        )
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
    return ids, valid_T, lengths


def _without_padding(
    where: str, ids: ndarray, lengths: ndarray | None, valid: ndarray | None
) -> tuple[ndarray, ndarray, ndarray | None]:
    """Return ids, lengths and mask of padded samples with the rows of one sample after those of the other."""
    S, T = ids.shape[:2]
    if lengths is None:
        used_ST = np.any(ids != -1, axis=(2, 3)) & (True if valid is None else valid)
        lengths = np.where(used_ST.any(axis=1), T - used_ST[:, ::-1].argmax(axis=1), 0)
    elif len(lengths) != S:
        raise TraceError(f"{where} has {S:,} samples and {len(lengths):,} lengths: give the tokens of each sample")
    kept_ST = np.arange(T) < lengths[:, None]
    return ids[kept_ST], lengths, None if valid is None else valid[kept_ST]


def _groups(path: Path, arrays: Mapping[str, ndarray], sets: Mapping[str, _Rows]) -> tuple[ndarray, tuple[str, ...]]:
    """Return the group of each sample, and the names of groups."""
    lengths = [len(lengths) for _, _, lengths in sets.values()]
    if list(sets) != [""]:
        return np.repeat(np.arange(len(sets)), lengths), tuple(sets)
    if "dataset" not in arrays or "dataset_names" not in arrays:
        return np.full(lengths[0], -1), ()
    if arrays["dataset_names"].size > MAX_NAMES:
        raise TraceError(f"{path}: 'dataset_names' has more than {MAX_NAMES:,} names")
    try:
        names = tuple(str(name) for name in np.atleast_1d(arrays["dataset_names"]).reshape(-1))
    except (SystemError, ValueError) as error:  # numbers that are no characters
        raise TraceError(f"{path}: 'dataset_names' holds no text: {error}") from error
    dataset_S = check_whole_numbers(f"{path}: dataset", arrays["dataset"], high=len(names))
    if len(dataset_S) != lengths[0]:
        raise TraceError(f"{path}: 'dataset' must name one of {len(names)} data sets for each of {lengths[0]} samples")
    return dataset_S, names
