"""Adapter folders as peft writes them (adapter_config.json, adapter_model.safetensors), from the adapters of a policy.

Experts are named as they are in the model's own files where these have one gate, up and down matrix per expert: peft,
vLLM and SGLang load those. gate and up share one A here, so it is written twice. Other families have peft's own
form, with the matrices of all experts in one (`target_parameters`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping

from relibra.files import write_text
from relibra.parallel.adapters import LoraLinear, adapted_modules, expert_weights, is_adapter
from relibra.rl.model.sharding import separate_parameters


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """The adapters of a model, in float32 in host memory, by the names that peft gives them.

    config    content of adapter_config.json
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def save_pretrained(self, folder: Path) -> None:
        """Write both files into a folder that is there."""
        save_file(self.tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        write_text(folder / "adapter_config.json", json.dumps(self.config, indent=1) + "\n")


def gather_adapter(model: nn.Module) -> Adapter:
    """Return the adapters of a model, whole on rank 0; collective."""
    keeps = dist.get_rank() == 0
    named = {name: full.cpu() for name, full in separate_parameters(model, is_adapter) if keeps}
    return Adapter(config=_config(model), tensors=_tensors(model, named))


def _config(model: Any) -> dict[str, Any]:
    """Return adapter_config.json: rank, scale, and which modules have adapters."""
    modules, parameters, rank, alpha = set[str](), set[str](), 0, 0.0
    for name, module in adapted_modules(model):
        leaf = name.rpartition(".")[2]
        if isinstance(module, LoraLinear):
            modules.add(leaf)
            rank = len(module.lora_A)
        else:
            rank = getattr(module, f"{expert_weights(module)[0]}_lora_A").shape[1]
            if _has_own_files(model):
                modules |= {"gate_proj", "up_proj", "down_proj"}
            else:
                parameters |= {f"{leaf}.{weight}" for weight in expert_weights(module)}
        alpha = module.lora_scale * rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.config._name_or_path,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "inference_mode": True,
    }


def _tensors(model: nn.Module, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return adapters by their names in adapter_model.safetensors; `named` has them whole, in logical order."""
    modules, tensors, own_files = dict(adapted_modules(model)), dict[str, Tensor](), _has_own_files(model)
    for name, tensor in named.items():
        owner, _, leaf = name.rpartition(".")
        if isinstance(modules[owner], LoraLinear):
            tensors[f"base_model.model.{name}.weight"] = tensor.contiguous()
            continue
        weight, _, kind = leaf.partition("_lora_")
        for path, part in (_per_expert if own_files else _of_all_experts)(weight, kind, tensor):
            tensors[f"base_model.model.{owner}{path}.lora_{kind}.weight"] = part.clone()
    return tensors


def _per_expert(weight: str, kind: str, tensor_EXX: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of each expert, with their paths in the experts module."""
    for expert, matrix in enumerate(tensor_EXX):
        if weight == "gate_up_proj":
            gate, up = (matrix, matrix) if kind == "A" else matrix.chunk(2)
            yield f".{expert}.gate_proj", gate
            yield f".{expert}.up_proj", up
        else:
            yield f".{expert}.{weight}", matrix


def _of_all_experts(weight: str, kind: str, tensor_EXX: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield peft's matrix: A is `[E r, in]`, B `[out, r E]` with experts innermost; `base_layer` has gate_up_proj's."""
    path = "" if weight == "down_proj" else ".base_layer"
    yield path, tensor_EXX.flatten(0, 1) if kind == "A" else tensor_EXX.permute(1, 2, 0).flatten(1)


def _has_own_files(model: Any) -> bool:
    """Return whether the files of this family have one gate, up and down matrix per expert, under these names."""
    for conversion in get_model_conversion_mapping(model):
        if any(target.endswith("experts.gate_up_proj") for target in conversion.target_patterns):
            sources = [source.removesuffix("$").removesuffix(".weight") for source in conversion.source_patterns]
            return [source.rpartition(".")[2] for source in sources] == ["gate_proj", "up_proj"]
    return False
