"""Hand a `StepPlan` to the expert-parallel layers of a model, one micro-batch after another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Int64
from torch import Tensor, nn

from relibra.cluster import cluster_preset
from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP, balanced_layers
from relibra.parallel.dispatch import check_routes
from relibra.parallel.rank_tables import RankTables, rank_tables
from relibra.planning.plan import StepPlan
from relibra.replay.checkpointing import is_recompute
from relibra.routing.demand import Demand


class PlanExecution:
    """A plan on its way through a model; see `execute_plan`."""

    def __init__(self, plan: StepPlan, demand: Demand, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take a plan that has been validated, and the demand under its schedule."""
        self._plan, self._demand, self._group, self._device = plan, demand, group, device
        self._micro_batch: int | None = None
        self._valid_T: Tensor | None = None
        self._any_live = False
        self._tables: dict[int, RankTables] = {}
        self._unchecked: list[tuple[RankTables, Tensor]] = []

    @contextmanager
    def micro_batch(self, number: int, valid_T: Bool[Tensor, " T"] | None = None) -> Iterator[None]:
        """Run what happens inside, forward and backward, as the plan says for this micro-batch; collective.

        With activation checkpointing the backward pass has to be inside too. Several micro-batches may be in flight:
        enter the context of one again around its backward pass.

        number    micro-batch of the plan, from 0
        valid_T   rows that the plan knows (`BatchRoutes.valid_T`), None: all. The others, such as padding and last
                  tokens, are exchanged as `all_to_all` does it, on the static layout, beside the planned ones
        raises    EngineError when the routes of a layer are not those of the plan, inside another micro-batch, or for a
                  number that the plan does not have
        """
        if self._micro_batch is not None:
            raise EngineError(
                f"micro-batch {number} begins inside micro-batch {self._micro_batch}: leave that one first"
            )
        if not 0 <= number < len(self._plan.replica_MLRB):
            raise EngineError(f"the plan has micro-batches 0 to {len(self._plan.replica_MLRB) - 1}, not {number}")
        self._any_live = self._agree_on_live_rows(valid_T)
        self._valid_T, self._micro_batch = valid_T, number
        try:
            yield
        finally:
            unchecked, self._unchecked = self._unchecked, []
            self._micro_batch, self._valid_T = None, None
            self._tables.clear()
        for tables, actual_E in unchecked:
            check_routes(tables, actual_E)

    def tables(self, layer: int) -> RankTables | None:
        """Return what this rank does in a layer (position) of the current micro-batch; None outside of any."""
        if self._micro_batch is None:
            if is_recompute():
                raise EngineError(
                    f"layer {self._plan.layer_ids[layer]}: activation checkpointing recomputes it outside of any "
                    "micro-batch of the plan: call backward() inside micro_batch(...) of its forward pass"
                )
            return None
        if layer not in self._tables:
            rank = dist.get_rank(self._group)
            self._tables[layer] = rank_tables(self._plan, self._demand, rank, self._micro_batch, layer)
        return self._tables[layer]

    def check(self, tables: RankTables, experts_TK: Int64[Tensor, "T K"]) -> None:
        """Hold the routes of a layer against the plan before anything is sent.

        On an accelerator the comparison would make the host wait in every layer, so there only the number of
        token-slots is checked now, and the rest when the micro-batch ends.
        """
        experts = experts_TK.flatten()
        actual_E = experts.new_zeros(len(tables.tokens_E)).scatter_add_(0, experts, torch.ones_like(experts))
        if experts.is_cpu or len(experts) != len(tables.send_order_X):
            check_routes(tables, actual_E)
        else:
            self._unchecked.append((tables, actual_E))

    def rows(self, tables: RankTables, num_rows: int) -> tuple[Int64[Tensor, " P"], Int64[Tensor, " Q"]] | None:
        """Return the numbers of the planned and the live rows of this rank; None: all are planned, on every rank."""
        if not self._any_live:
            return None
        valid_T = torch.ones(num_rows, dtype=torch.bool) if self._valid_T is None else self._valid_T
        if len(valid_T) != num_rows:
            raise EngineError(
                f"layer {tables.layer_id}, micro-batch {tables.micro_batch}, rank {tables.rank}: valid_T has "
                f"{len(valid_T)} rows, the layer sees {num_rows}: pass the valid_T of exactly this batch"
            )
        planned, live = (mask.nonzero().flatten().to(self._device) for mask in (valid_T, ~valid_T))
        return planned, live

    def _agree_on_live_rows(self, valid_T: Tensor | None) -> bool:
        """Find out whether any rank has rows without a plan: then all have to take part in their exchange."""
        any_live = torch.zeros(1, dtype=torch.int32, device=self._device)
        if valid_T is not None:
            any_live += (~valid_T).any().to(self._device)
        dist.all_reduce(any_live, dist.ReduceOp.MAX, group=self._group)
        return bool(any_live.item())


@contextmanager
def execute_plan(model: nn.Module, plan: StepPlan, demand: Demand) -> Iterator[PlanExecution]:
    """Execute a plan inside a model that was loaded with `ep_implementation="relibra"`; collective.

    Outputs and gradients are those of the same model without a plan, up to the order of sums. Outside of
    `micro_batch` the model runs as with `all_to_all`.

    model    holds all experts in the static order: rank r those from r E / R on
    plan     of the same layers, experts and ranks, with homes that stay (`Budget(move_homes=False)`)
    demand   what the plan was made for; its own schedule does not matter
    raises   EngineError when plan and model do not fit, ranks hold different plans, or another plan is being executed;
             PlanError when the plan breaks a rule

        with execute_plan(model, plan, demand) as step:
            for m, batch in enumerate(batches):
                with step.micro_batch(m), replay_routing(model, batch.routes):
                    loss(model(batch.input_ids)).backward()
    """
    layers = balanced_layers(model)
    if any(layer.execution is not None for layer in layers.values()):
        raise EngineError("the model is executing another plan: leave its execute_plan context first")
    group, device = _push_group(list(layers.values())), next(model.parameters()).device
    demand = plan.scheduled(demand)
    _check_agreement(plan, demand, group, device)
    _check_fit(plan, layers)
    plan.validate(cluster_preset("h100x8", plan.num_ranks, plan.ranks_per_node), demand)  # only its shape is looked at
    execution = PlanExecution(plan, demand, group, device)
    try:
        for position, layer in enumerate(layers.values()):
            layer.execution = (execution, position)
        yield execution
    finally:
        for layer in layers.values():
            layer.execution = None


def _push_group(layers: list[BalancedEP]) -> dist.ProcessGroup:
    """Return the group for pushes, made once per model over the ranks of its expert-parallel group; collective."""
    if layers[0].push_group is None:
        group = layers[0].ep_mesh.get_group()
        ranks = dist.get_process_group_ranks(group)
        device = torch.device(layers[0].ep_mesh.device_type)
        timeout = group._get_backend(device).options._timeout  # else the default of half an hour
        made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert dist.get_rank(made) == dist.get_rank(group), "both groups number their ranks alike"
        for layer in layers:
            layer.push_group = made
    assert layers[0].push_group is not None, "the group was made above"
    return layers[0].push_group


def _check_agreement(plan: StepPlan, demand: Demand, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare plan and demand across ranks: ranks that do different things would wait for each other forever."""
    assert demand.tokens_MLRE is not None, "plan.scheduled gives a schedule"
    digest = hashlib.sha256(plan.digest().encode() + np.ascontiguousarray(demand.tokens_MLRE).tobytes()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    differing = [rank for rank, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if differing:
        raise EngineError(
            f"ranks {differing} hold another plan or demand than rank 0: make the plan on one rank and send it to the "
            "others, or plan with the same demand and version everywhere and without a deadline"
        )


def _check_fit(plan: StepPlan, layers: dict[int, BalancedEP]) -> None:
    """Hold layers, ranks, experts and homes of the plan against those of the model."""
    first = next(iter(layers.values()))
    num_ranks, per_rank = first.ep_mesh.size(), first.num_local_experts
    for what, ours, theirs in (
        ("layers", plan.layer_ids.tolist(), list(layers)),
        ("ranks", plan.num_ranks, num_ranks),
        ("experts", plan.num_experts, num_ranks * per_rank),
    ):
        if ours != theirs:
            raise EngineError(f"the plan is for {what} {ours}, the model has {theirs}: plan for this very model")
    if (plan.physical_to_logical_map != np.arange(plan.num_experts)).any():
        moved = plan.layer_ids[(plan.physical_to_logical_map != np.arange(plan.num_experts)).any(axis=1)]
        raise EngineError(
            f"the plan moves homes in layers {moved.tolist()}, and moving experts is not built yet: plan with "
            "Budget(move_homes=False)"
        )
