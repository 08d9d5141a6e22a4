"""`PlanRunner`: plans the generation batches of a run one after another, and executes the current plan.

A plan is executed from one optimizer step to the next, and entered again for the next one: so saving, evaluation and
sampling, which come between steps, find a model that executes nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from relibra.cluster import Cluster, cluster_preset
from relibra.errors import EngineError
from relibra.parallel import PlanExecution, execute_plan, logical_order, relocate
from relibra.parallel.balanced import BalancedEP, balanced_layers
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.replay import BatchRoutes, RoutingReplay
from relibra.routing.demand import ScheduledDemand
from relibra.simulation import Execution, counted_model_shape, memory_for_slots


class Executed(NamedTuple):
    """What this rank executed between two optimizer steps.

    ran_at_home    micro-batches that did not follow their plan
    pushed_bytes   weights of replicas that it sent
    """

    ran_at_home: int = 0
    pushed_bytes: int = 0


class PlanRunner:
    """Plans and executes generation batches in a model that was loaded with `ep_implementation="relibra"`.

    num_ranks   of an expert-parallel group, `R`
    may_move    plans may change the homes of experts
    """

    def __init__(self, model: nn.Module, cluster: Cluster | str, budget: Budget | None, balancer: str) -> None:
        """Check model, cluster and budget; plan nothing yet.

        raises   EngineError for a model whose experts cannot follow a plan, ClusterError for an unknown cluster
        """
        self._model, [first, *_] = model, list(balanced_layers(model).values())
        self.num_ranks = _check_group(first)
        self._cluster = cluster_preset(cluster, self.num_ranks) if isinstance(cluster, str) else cluster
        self._expert, self._balancer = _expert_shape(model, first), balancer
        # Samples stay where TRL has put them: its micro-batches are equal in number, and some losses average over them.
        self._budget = replace(budget or Budget(), pack_samples=False)
        self.may_move = self._budget.move_homes
        self._demand: ScheduledDemand | None = None
        self._plan: StepPlan | None = None
        self._open = ExitStack()
        self._execution: PlanExecution | None = None
        self._since_log = Executed()

    def begin(
        self, demand: ScheduledDemand, optimizer: torch.optim.Optimizer | None, *, may_move: bool
    ) -> dict[str, float]:
        """Plan a generation batch, and move experts to their homes in it; collective.

        Returns figures of the plan for the log (`PlannedGRPO`).

        demand      of all ranks, the same on all
        may_move    no gradients wait to be reduced, so experts may change their homes
        """
        self.close()
        budget = self._budget if may_move else replace(self._budget, move_homes=False)
        if budget.memory_gib is None:
            budget = replace(budget, memory_gib=self._memory_for_slots(demand))
        plan = plan_step(demand, self._cluster, budget, self._balancer, expert=self._expert, previous=self._plan)
        if not np.array_equal(plan.physical_to_logical_map, plan.previous_map):
            relocate(self._model, plan.physical_to_logical_map, optimizer)
        self._plan, self._demand = plan, demand
        static = StepPlan.static(demand, self._cluster.topology, dispatch=plan.dispatch)
        return {
            "skew_before": static.skew(demand),
            "skew": plan.skew(demand),
            "replicas": plan.num_copies,
            "moved": plan.num_moved,
            "plan_seconds": plan.plan_seconds,
        }

    def _memory_for_slots(self, demand: ScheduledDemand) -> float:
        """Return the GiB that the model leaves for slots."""
        model: Any = self._model
        L, E = demand.counts_SLE.shape[1:]
        shape = counted_model_shape(model.config.get_text_config().to_dict(), L, E, demand.top_k or 1, self._expert)
        how = Execution(recompute_activations=model.is_gradient_checkpointing, whole_logits=True)
        return memory_for_slots(demand, self._cluster, shape, how)

    def micro_batch(self, number: int, routes: BatchRoutes) -> AbstractContextManager[RoutingReplay | None]:
        """Return the context of the passes of a micro-batch of the current plan; collective."""
        assert self._plan is not None, "a generation batch is planned before it is trained"
        assert self._demand is not None, "a plan has a demand"
        if self._execution is None:
            self._execution = self._open.enter_context(execute_plan(self._model, self._plan, self._demand))
        return self._execution.micro_batch(number, routes)

    def close(self, error: BaseException | None = None) -> None:
        """End the execution of the plan, if it has begun; collective, unless an error ends it."""
        if self._execution is None:
            return
        execution, self._execution = self._execution, None
        stack, self._open = self._open, ExitStack()
        if error is not None:
            stack.__exit__(type(error), error, error.__traceback__)
            return
        stack.close()
        pushed = sum(event.bytes for event in execution.timeline().events if event.stage == "push")
        self._since_log = Executed(
            self._since_log.ran_at_home + len(execution.ran_at_home), self._since_log.pushed_bytes + pushed
        )

    def finish(self) -> Executed:
        """End the execution of the plan before an optimizer step; return what was done since the last; collective."""
        self.close()
        done, self._since_log = self._since_log, Executed()
        return done

    def logical_order(self, optimizer: torch.optim.Optimizer | None) -> AbstractContextManager[None]:
        """Return a context with experts in logical order, to save the model; collective."""
        self.close()
        return logical_order(self._model, optimizer)


def _expert_shape(model: nn.Module, layer: BalancedEP) -> ExpertShape:
    """Return the size of one expert: gate, up and down, in the type of the weights."""
    stacked = [p for p in (getattr(layer.experts, name) for name in layer.parameter_names) if p.ndim == 3]
    config: Any = model.config
    hidden = int(config.get_text_config().hidden_size)
    width = min(p.shape[1] * p.shape[2] for p in stacked) // hidden  # gate and up are often one parameter
    return ExpertShape(hidden=hidden, width=max(1, width), bytes_per_value=stacked[0].dtype.itemsize)


def _check_group(layer: BalancedEP) -> int:
    """Return the ranks of an expert-parallel group; raise EngineError unless they are consecutive."""
    members = dist.get_process_group_ranks(layer.ep_mesh.get_group())
    size = len(members)
    if members != list(range(members[0] // size * size, members[0] // size * size + size)):
        raise EngineError(
            f"the ranks {members} share the experts of the model: TRL's samples are planned for consecutive ranks, "
            "as DistributedConfig makes them with tp_size=1 and pp_size=1"
        )
    return size
