"""`BalancedEP`: expert parallelism of transformers whose layers can follow a `StepPlan`.

`execute_plan` and `balance_live` give each layer a `LayerRunner` while they run. Without one a layer is transformers'
own `all_to_all`, so one model runs balanced training steps and everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from relibra.errors import EngineError
from relibra.parallel.adapters import LoraExperts
from relibra.parallel.agreement import Agreement
from relibra.parallel.group_state import GroupState
from relibra.parallel.grouped_product import is_grouped, run_sorted
from relibra.parallel.process_groups import make_same_ranks_group
from relibra.parallel.rows.sorted_rows import SortedRows
from relibra.replay.device_copies import upload
from relibra.replay.routers import DECODER_LAYER

NAME = "relibra"
"""Value of `DistributedConfig.ep_implementation` that selects this implementation."""

_ATTRIBUTE = "_relibra_balanced_ep"


class LayerInput(NamedTuple):
    """Tokens of this rank, the logical experts that they chose, and their gate weights."""

    hidden_TH: Tensor
    experts_TK: Tensor
    weights_TK: Tensor

    def rows(self, index_X: Tensor) -> LayerInput:
        """Return the rows of these indices."""
        return LayerInput(self.hidden_TH[index_X], self.experts_TK[index_X], self.weights_TK[index_X])


@runtime_checkable
class LayerRunner(Protocol):
    """Runs the experts of one layer in place of `all_to_all`."""

    def __call__(self, tokens: LayerInput) -> Tensor:
        """Return the weighted expert output `[T, H]`; collective."""


class BalancedEP(AllToAllEP):  # type: ignore[misc]
    """Experts of one layer.

    parameter_names         of the experts module: its parameters that hold one entry per expert
    physical_to_logical_E   logical expert at each position; position p is at home on rank p // (E / R)
    runner                  runs the layer while a plan is executed or layers balance live; None: it runs as with
                            `all_to_all`
    recomputes              keeps only the input of the experts for the backward pass, whatever the layer keeps
    agreement               shared by all layers of the model; None before the first `agreement_of`
    group_state             shared by all layers of the model; None before the first `group_state_of`
    raises                  EngineError under tensor parallelism
    """

    runner: LayerRunner | None = None
    recomputes = False
    agreement: Agreement | None = None
    group_state: GroupState | None = None

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        """Record the parameters that transformers has sharded over the ranks: they hold one entry per expert."""
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise EngineError(
                f"ep_implementation {NAME!r} does not run under tensor parallelism yet, and tp_size is "
                f"{tp_mesh.size()}: use tp_size=1, or ep_implementation 'all_to_all'"
            )
        self.experts = experts
        self.physical_to_logical_E = np.arange(self.num_local_experts * ep_mesh.size())
        self._positions: tuple[np.ndarray | None, Tensor | None] = (None, None)  # a map, and its inverse
        self.parameter_names = [name for name, p in experts.named_parameters(recurse=False) if isinstance(p, DTensor)]
        assert self.parameter_names, (
            "transformers installs the expert parallelism of a module before it shards its parameters"
        )
        setattr(experts, _ATTRIBUTE, self)
        experts.register_state_dict_pre_hook(self._refuse_physical_order)

    def __call__(
        self,
        hidden_states: Float[Tensor, "T H"],
        top_k_index: Int64[Tensor, "T K"],
        top_k_weights: Float[Tensor, "T K"],
    ) -> Float[Tensor, "T H"]:
        """Return the weighted expert output of each token of this rank; collective over the expert-parallel group."""
        tokens = LayerInput(hidden_states, top_k_index, top_k_weights)
        run = self.run_at_home if self.runner is None else self._run_by_runner
        if self.recomputes and torch.is_grad_enabled():
            output_TH: Tensor = checkpoint(run, tokens, use_reentrant=False)
            return output_TH
        return run(tokens)

    @torch.compiler.disable
    def _run_by_runner(self, tokens: LayerInput) -> Tensor:
        """Run the layer as its runner says, outside of compiled graphs: sizes and peers change with every pass."""
        assert self.runner is not None, "the caller checks"
        return self.runner(tokens)

    def run_at_home(self, tokens: LayerInput) -> Tensor:
        """Run every expert at its home, as `all_to_all` does; collective."""
        position_E = self.positions_on(tokens.experts_TK.device)
        position_TK = tokens.experts_TK if position_E is None else position_E[tokens.experts_TK]
        return super().__call__(tokens.hidden_TH, position_TK, tokens.weights_TK)

    def run_rows(
        self, rows_YH: Float[Tensor, "Y H"], rows: SortedRows, weight_Y1: Float[Tensor, "Y 1"]
    ) -> Float[Tensor, "Y H"]:
        """Run the experts on rows that chose one local expert each; return their weighted results.

        The grouped product of transformers takes them as they lie; other implementations run as the module's forward.
        Without rows it runs a dummy: parameters then get a gradient of zero, so that FSDP reduces them on every rank.
        """
        if len(rows_YH) == 0:
            dummy = SortedRows(rows.slot_Y.new_zeros(1), torch.ones_like(rows.ends_P))
            return self.run_rows(rows_YH.sum(dim=0, keepdim=True), dummy, weight_Y1.sum(dim=0, keepdim=True))[:0]
        if self.has_adapters or is_grouped(self.experts_forward):
            return run_sorted(self.experts, rows_YH, rows, weight_Y1)
        with _no_rows_of_others(self.experts):
            return self.experts_forward(rows_YH, rows.slot_Y.long().unsqueeze(1), weight_Y1)

    def homes(self) -> dict[str, Tensor]:
        """Return the local parameters `[E / R, ...]` by name.

        To be called inside the forward and backward pass of the layer; with `homes_stay_whole` at any time.
        """
        parameters = {name: getattr(self.experts, name) for name in self.parameter_names}
        local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in parameters.items()}
        assert all(len(p) == self.num_local_experts for p in local.values()), "the experts of this rank are whole here"
        return local

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters are trained beside frozen experts (`adapters.py`)."""
        return isinstance(self.experts, LoraExperts)

    @property
    def frozen_names(self) -> frozenset[str]:
        """Return the names of the parameters that no optimizer changes now; to be called outside of passes."""
        return frozenset(name for name in self.parameter_names if not getattr(self.experts, name).requires_grad)

    @property
    def homes_stay_whole(self) -> bool:
        """Return whether the experts of this rank are whole between passes too: FSDP does not shard them over ranks."""
        mesh = getattr(self.experts, self.parameter_names[0]).device_mesh
        return "efsdp" not in (mesh.mesh_dim_names or ()) or mesh["efsdp"].size() == 1

    def refuse_adapters(self, name: str) -> None:
        """Raise EngineError where experts have weights that a replica would lack.

        name   of the experts module in the model
        """
        own = {name for name, p in self.experts.named_parameters() if p.requires_grad} - set(self.parameter_names)
        if own or name.endswith(".base_layer"):
            what = f"parameters {sorted(own)} of their own" if own else "an adapter around them"
            raise EngineError(
                f"experts {name!r} have {what}, which replicas of a plan would lack: train adapters on other modules "
                "(attention, for example), or whole experts, or without a plan"
            )

    def refuse_offloading(self, name: str) -> None:
        """Raise EngineError where the weights of experts are not on the device that computes.

        name   of the experts module in the model
        """
        at, device = getattr(self.experts, self.parameter_names[0]).device.type, self.ep_mesh.device_type
        if at != device:
            raise EngineError(
                f"experts {name!r} are on {at!r} between passes and computed on {device!r} (fsdp_cpu_offload), but a "
                "plan pushes and moves them between passes: load the model without offloading, or train without a plan"
            )

    def _refuse_physical_order(self, *_: object) -> None:
        if (self.physical_to_logical_E != np.arange(len(self.physical_to_logical_E))).any():
            raise EngineError(
                "a state dict is requested while experts are not in logical order, which its readers expect: save "
                "inside `with logical_order(model, optimizer)`, or take logical_parameters(model)"
            )

    def positions_on(self, device: torch.device) -> Tensor | None:
        """Return the position `[E]` of each logical expert, on a device; None: experts are in logical order."""
        known, position_E = self._positions
        if known is not self.physical_to_logical_E:
            order = np.argsort(self.physical_to_logical_E)
            moved = (order != np.arange(len(order))).any()
            position_E = upload(torch.from_numpy(order), device) if moved else None
            self._positions = (self.physical_to_logical_E, position_E)
        return position_E


@contextmanager
def parameters_replaced(experts: nn.Module, by: dict[str, Tensor]) -> Iterator[None]:
    """Run the experts module with weights `[X, ...]` in place of its parameters."""
    module: Any = experts
    own, num_experts = {name: module._parameters[name] for name in by}, module.num_experts
    module._parameters.update(by)
    module.num_experts = len(next(iter(by.values())))
    try:
        yield
    finally:
        module._parameters.update(own)
        module.num_experts = num_experts


@contextmanager
def _no_rows_of_others(experts: nn.Module) -> Iterator[None]:
    """Turn off transformers' masking of rows that chose an expert of another rank: there are none here.

    The masking takes several passes over all activations.
    """
    module: Any = experts
    masks = getattr(module, "_is_expert_parallel", False)
    module._is_expert_parallel = False
    try:
        yield
    finally:
        module._is_expert_parallel = masks


def register() -> None:
    """Make `DistributedConfig(ep_implementation="relibra")` known to transformers; calling it again has no effect."""
    EPImplementationInterface.register(NAME, BalancedEP)


def balanced_layers(model: nn.Module) -> dict[int, BalancedEP]:
    """Return the layers that can follow a plan, by ascending decoder layer.

    raises   EngineError without such layers, with two decoders, or if experts have foreign adapters or are offloaded
    """
    layers: dict[int, BalancedEP] = {}
    for name, module in model.named_modules():
        layer = getattr(module, _ATTRIBUTE, None)
        if layer is None:
            continue
        match = DECODER_LAYER.search(f"{name}.")
        if match is None or int(match.group(1)) in layers:
            raise EngineError(
                f"experts {name!r} belong to no decoder layer of their own ('layers.<number>.'), so a plan has no "
                "place for them: pass a model with one decoder"
            )
        layer.refuse_adapters(name)
        layer.refuse_offloading(name)
        layers[int(match.group(1))] = layer
    if not layers:
        raise EngineError(
            f"no experts of {type(model).__name__} can follow a plan: it has none, or one rank holds them all (ep_size "
            "is 1), or another implementation runs them: call relibra.parallel.register() and load an MoE model with "
            f"DistributedConfig(fsdp_size=R, ep_size=R, ep_implementation={NAME!r})"
        )
    return dict(sorted(layers.items()))


def expert_shapes(layers: Iterable[BalancedEP]) -> list[tuple[Any, ...]]:
    """Return the different shapes of experts: name and sizes of each parameter. Slots of all layers need one shape."""
    shapes = {
        tuple((name, *getattr(layer.experts, name).shape[1:]) for name in layer.parameter_names) for layer in layers
    }
    return sorted(shapes)


def agreement_of(layers: Sequence[BalancedEP]) -> Agreement:
    """Return the agreement of a model's layers; the first call makes its group, collective over all ranks."""
    agreement = layers[0].agreement
    if agreement is None:
        ep_mesh = layers[0].ep_mesh
        device = torch.device(ep_mesh.device_type)
        agreement = Agreement(make_same_ranks_group(ep_mesh.get_group(), device, backend="gloo"))
        for layer in layers:
            layer.agreement = agreement
    return agreement


def group_state_of(model: nn.Module, layers: Sequence[BalancedEP]) -> GroupState:
    """Return the state of the expert-parallel group; made once per model, collective over all ranks."""
    state = layers[0].group_state
    if state is None:
        state = GroupState(layers[0].ep_mesh, next(model.parameters()).device)
        for layer in layers:
            layer.group_state = state
    return state
