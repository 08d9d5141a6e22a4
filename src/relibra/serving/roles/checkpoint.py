"""Load a part of a checkpoint: everything but the experts, or some experts of every layer.

Names and layouts of checkpoints differ between families and versions: one tensor per expert or one for all, gate and
up apart or together, other names. `transformers` knows them (`WeightConverter`), so its own conversion runs here, on a
model without memory, with only the tensors that this part needs.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from relibra.errors import ConfigError, EngineError, in_a_line
from relibra.replay.routers import DECODER_LAYER, find_routers
from relibra.rl.model.sharding import loading, quiet_loading

_EXPERT_NUMBER = re.compile(r"\bexperts\.(\d+)\.")
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn|draft)")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, read when it is indexed with `...`: whole, or some experts of its first axis."""

    slice: Any
    experts: tuple[int, ...] | None = None

    def __getitem__(self, index: object) -> Tensor:
        """Read the tensor; the index is `...`."""
        assert index is ..., "only whole tensors are asked for"
        if self.experts is None:
            return self.slice[...]
        return torch.cat([self.slice[expert : expert + 1] for expert in self.experts])


def open_checkpoint(folder: Path) -> dict[str, CheckpointTensor]:
    """Return the tensors of a folder by name, still unread; raises ConfigError for missing or damaged files."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(path.name for path in folder.glob("model*.safetensors"))
        if not files:
            raise ConfigError(f"{folder} has no model.safetensors: write the weights with save_pretrained")
        if elsewhere := [name for name in files if Path(name).name != name]:
            raise ConfigError(f"{index} names {elsewhere[0][:200]!r}, which is no file of its folder: put all there")
        opened = [safe_open(folder / name, framework="pt") for name in files]
        return {name: CheckpointTensor(file.get_slice(name)) for file in opened for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the weights in {folder} cannot be read: {in_a_line(error)}") from error


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """A model without memory, and what the two roles need to know about it.

    model         on the meta device
    experts       path of the experts module of each MoE layer, ascending
    num_experts   per layer
    top_k         experts per token
    hidden        width of the rows that experts take and return
    """

    model: nn.Module
    experts: tuple[str, ...]
    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Decoder layer of each MoE layer."""
        return tuple(int(found.group(1)) for path in self.experts if (found := DECODER_LAYER.search(path)))


def read_config(folder: Path) -> Any:
    """Return the configuration of a model; raises ConfigError for a folder without one."""
    if (folder / "policy").is_dir():
        raise ConfigError(f"{folder} is the folder of a run: pass {folder / 'policy'}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: pass a folder written by save_pretrained")
    with loading(f"the model {str(folder)!r}"), quiet_loading():
        return AutoConfig.from_pretrained(folder)


def count_positions(config: Any) -> int | None:
    """Return the most positions that a model is made for, stretched RoPE included; None: its configuration has none."""
    text = config.get_text_config()
    usual: Any = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # for all layers, or one per kind of layer
    lengths = ((kind.get("original_max_position_embeddings") or usual, kind.get("factor") or 1) for kind in kinds)
    return usual and max(usual, *(int(length * factor) for length, factor in lengths))


def read_structure(folder: Path, dtype: str = "auto") -> ModelStructure:
    """Build a model from its configuration, without weights.

    dtype    of the weights; "auto": as the configuration says
    raises   ConfigError for a folder without a model, EngineError with the family of a model that cannot be split
    """
    config = read_config(folder)
    with loading(f"the model {str(folder)!r}"), quiet_loading():
        chosen = _chosen_dtype(config, dtype)
        if getattr(config, "quantization_config", None):
            raise EngineError(f"{config.model_type} in {folder} is quantized, which cannot be split yet: dequantize it")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=chosen)
    routers = find_routers(model)
    experts = _expert_modules(model)
    if len(experts) != len(routers):
        family = type(model).__name__
        raise EngineError(
            f"{family} cannot be split: {len(routers)} of its layers have routers, but the experts of {len(experts)} "
            "run through the experts interface of transformers; serve it with an engine that keeps it whole"
        )
    return ModelStructure(
        model=model,
        experts=experts,
        num_experts=routers[0].num_experts,
        top_k=routers[0].top_k,
        hidden=_hidden_size(model.get_submodule(experts[0]), routers[0].num_experts),
        dtype=chosen,
    )


def load_attention(structure: ModelStructure, tensors: Mapping[str, CheckpointTensor]) -> nn.Module:
    """Load everything but the experts, whose parameters stay without memory; return the model in evaluation mode."""
    model: Any = structure.model
    renamed = _renamed(model, tensors)
    own = {name: tensor for name, tensor in tensors.items() if not _inside(renamed[name], structure.experts)}
    info, config = _convert(model, own, structure.dtype)
    info.missing_keys = {name for name in info.missing_keys if not _inside(name, structure.experts)}
    lost = info.missing_keys - model.all_tied_weights_keys.keys()
    if lost:
        raise ConfigError(f"the checkpoint lacks {len(lost)} tensors of the model, such as {min(lost)!r}")
    with quiet_loading():
        model._finalize_model_loading(model, config, info)
    return model.eval().requires_grad_(False)


def load_experts(
    structure: ModelStructure, tensors: Mapping[str, CheckpointTensor], experts: Sequence[Sequence[int]]
) -> list[nn.Module]:
    """Load some experts of every layer; return the experts module of each layer, which holds only those.

    experts   logical ids of each layer, ascending: the order of the modules' experts
    """
    model: Any = structure.model
    for path, own in zip(structure.experts, experts, strict=True):
        _shrink(model.get_submodule(path), structure.num_experts, len(own))
    renamed, read = _renamed(model, tensors), {}
    for name, tensor in tensors.items():
        for path, own in zip(structure.experts, experts, strict=True):
            if _inside(renamed[name], (path,)):
                number = _EXPERT_NUMBER.search(name)
                if number is None:
                    whole = tensor.slice.get_shape()[0] != structure.num_experts
                    read[name] = tensor if whole else CheckpointTensor(tensor.slice, tuple(own))
                elif int(number.group(1)) in own:
                    read[name] = tensor
    info, _ = _convert(model, read, structure.dtype)
    lost = {name for name in info.missing_keys if _inside(name, structure.experts)}
    if lost:
        raise ConfigError(f"the checkpoint lacks {len(lost)} tensors of experts, such as {min(lost)!r}")
    return [model.get_submodule(path).eval().requires_grad_(False) for path in structure.experts]


def _convert(model: Any, tensors: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, LoadStateDictConfig]:
    config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),
        ignore_mismatched_sizes=True,
    )
    with quiet_loading():
        info, _ = convert_and_load_state_dict_in_model(model=model, state_dict=dict(tensors), load_config=config)
    if info.mismatched_keys or info.conversion_errors:
        wrong = sorted(map(str, info.mismatched_keys)) or sorted(info.conversion_errors)
        raise EngineError(
            f"{type(model).__name__} cannot be split: parts of its checkpoint do not have the shapes of the model, "
            f"such as {wrong[0]}"
        )
    return info, config


def _renamed(model: Any, tensors: Mapping[str, object]) -> dict[str, str]:
    """Return the name in the model of each tensor of a checkpoint."""
    mapping, known = get_model_conversion_mapping(model), model.state_dict()
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    found = {}
    for name in tensors:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if renamed not in known and name in known:
            renamed = name
        found[name] = renamed
    return found


def _expert_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the modules whose forward goes through the experts interface of transformers, by ascending layer."""
    found = []
    for name, module in model.named_modules():
        layer = DECODER_LAYER.search(name)
        if layer and hasattr(module, "_is_expert_parallel") and not _DRAFT.search(name):
            found.append((int(layer.group(1)), name))
    return tuple(name for _, name in sorted(found))


def _hidden_size(experts: Any, num_experts: int) -> int:
    """Return the width of an experts module's output."""
    down = experts.down_proj
    assert down.shape[:-2] == (num_experts,), "the experts interface stacks the experts"
    return int(down.shape[2] if experts.is_transposed else down.shape[1])


def _shrink(experts: Any, num_experts: int, kept: int) -> None:
    """Give an experts module on the meta device parameters of fewer experts."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        if parameter.ndim > 1 and len(parameter) == num_experts:
            fewer = torch.empty((kept, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
            setattr(experts, name, nn.Parameter(fewer, requires_grad=False))
    experts.num_experts = kept


def _inside(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _chosen_dtype(config: Any, dtype: str) -> torch.dtype:
    known = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    chosen = known if dtype == "auto" else _DTYPES.get(dtype)
    if not isinstance(chosen, torch.dtype):
        raise ConfigError(f"--dtype {dtype!r} is unknown: use auto, float32, bfloat16 or float16")
    return chosen
