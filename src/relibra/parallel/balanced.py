"""`BalancedEP`: expert parallelism of transformers that follows a `StepPlan` while one is being executed.

Without a plan it is transformers' own `all_to_all`, so one model serves planned training steps and everything else.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from relibra.errors import EngineError
from relibra.parallel.dispatch import combine, dispatch
from relibra.parallel.rank_tables import RankTables
from relibra.parallel.replica_slots import push_weights, replicas_in, tie

if TYPE_CHECKING:
    from relibra.parallel.execution import PlanExecution

NAME = "relibra"
"""What `DistributedConfig.ep_implementation` says to get this implementation."""

_ATTRIBUTE = "_relibra_balanced_ep"
_DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class BalancedEP(AllToAllEP):  # type: ignore[misc]
    """Experts of one layer; see `execute_plan` for how a plan gets here.

    names        parameters of the experts module that hold one entry per expert
    physical_to_logical_E   logical expert at each position; position p is at home on rank p // (E / R)
    push_group   process group of this expert-parallel group for pushes alone; made by the first `execute_plan`
    execution    the plan being executed, and the position of this layer in it
    raises       EngineError under tensor parallelism
    """

    push_group: dist.ProcessGroup | None = None
    execution: tuple[PlanExecution, int] | None = None

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        """Note which parameters hold one entry per expert: those that transformers has spread over the ranks."""
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise EngineError(
                f"ep_implementation {NAME!r} does not run under tensor parallelism yet, and tp_size is "
                f"{tp_mesh.size()}: use tp_size=1, or ep_implementation 'all_to_all'"
            )
        self.experts = experts
        self.physical_to_logical_E = np.arange(self.num_local_experts * ep_mesh.size())
        self.names = [name for name, p in experts.named_parameters(recurse=False) if isinstance(p, DTensor)]
        assert self.names, "transformers installs the expert parallelism of a module before it shards its parameters"
        setattr(experts, _ATTRIBUTE, self)

    def __call__(
        self,
        hidden_states: Float[Tensor, "T H"],
        top_k_index: Int64[Tensor, "T K"],
        top_k_weights: Float[Tensor, "T K"],
    ) -> Float[Tensor, "T H"]:
        """Return the weighted expert output of each token of this rank; collective over the expert-parallel group."""
        step, layer = self.execution or (None, 0)
        tables = step.tables(layer) if step else None
        if step is None or tables is None:
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        rows = step.rows(tables, len(hidden_states))
        if rows is None:
            step.check(tables, top_k_index)
            return self._planned(tables, hidden_states, top_k_index, top_k_weights)
        planned, live = rows
        step.check(tables, top_k_index[planned])
        outputs = [
            self._planned(tables, hidden_states[planned], top_k_index[planned], top_k_weights[planned]),
            super().__call__(hidden_states[live], top_k_index[live], top_k_weights[live]),
        ]
        return torch.cat(outputs)[torch.argsort(torch.cat([planned, live]))]

    def _planned(self, tables: RankTables, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Run the token-slots of the plan. Pushes come first: see `replica_slots` for why that orders the backward."""
        replicas = None
        if tables.pushes:
            assert self.push_group is not None, "execute_plan makes the group before it hands over a plan"
            homes = {name: getattr(self.experts, name) for name in self.names}
            replicas = push_weights(tables, homes, self.push_group)
        dispatched = dispatch(tables, hidden_TH, experts_TK, self.ep_mesh.get_group())
        rows_YH, slot_Y, num_home = dispatched.rows_YH, dispatched.slot_Y, tables.num_home_rows
        output_YH = self._run_experts(rows_YH[:num_home], slot_Y[:num_home])  # while replicas arrive
        if replicas is not None:
            replicas.wait()
            if num_home < len(rows_YH):
                with replicas_in(self.experts, replicas):
                    of_replicas = self._run_experts(rows_YH[num_home:], slot_Y[num_home:] - tables.num_homes)
                output_YH = torch.cat([output_YH, of_replicas])
            output_YH = tie(output_YH, replicas)
        return combine(dispatched, output_YH, weights_TK)

    def _run_experts(self, rows_YH: Tensor, slot_Y: Tensor) -> Tensor:
        """Run the module's own forward on rows that chose one expert each, with weight 1.

        Without rows it runs a dummy: parameters then get a gradient of zero, so that FSDP reduces them on every rank.
        """
        if len(rows_YH) == 0:
            return self._run_experts(rows_YH.sum(dim=0, keepdim=True), slot_Y.new_zeros(1))[:0]
        return self.experts_forward(rows_YH, slot_Y.unsqueeze(1), rows_YH.new_ones((len(rows_YH), 1)))


def register() -> None:
    """Make `DistributedConfig(ep_implementation="relibra")` known to transformers; again does no harm."""
    EPImplementationInterface.register(NAME, BalancedEP)


def balanced_layers(model: nn.Module) -> dict[int, BalancedEP]:
    """Return the layers that can follow a plan, by ascending decoder layer.

    raises   EngineError when the model has none, or two decoders
    """
    layers: dict[int, BalancedEP] = {}
    for name, module in model.named_modules():
        layer = getattr(module, _ATTRIBUTE, None)
        if layer is None:
            continue
        match = _DECODER_LAYER.search(f"{name}.")
        if match is None or int(match.group(1)) in layers:
            raise EngineError(
                f"experts {name!r} belong to no decoder layer of their own ('layers.<number>.'), so a plan has no "
                "place for them: pass a model with one decoder"
            )
        layers[int(match.group(1))] = layer
    if not layers:
        raise EngineError(
            f"no experts of {type(model).__name__} can follow a plan: call relibra.parallel.register() and load the "
            f"model with DistributedConfig(fsdp_size=R, ep_size=R, ep_implementation={NAME!r})"
        )
    return dict(sorted(layers.items()))
