"""Parameters of single experts in Megatron's experts modules, and running a module with other weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from relibra.errors import EngineError


class ExpertParameter(NamedTuple):
    """A parameter of one local expert: attribute of the module that owns it, and its name within the expert."""

    owner: nn.Module
    attribute: str
    name: str

    @property
    def tensor(self) -> nn.Parameter:
        """Return the parameter."""
        return getattr(self.owner, self.attribute)


def expert_parameters(experts: Any, slot: int) -> list[ExpertParameter]:
    """Return the parameters of a local expert, in the same order for all of them.

    `SequentialMLP` has a module per expert; `TEGroupedMLP` numbers the parameters of its two linears (`weight3`).

    raises   EngineError for other modules
    """
    if hasattr(experts, "local_experts"):
        found = [
            ExpertParameter(module, attribute, f"{prefix}.{attribute}")
            for prefix, module in experts.local_experts[slot].named_modules()
            for attribute, _ in module.named_parameters(recurse=False)
        ]
    else:
        found = [
            ExpertParameter(getattr(experts, linear), f"{kind}{slot}", f"{linear}.{kind}")
            for linear in ("linear_fc1", "linear_fc2")
            for kind in ("weight", "bias")
            if f"{kind}{slot}" in getattr(experts, linear, nn.Module())._parameters
        ]
    if not found:
        raise EngineError(
            f"experts of type {type(experts).__name__} are not known to relibra: use SequentialMLP or TEGroupedMLP "
            "(without moe_single_grouped_weight)"
        )
    return found


@contextmanager
def weights_replaced(by: Iterable[tuple[ExpertParameter, Tensor]]) -> Iterator[None]:
    """Run experts with other weights: their modules find these first, and their parameters stay registered."""
    replaced = [(parameter.owner.__dict__, parameter.attribute, tensor) for parameter, tensor in by]
    for attributes, name, tensor in replaced:
        attributes[name] = tensor
    try:
        yield
    finally:
        for attributes, name, _ in replaced:
            attributes.pop(name, None)
