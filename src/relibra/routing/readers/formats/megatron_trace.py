"""Read routes that Megatron-core recorded: trace files, and the recorded indices of `RouterReplay`.

`router_trace_rank{r}.jsonl` (`--moe-routing-trace-path`; main d98e8a6, 2026-08-22): one line per step, block, layer
and pass, `{"step", "stage", "block": "decoder" or "mtp", "layer", "rank", "num_tokens", "topk", "top_indices"}`. The
rows of a pass are those of several sequences, which the file does not tell apart: each pass of a rank is one sample.
Passes of a step are the micro-batches, in order; with activation recomputation each is there twice. MTP layers are left
out. Layers are numbers within a pipeline stage: import files of the first stage, or of runs with one.

A `.pt` file with the list of `RouterReplay.get_recorded_data()` (0.19.2): one tensor [tokens, K] per MoE router.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Raw, Struct
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.json_text import decode_lists, iterate_json
from relibra.routing.readers.encodings.nested_lists import array_of_lists
from relibra.routing.readers.encodings.torch_archive import TorchArchive
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample

MAX_STEP_LINES = 1 << 20
"""Most lines of a step: micro-batches x layers."""


class _Record(Struct):
    step: int
    block: Literal["decoder", "mtp"]
    layer: Annotated[int, Meta(ge=0, lt=1 << 16)]
    num_tokens: int
    topk: int
    top_indices: Raw


def read_megatron_trace(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield one sample per forward pass; raises TraceError for a damaged file, and for passes that lack a layer."""
    if path.suffix == ".pt":
        yield _recorded_indices(path)
        return
    step, layers = -1, dict[int, list[ndarray]]()
    for where, record in iterate_json(path, _Record):
        if record.block == "mtp":
            continue
        if record.step != step and layers:
            yield from _passes(f"{path}, step {step}", layers)
            layers = {}
        step = record.step
        layers.setdefault(record.layer, []).append(_indices(f"{where}: top_indices", record))
        if sum(map(len, layers.values())) > MAX_STEP_LINES:
            raise TraceError(f"{path}, step {step} has more than {MAX_STEP_LINES:,} lines: record fewer micro-batches")
    if layers:
        yield from _passes(f"{path}, step {step}", layers)


def _indices(where: str, record: _Record) -> ndarray:
    """Return the ids of a record, [tokens, choices]."""
    lists = decode_lists(where, record.top_indices)
    if not isinstance(lists, list):
        raise TraceError(f"{where} is {excerpt(lists)}: expected lists [tokens, choices]")
    ids = array_of_lists(where, lists, len(memoryview(record.top_indices)))
    expected = record.num_tokens, record.topk
    if ids.shape != expected and (len(ids) or expected[0] != 0):
        raise TraceError(f"{where} has shape {ids.shape}: num_tokens and topk say {expected}")
    return ids.reshape(len(ids), -1 if ids.size else 0)


def _passes(where: str, layers: dict[int, list[ndarray]]) -> Iterator[RoutedSample]:
    """Yield the passes of a step: the first of each layer, the second, ..."""
    numbers = sorted(layers)
    counts = {len(passes) for passes in layers.values()}
    if len(counts) > 1:
        few = min(numbers, key=lambda layer: len(layers[layer]))
        raise TraceError(
            f"{where} has {max(counts)} passes through some layers and {len(layers[few])} through layer {few}: "
            "captured graphs skip the recorder (--cuda-graph-impl none), or the file was cut"
        )
    for place in range(counts.pop()):
        pieces = [layers[layer][place] for layer in numbers]
        if len({piece.shape for piece in pieces}) > 1:
            raise TraceError(f"{where}, pass {place}: layers have different numbers of tokens")
        ids = np.stack(pieces, axis=1)
        if len(ids):
            yield RoutedSample(where=f"{where}, pass {place}", ids_TLK=ids)


def _recorded_indices(path: Path) -> RoutedSample:
    archive = TorchArchive(path)
    if not isinstance(archive.value, list) or not archive.value:
        raise TraceError(f"{path} holds no list of tensors: expected what RouterReplay.get_recorded_data() returned")
    routers = [archive.array(f"router {place}", one) for place, one in enumerate(archive.value)]
    shapes = {router.shape for router in routers}
    if len(shapes) > 1 or routers[0].ndim != 2:
        raise TraceError(f"{path}: its tensors have shapes {sorted(shapes)[:4]}: expected one shape")
    return RoutedSample(where=str(path), ids_TLK=np.stack(routers, axis=1))
