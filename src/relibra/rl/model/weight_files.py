"""A policy as a `transformers` folder, written while its weights are gathered: one layer at a time is in memory."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from relibra.rl.model.sharding import full_parameters, quiet_loading

FILE_BYTES = 5 << 30
"""Most bytes of tensors in a file that holds more than one."""
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of types in safetensors files."""


class StoredWeights:
    """Names, shapes and types that the weights of a model have in files, which may differ from those in the model.

    meta    the model on the meta device
    dtype   of the parameters in files; None: that of `meta`. Buffers keep theirs
    """

    def __init__(self, meta: Any, dtype: torch.dtype | None = None) -> None:
        self.meta = meta
        ignored, parameters = meta._keys_to_ignore_on_save or (), dict(meta.named_parameters(remove_duplicate=False))
        states = {name: tensor for name, tensor in meta.state_dict().items() if name not in ignored}
        kept = {
            name: tensor.to(dtype) if dtype and name in parameters else tensor
            for name, tensor in remove_tied_weights_from_state_dict(states, meta).items()
        }
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in kept.items():
            layers.setdefault(_layer_of(name), {})[name] = tensor
        stored = [revert_weight_conversion(meta, one) for one in layers.values()]
        whole = revert_weight_conversion(meta, kept)
        if _shapes(chain(*(one.items() for one in stored))) != _shapes(whole.items()):  # a conversion joins layers
            layers, stored = {"": kept}, [whole]
        self.tensors = {name: tensor for one in stored for name, tensor in one.items()}
        self._layers = layers
        self._layer_of = {name: layer for layer, own in layers.items() for name in own}

    def gather(self, model: nn.Module, *, wanted: bool) -> Iterator[dict[str, Tensor]]:
        """Yield the weights of a sharded model on the CPU, layer by layer, experts in logical order; collective.

        Every rank has to iterate to the end.

        wanted   False: only take part, and yield nothing
        """
        found: dict[str, dict[str, Tensor]] = {layer: {} for layer in self._layers}
        buffers = (item for item in model.named_buffers() if item[0] in self._layer_of)
        for name, full in chain(buffers, full_parameters(model)):
            for place in self._places_of(name) if wanted else ():
                layer = self._layer_of[place]
                found[layer][place] = full.to("cpu", self._layers[layer][place].dtype)
                if len(found[layer]) == len(self._layers[layer]):
                    yield revert_weight_conversion(self.meta, found.pop(layer))
        assert not wanted or not found, f"{list(found)} are not whole"

    def _places_of(self, name: str) -> list[str]:
        """Return the names under which a weight is stored: none, one, or that of a weight tied with it."""
        tied = {one for pair in self.meta.all_tied_weights_keys.items() if name in pair for one in pair}
        return [one for one in sorted({name, *tied}) if one in self._layer_of]


def write_folder(folder: Path, stored: StoredWeights, weights: Iterable[Mapping[str, Tensor]]) -> None:
    """Write configuration and weights of a model into a folder, as `save_pretrained` does.

    weights   all tensors of `stored`, in any order and in pieces
    raises    OSError or SafetensorError
    """
    with quiet_loading():
        stored.meta.save_pretrained(folder, state_dict={})
    (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
    files, size = [dict[str, Tensor]()], 0
    for name, tensor in stored.tensors.items():
        size += tensor.nbytes
        if files[-1] and size > FILE_BYTES:
            files, size = [*files, {}], tensor.nbytes
        files[-1][name] = tensor
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SAFE_WEIGHTS_NAME]
    places = {
        key: (folder / name, start)
        for name, tensors in zip(names, files, strict=True)
        for key, start in _begin_file(folder / name, tensors).items()
    }
    for piece in weights:
        for key, tensor in piece.items():
            path, start = places.pop(key)
            with path.open("r+b") as file:
                file.seek(start)
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    assert not places, f"{list(places)} are missing"
    if len(files) > 1:
        file_of = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
        total = sum(tensor.nbytes for tensor in stored.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _begin_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write a safetensors file without values, in that library's order; return where each tensor's values begin."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        tensor, begin, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}


def _layer_of(name: str) -> str:
    """Return the beginning of a name up to its first number, such as "model.layers.3"; "" if there is none."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else ""


def _shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors}
