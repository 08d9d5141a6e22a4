"""Read routes that Megatron-core recorded: trace files, and the recorded indices of `RouterReplay`.

`router_trace_rank{r}.jsonl` (`--moe-routing-trace-path`; main d98e8a6, 2026-08-22): one line per step, block, layer
and pass, `{"step", "stage", "block": "decoder" or "mtp", "layer", "rank", "num_tokens", "topk", "top_indices"}`. The
rows of a pass are those of several sequences, which the file does not tell apart: each pass of a rank is one sample.
Passes of a step are the micro-batches, in order; with activation recomputation each is there twice. MTP layers are left
out. Layers are numbers within a pipeline stage: import files of the first stage, or of runs with one.

A `.pt` file with the list of `RouterReplay.get_recorded_data()` (0.19.2): one tensor [tokens, K] per MoE router.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.json_text import JsonDocument, iterate_documents
from relibra.routing.readers.encodings.nested_lists import array_of_lists
from relibra.routing.readers.encodings.torch_archive import TorchArchive
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample

MAX_STEP_LINES = 1 << 20
"""Most lines of a step: micro-batches x layers."""


def read_megatron_trace(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield one sample per forward pass.

    raises    TraceError for a damaged file, and for passes that lack a layer
    """
    if path.suffix == ".pt":
        yield _recorded_indices(path)
        return
    step, layers = -1, dict[int, list[ndarray]]()
    for document in iterate_documents(path):
        record = _record(document)
        if record["block"] == "mtp":
            continue
        if record["step"] != step and layers:
            yield from _passes(f"{path}, step {step}", layers)
            layers = {}
        step = record["step"]
        layers.setdefault(record["layer"], []).append(_indices(document, record))
        if sum(map(len, layers.values())) > MAX_STEP_LINES:
            raise TraceError(f"{path}, step {step} has more than {MAX_STEP_LINES:,} lines: record fewer micro-batches")
    if layers:
        yield from _passes(f"{path}, step {step}", layers)


def _record(document: JsonDocument) -> Mapping[str, Any]:
    record = document.value
    if not isinstance(record, Mapping) or any(type(record.get(key)) is not int for key in ("step", "layer")):
        raise TraceError(f"{document.where} is no record of a router trace: expected step, layer and top_indices")
    if record.get("block") not in ("decoder", "mtp") or not 0 <= record["layer"] < 1 << 16:
        raise TraceError(
            f"{document.where} has block {excerpt(record.get('block'))} and layer {excerpt(record['layer'])}"
        )
    return record


def _indices(document: JsonDocument, record: Mapping[str, Any]) -> ndarray:
    """Return the ids of a record, [tokens, choices]."""
    tokens, top_k, lists = record.get("num_tokens"), record.get("topk"), record.get("top_indices")
    where = f"{document.where}: top_indices"
    if not isinstance(lists, list):
        raise TraceError(f"{where} is {excerpt(lists)}: expected lists [tokens, choices]")
    ids = array_of_lists(where, lists, document.size)
    if ids.shape != (tokens, top_k) and (len(ids) or tokens != 0):
        raise TraceError(f"{where} has shape {ids.shape}: num_tokens and topk say {excerpt((tokens, top_k))}")
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
    with TorchArchive(path) as archive:
        if not isinstance(archive.value, list) or not archive.value:
            raise TraceError(
                f"{path} holds no list of tensors: expected what RouterReplay.get_recorded_data() returned"
            )
        routers = [archive.array(f"router {place}", one) for place, one in enumerate(archive.value)]
    if len({router.shape for router in routers}) > 1 or routers[0].ndim != 2:
        raise TraceError(
            f"{path}: its tensors have shapes {[router.shape for router in routers][:4]}: expected one shape"
        )
    return RoutedSample(where=str(path), ids_TLK=np.stack(routers, axis=1))
