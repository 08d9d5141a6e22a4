"""Read files of SGLang's expert distribution recorder, mode `per_token`.

Follows 0.5.23: a torch file per rank, `{"records": [...], "last_physical_to_logical_map": [L, P]}`. A record
is one forward pass: `input_ids`, `topk_ids_of_layer` [L, tokens, 8] int32, -1 where nothing was recorded (dense layers,
and choices beyond the model's). Ids are physical slots and are mapped to experts by the map of the same file. The
tokens of a pass are those of several requests, which the file does not tell apart: each pass is one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.torch_archive import TorchArchive, as_mapping
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.trace import MAX_EXPERTS

_PER_TOKEN = "record with --expert-distribution-recorder-mode per_token"


def read_sglang_recorder(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:
    """Yield a sample per forward pass with tokens, of the layers `rules.layers`; None: of all, if each was recorded."""
    archive = TorchArchive(path)
    content = as_mapping(archive.value)
    records, slots = content.get("records"), content.get("last_physical_to_logical_map")
    if not isinstance(records, list) or slots is None:
        raise TraceError(f"{path} has {excerpt(list(content)[:8])}, no routes per token: {_PER_TOKEN}")
    expert_LP = archive.array("last_physical_to_logical_map", slots)
    for place, record in enumerate(records):
        where = f"{path}, record {place}"
        if not isinstance(record, Mapping) or record.get("topk_ids_of_layer") is None:
            raise TraceError(f"{where} has no topk_ids_of_layer: {_PER_TOKEN}")
        ids_LTK = archive.array(f"record {place}: topk_ids_of_layer", record["topk_ids_of_layer"])
        tokens = record.get("input_ids")
        if tokens != []:  # else an idle rank
            yield _pass(where, ids_LTK, expert_LP, tokens, rules)


def _pass(where: str, ids_LTK: ndarray, expert_LP: ndarray, tokens: Any, rules: ImportRules) -> RoutedSample:
    """Return the routes of one forward pass, as logical experts."""
    shapes = ids_LTK.ndim == 3 and expert_LP.ndim == 2 and len(ids_LTK) == len(expert_LP)
    if not shapes or ids_LTK.dtype.kind != "i" or expert_LP.dtype.kind not in "iu":
        raise TraceError(f"{where} has ids of shape {ids_LTK.shape} and a map of shape {expert_LP.shape}")
    L, T, _ = ids_LTK.shape
    if not isinstance(tokens, list) or len(tokens) != T:
        raise TraceError(f"{where} has ids of {T:,} tokens, and its input_ids have another number")
    used_LK = (ids_LTK != -1).any(axis=1)
    used_L = used_LK.any(axis=1)
    layers, top_k = np.flatnonzero(used_L), int(used_LK.sum(axis=1).max(initial=0))
    if top_k == 0:
        raise TraceError(f"{where} recorded no layer: all ids are -1")
    if not (used_LK[layers, :top_k].all() and not used_LK[:, top_k:].any()):
        raise TraceError(f"{where}: layers have different numbers of choices: {used_LK.sum(axis=1).tolist()[:16]}")
    if rules.top_k not in (None, top_k):
        raise TraceError(f"{where} has {top_k} choices per token, --top-k says {rules.top_k}")
    if rules.layers is None and not used_L.all():
        raise TraceError(
            f"{where}: layers {np.flatnonzero(~used_L).tolist()[:8]} were not recorded: name those with experts, "
            f"--layers {layers[0]}-{layers[-1]} for example"
        )
    kept = rules.layers or range(L)
    if kept[-1] >= L:
        raise TraceError(f"{where} has {L} layers, and --layers names layer {kept[-1]}")
    slots, ids_LTK = expert_LP.shape[1], ids_LTK[:, :, :top_k]
    if not -1 <= ids_LTK.min() <= ids_LTK.max() < slots:
        raise TraceError(f"{where} has slots {ids_LTK.min()} to {ids_LTK.max()}: its map has 0 to {slots - 1}")
    if expert_LP.size and not -1 <= expert_LP.min() <= expert_LP.max() < MAX_EXPERTS:
        raise TraceError(f"{where}: its map names experts {expert_LP.min()} to {expert_LP.max()}")
    logical_TLK = np.empty((T, len(kept), top_k), dtype=np.int32)
    for place, layer in enumerate(kept):
        expert_of_slot = np.append(expert_LP[layer], -1).astype(np.int32)  # slot -1 is the last one
        logical_TLK[:, place] = expert_of_slot[ids_LTK[layer]]
    return RoutedSample(where=where, ids_TLK=logical_TLK)
