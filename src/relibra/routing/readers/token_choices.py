"""Read `.npz` and `.npy` files of per-token expert choices, the formats of published recordings.

Two layouts of an `.npz` are supported, with ids [T, L, K] or padded [S, T, L, K]:

    ids, seqlen [S]                     one set of samples; optional dataset [S] and dataset_names name groups
    NAME_ids, NAME_seqlen [S], ...      one set of samples per group NAME

Optional are layers [L], and valid or NAME_valid [T] or [S, T]: rows that were recorded. Rows of -1 were not. seqlen may
be missing where ids are padded. An `.npy` is ids alone, of one sample or of padded samples.

Arrays of a trainer's schedule (`given_schedule`) may lie beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_SAMPLES, check_model_size
from relibra.routing.readers.given_schedule import NAMES as SCHEDULE_NAMES
from relibra.routing.readers.npz_arrays import load_array, load_arrays
from relibra.routing.readers.recorded_rows import HOW_TO_SAVE, RecordedRows, check_whole_numbers, join_rows
from relibra.routing.trace import RoutingTrace, expert_dtype

MAX_NAMES = 1 << 20
"""Most groups of an archive: short names take ten times their bytes in memory."""


def read_token_choices(path: Path | str, num_experts: int | None = None) -> RoutingTrace:
    """Read one file; rows of -1, or outside of a given mask, are invalid, as nothing was recorded there.

    num_experts   experts per layer, not in the file; None: the next multiple of 8 above the largest id (right for
                  32, 64, 128, 160, 256, 384 experts, wrong for 60)
    raises        TraceError when the file is damaged, has other arrays, or ids above `num_experts` - 1
    """
    path = Path(path)
    if path.suffix == ".npy":
        ids = load_array(path)
        arrays, sets = {}, {"": join_rows(str(path), ids, np.array([len(ids)]) if ids.ndim == 3 else None, None)}
    else:
        arrays = {name: array for name, array in load_arrays(path).items() if name not in SCHEDULE_NAMES}
        sets = _sets(path, arrays)
    shapes = [rows.experts_TLK.shape for rows in sets.values()]
    if len({shape[1:] for shape in shapes}) > 1:
        raise TraceError(f"{path}: sets differ in layers or choices: {shapes}")
    lengths_S = np.concatenate([rows.length_S for rows in sets.values()])
    if len(lengths_S) > MAX_SAMPLES:
        raise TraceError(f"{path} has {len(lengths_S):,} samples: allowed are {MAX_SAMPLES:,}")
    layer_ids = np.arange(shapes[0][1])
    if "layers" in arrays:
        layer_ids = check_whole_numbers(f"{path}: layers", arrays["layers"], high=1 << 31)
    largest = max(int(rows.experts_TLK.max()) for rows in sets.values())
    check_model_size(str(path), shapes[0][1], largest + 1)
    if num_experts is None:
        num_experts = -(-(largest + 1) // 8) * 8
    elif largest >= num_experts:
        raise TraceError(f"{path} holds expert id {largest}: with {num_experts} experts ids end at {num_experts - 1}")
    groups_S, group_names = _groups(path, arrays, sets)
    trace = RoutingTrace(
        experts_TLK=np.concatenate([rows.experts_TLK for rows in sets.values()]).astype(expert_dtype(num_experts)),
        offsets=np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int64),
        valid_T=np.concatenate([rows.valid_T for rows in sets.values()]),
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
            f"{path}: {error} (not recorded are rows of -1, those beyond seqlen where ids are padded, and those that "
            "an array 'valid' says)"
        ) from error
    return trace


def _sets(path: Path, arrays: Mapping[str, ndarray]) -> dict[str, RecordedRows]:
    """Return the rows of each set of samples, in the order of the archive; the name of an only set is empty."""
    names = [""] if "ids" in arrays else [name.removesuffix("_ids") for name in arrays if name.endswith("_ids")]
    if not names:
        raise TraceError(
            f"{path} holds {sorted(arrays)}: expected 'ids' with 'seqlen', or pairs 'NAME_ids' with 'NAME_seqlen': "
            f"{HOW_TO_SAVE}"
        )
    found = {}
    for name in names:
        before = f"{name}_" * bool(name)
        found[name] = join_rows(
            f"{path}: {before}ids",
            arrays[f"{before}ids"],
            arrays.get(f"{before}seqlen"),
            arrays.get(f"{before}valid"),
        )
    return found


def _groups(
    path: Path, arrays: Mapping[str, ndarray], sets: Mapping[str, RecordedRows]
) -> tuple[ndarray, tuple[str, ...]]:
    lengths = [len(rows.length_S) for rows in sets.values()]
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
