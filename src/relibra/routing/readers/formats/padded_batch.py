"""Read batches of verl, SkyRL and NeMo-RL: one padded array of routes for all samples, and masks.

framework  version                routes and what says which rows are real
verl       0.9.1, main 1dda039    routed_experts [X, n, L, K] int16: a sample's rows begin at its first token, behind
                                  the padding on the left of its prompt; elsewhere, and for its last token, zeros.
                                  attention_mask [X, n]; responses or response_mask [X, r]; or rows [T, L, K] of all
                                  samples with offsets [X + 1] (values and offsets of the jagged tensor)
SkyRL      a956457 (2026-08-21)   rollout_expert_indices [X, n, L, K], padded on the left; attention_mask [X, n];
                                  router_padding_mask [X, n] is true where no route was recorded; fillers are 0, 1, ...
NeMo-RL    7ea279a (2026-08-22)   routed_experts [X, n, L, K], padded on the right; input_lengths [X]; rows of -1 are
                                  missing; the row of the last token is a filler

Containers: a dictionary of tensors in a torch file (.pt), safetensors, .npz; for SkyRL also the pickle that
`trainer.dump_data_batch` writes (.pkl).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.array_sizes import MAX_SAMPLES
from relibra.routing.readers.encodings.inert_pickle import InertObject, read_pickle
from relibra.routing.readers.encodings.mapped_file import map_file
from relibra.routing.readers.encodings.safetensors_file import map_safetensors
from relibra.routing.readers.encodings.torch_archive import (
    TorchArchive,
    as_bytes,
    as_mapping,
    checked_shape,
    named_dtype,
)
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.npz_arrays import damage_errors, load_arrays
from relibra.routing.readers.recorded_rows import check_mask, check_whole_numbers

NAMES = (
    "routed_experts", "rollout_expert_indices", "attention_mask", "response_mask", "responses", "router_padding_mask",
    "input_lengths", "offsets", "prompt_lengths",
)  # fmt: skip
"""Arrays that are read; a batch has many others."""


def read_verl_batch(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield the samples of a batch of verl."""
    arrays = open_batch(path)
    if "offsets" in arrays:
        yield from _jagged(path, arrays)
        return
    routes = _array(path, arrays, "routed_experts", 4)
    answers = arrays.get("responses", arrays.get("response_mask"))
    width = 0 if answers is None else _array(path, {"responses": answers}, "responses", 2).shape[1]
    mask = check_mask(f"{path}: attention_mask", _named(path, arrays, "attention_mask"), routes.shape[:2])
    for sample, mask_T in enumerate(mask):
        rows = _real_rows(f"{path}, sample {sample}", mask_T)
        prompt = int(mask_T[: len(mask_T) - width].sum()) if 0 < width <= len(mask_T) else 0
        yield RoutedSample(
            where=f"{path}, sample {sample}",
            ids_TLK=routes[sample, rows],
            tokens=rows.stop - rows.start,
            last_absent=True,
            prompt_tokens=prompt,
        )


def read_skyrl_batch(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield the samples of a batch of SkyRL; samples without any route are padding of the batch and left out."""
    arrays = open_batch(path)
    routes = _array(path, arrays, "rollout_expert_indices", 4)
    mask, absent = (
        check_mask(f"{path}: {name}", _named(path, arrays, name), routes.shape[:2])
        for name in ("attention_mask", "router_padding_mask")
    )
    response = arrays.get("response_mask")
    if response is not None:
        response = check_mask(f"{path}: response_mask", response, (len(routes), *response.shape[1:2]))
    for sample in np.flatnonzero(~absent.all(axis=1)).tolist():
        where = f"{path}, sample {sample}"
        rows = _real_rows(where, mask[sample])
        tokens = rows.stop - rows.start
        answer = 0 if response is None else int(response[sample].sum())
        if answer > tokens:
            raise TraceError(f"{where} has a response of {answer:,} tokens and {tokens:,} tokens in all")
        yield RoutedSample(
            where=where,
            ids_TLK=routes[sample, rows],
            tokens=tokens,
            absent_T=absent[sample, rows],
            prompt_tokens=0 if response is None else tokens - answer,
        )


def read_nemo_batch(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield the samples of a batch of NeMo-RL."""
    arrays = open_batch(path)
    routes = _array(path, arrays, "routed_experts", 4)
    lengths = _array(path, arrays, "input_lengths", 1)
    lengths = check_whole_numbers(f"{path}: input_lengths", lengths, high=routes.shape[1] + 1)
    if len(lengths) != len(routes):
        raise TraceError(f"{path}: input_lengths has {len(lengths)} entries for {len(routes)} samples")
    for sample, tokens in enumerate(lengths.tolist()):
        yield RoutedSample(
            where=f"{path}, sample {sample}", ids_TLK=routes[sample, :tokens], tokens=tokens, last_absent=True
        )


def open_batch(path: Path) -> Mapping[str, ndarray]:
    """Return the arrays of `NAMES` in a batch; raises TraceError for a damaged file, and for other containers."""
    if path.suffix == ".safetensors":
        return {name: array for name, array in map_safetensors(path).items() if name in NAMES}
    if path.suffix == ".npz":
        return load_arrays(path, NAMES)
    if path.suffix == ".pt":
        archive = TorchArchive(path)
        entries = as_mapping(archive.value)
        return {name: archive.array(name, entries[name]) for name in NAMES if entries.get(name) is not None}
    if path.suffix == ".pkl":
        return _tensor_batch(path)
    raise TraceError(f"{path} ends in {path.suffix!r}: a batch is a .pt, .safetensors or .npz file, or SkyRL's .pkl")


def _tensor_batch(path: Path) -> Mapping[str, ndarray]:
    """Return the arrays of a pickled `TensorBatch` of SkyRL."""
    with map_file(path, "a pickle") as data:
        value = read_pickle(str(path), data, len(data))
    state = value.args[1] if isinstance(value, InertObject) and len(value.args) == 2 else None
    batch = state.get("batch_dict") if isinstance(state, Mapping) else None
    if not isinstance(batch, Mapping):
        raise TraceError(f"{path} holds no TensorBatch of SkyRL: expected a file of trainer.dump_data_batch")
    return {name: _packed(f"{path}: {name}", batch[name]) for name in NAMES if batch.get(name) is not None}


def _packed(where: str, entry: Any) -> ndarray:
    """Return the array of {format: "numpy", data, shape, dtype}."""
    if not isinstance(entry, Mapping) or entry.get("format", "numpy") != "numpy":
        raise TraceError(f"{where} is no array in numpy's bytes")
    with damage_errors(where, "an array"):
        dtype = named_dtype(entry.get("dtype"))
        if dtype.kind not in "biuf":
            raise TraceError(f"{where} is {dtype}: expected numbers")
        return np.frombuffer(as_bytes(entry["data"]), dtype).reshape(checked_shape(entry["shape"]))


def _jagged(path: Path, arrays: Mapping[str, ndarray]) -> Iterator[RoutedSample]:
    """Yield samples whose rows follow one another."""
    routes = _array(path, arrays, "routed_experts", 3)
    offsets = check_whole_numbers(f"{path}: offsets", arrays["offsets"], high=len(routes) + 1)
    samples = len(offsets) - 1
    if not 1 <= samples <= MAX_SAMPLES:
        raise TraceError(f"{path}: offsets name {samples:,} samples: allowed are 1 to {MAX_SAMPLES:,}")
    if offsets[0] != 0 or offsets[-1] != len(routes) or not (offsets[1:] >= offsets[:-1]).all():
        raise TraceError(f"{path}: offsets must rise from 0 to {len(routes):,}, the rows of routed_experts")
    prompts = arrays.get("prompt_lengths", np.zeros(samples, dtype=np.int64)).reshape(-1)
    prompts = check_whole_numbers(f"{path}: prompt_lengths", prompts, high=len(routes) + 1)
    if len(prompts) != samples:
        raise TraceError(f"{path}: prompt_lengths has {len(prompts):,} entries for {samples:,} samples")
    for sample, (start, stop) in enumerate(pairwise(offsets.tolist())):
        yield RoutedSample(
            where=f"{path}, sample {sample}",
            ids_TLK=routes[start:stop],
            tokens=stop - start,
            last_absent=True,
            prompt_tokens=int(prompts[sample]),
        )


def _array(path: Path, arrays: Mapping[str, ndarray], name: str, axes: int) -> ndarray:
    """Return an array of whole numbers with so many axes."""
    array = _named(path, arrays, name)
    if array.ndim != axes or array.dtype.kind not in "iu":
        raise TraceError(f"{path}: {name} is {array.dtype} {array.shape}: expected whole numbers with {axes} axes")
    if axes == 4 and not (len(array) <= MAX_SAMPLES and array.shape[1]):
        raise TraceError(
            f"{path}: {name} is {array.dtype} {array.shape}: expected samples with tokens, at most {MAX_SAMPLES:,}"
        )
    return array


def _named(path: Path, arrays: Mapping[str, ndarray], name: str) -> ndarray:
    if name not in arrays:
        raise TraceError(f"{path} has {sorted(arrays)}: expected {name}")
    return arrays[name]


def _real_rows(where: str, mask_T: Bool[ndarray, " T"]) -> slice:
    """Return the rows of real tokens, which follow one another."""
    first = int(mask_T.argmax())
    rows = slice(first, first + int(mask_T.sum()))
    if not mask_T[rows].all():
        raise TraceError(f"{where}: its attention_mask has gaps: expected padding on the left and on the right only")
    return rows
