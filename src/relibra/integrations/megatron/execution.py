"""`execute_plan`: run the micro-batches of a Megatron model as a `StepPlan` says; `gather_demand`: what to plan for.

All counts follow from plan and demand, so layers exchange no counts and do not wait for the device. Counts that the
routers chose are compared with the planned ones; where they differ, an EngineError says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Integer
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import EngineError, RelibraError
from relibra.integrations.megatron.moe_layer import LayerPlan, PlannedMoELayer
from relibra.integrations.megatron.route_replay import RouteReplay
from relibra.integrations.shared_failures import all_gather, on_all_ranks
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import rank_tables
from relibra.planning.validation import validate_plan
from relibra.routing.demand import Demand, ScheduledDemand, count_token_slots


def planned_layers(chunks: Sequence[nn.Module]) -> dict[int, PlannedMoELayer]:
    """Return the planned layers of a model on this rank by absolute decoder layer; draft (MTP) layers are left out.

    chunks   one module, or one per virtual pipeline stage
    raises   EngineError when there are none
    """
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PlannedMoELayer) and not m.is_mtp_layer]
    if not layers:
        raise EngineError(
            "the model has no layers that follow a plan: build it from with_planned_layers(its layer spec)"
        )
    return {layer.layer_id: layer for layer in sorted(layers, key=lambda layer: layer.layer_id)}


def gather_demand(
    ids_MTLK: Sequence[Integer[ndarray, "_ L K"]],
    group: dist.ProcessGroup,
    *,
    num_experts: int,
    layer_ids: Int[ndarray, " L"],
) -> ScheduledDemand:
    """Return the demand of the micro-batches of an expert-parallel group, the same on all its ranks; collective.

    A sample of the demand stands for all rows of one rank in one micro-batch: parts of samples, and padding.

    ids_MTLK   per micro-batch, the experts of each row of this rank (`PackedRows.routes`); as many as on other ranks
    raises     EngineError where ranks have other numbers of micro-batches, or routes another number of
               layers than `layer_ids`; TraceError for ids out of range
    """
    num_ranks, M = dist.get_world_size(group), len(ids_MTLK)
    device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")

    def count() -> Int[ndarray, "M L E"]:
        counts_MLE = np.zeros((M, len(layer_ids), num_experts), dtype=np.int32)
        for m, ids_TLK in enumerate(ids_MTLK):
            counts_MLE[m] = _count(m, ids_TLK, num_experts, len(layer_ids))
        return counts_MLE

    counts_MLE = on_all_ranks(count, "count its routes", device=device, group=group)
    numbers = [int(n) for n in all_gather(torch.tensor([M], device=device), group)]
    if len(set(numbers)) > 1:
        raise EngineError(f"ranks of an expert-parallel group have {numbers} micro-batches")
    gathered = all_gather(torch.from_numpy(counts_MLE).to(device), group)
    counts_SLE = np.concatenate([counts.cpu().numpy() for counts in gathered])
    demand = Demand(
        counts_SLE=counts_SLE,
        layer_ids=np.asarray(layer_ids),
        sample_ids=np.arange(num_ranks * M),
        top_k=ids_MTLK[0].shape[2] if M else None,
    )
    micro_batch_S, rank_S = np.tile(np.arange(M), num_ranks), np.repeat(np.arange(num_ranks), M)
    return demand.with_schedule(micro_batch_S, rank_S, num_ranks, M)


def _count(m: int, ids_TLK: Integer[ndarray, "T L K"], num_experts: int, num_layers: int) -> Int[ndarray, "L E"]:
    """Return the token-slots of one micro-batch of this rank."""
    if ids_TLK.shape[1] != num_layers:  # one layer would be counted for all
        raise EngineError(
            f"micro-batch {m} has routes of {ids_TLK.shape[1]} layers, and layer_ids names {num_layers}: one for each"
        )
    all_T = np.ones(len(ids_TLK), dtype=bool)
    return count_token_slots(ids_TLK, all_T, np.array([0, len(ids_TLK)]), num_experts)[0]


@contextmanager
def execute_plan(
    chunks: Sequence[nn.Module], plan: StepPlan, demand: Demand, *, first_micro_batch: int = 0
) -> Iterator[MegatronPlanExecution]:
    """Execute a plan inside a model whose layers are `PlannedMoELayer`; collective over the expert-parallel group.

    Outputs are those of the same model without a plan, bit for bit where the kernels of the experts do not depend on
    the number of rows; gradients up to the order of sums.

    plan                of the model's layers, experts and expert-parallel ranks; its homes are where the experts are
    demand              what the plan was made for
    first_micro_batch   the plan's number of the first micro-batch of this rank's group (`ScheduledDemand.of_groups`)
    raises              EngineError when plan and model do not fit, or ranks have different plans

        with execute_plan([model], plan, demand) as step:
            for number, ids_TLK in enumerate(routes):
                step.begin(number, ids_TLK)
                loss(model(...)).backward()
    """
    layers = planned_layers(chunks)
    scheduled = _check_plan(layers, plan, demand)
    execution = MegatronPlanExecution(chunks, layers, plan, scheduled, first_micro_batch)
    with execution.replay_routes:
        try:
            yield execution
            execution.check()
        finally:
            for layer in layers.values():
                layer.passes.clear()


class MegatronPlanExecution:
    """A plan being executed, as `execute_plan` yields it."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        layers: dict[int, PlannedMoELayer],
        plan: StepPlan,
        demand: ScheduledDemand,
        first: int,
    ) -> None:
        """Begin outside of any micro-batch."""
        self.replay_routes = ExitStack()
        self._chunks, self._layers, self._plan, self._demand, self._first = chunks, layers, plan, demand, first
        self._replay: RouteReplay | None = None
        self._differences: list[tuple[str, Tensor]] = []

    def begin(self, number: int, ids_TLK: Integer[ndarray, "T L K"] | None = None) -> None:
        """Let the next forward pass of a chunk run this micro-batch; called before it, in `forward_step`.

        number    micro-batch of this rank's group, from 0
        ids_TLK   experts of each row of this rank, layers as in the plan (`PackedRows.routes`); None: the trainer
                  fills `RouterReplay` itself
        raises    EngineError for a number that the plan does not have, routes that no router can follow, and where
                  routers chose other counts than planned in an earlier micro-batch: `check`, which waits for the device
        """
        planned = self._first + number
        if not 0 <= number <= planned < len(self._plan.replica_MLRB):
            raise EngineError(f"micro-batch {planned} is not in the plan: it has {len(self._plan.replica_MLRB)}")
        self.check()
        positions = {int(layer): position for position, layer in enumerate(self._plan.layer_ids)}
        for layer_id, layer in self._layers.items():
            rank = dist.get_rank(layer.ep_group)
            tables = partial(rank_tables, self._plan, self._demand, rank, planned, positions[layer_id])
            layer.passes.begin(LayerPlan(tables, self.note_difference))
        if ids_TLK is not None and self._replay is None:
            self._replay = self.replay_routes.enter_context(RouteReplay(self._chunks, self._plan.layer_ids.tolist()))
        if self._replay is not None:
            self._replay.begin(ids_TLK)

    @property
    def num_awaiting(self) -> int:
        """Return the number of forward passes of layers that wait for their recomputation; 0 between steps."""
        return sum(layer.passes.num_awaiting for layer in self._layers.values())

    def clear(self) -> None:
        """Forget forward passes that will not be recomputed, as after a pass that only scores."""
        for layer in self._layers.values():
            layer.passes.clear()
        if self._replay is not None:
            self._replay.clear()

    def check(self) -> None:
        """Raise EngineError if routers chose other counts than planned; waits for the device once."""
        differences, self._differences = self._differences, []
        if not differences:
            return
        places, sums = zip(*differences, strict=True)
        if wrong := [where for where, n in zip(places, torch.stack(sums).tolist(), strict=True) if n]:
            raise EngineError(
                f"{wrong[0]}: the routers chose other experts than planned, and results of this step are wrong: replay "
                "the routes that the demand was counted from, padding included, and stop this step"
            )

    def note_difference(self, where: str, tokens_E: Tensor, planned_E: Tensor) -> None:
        """Remember by how much counts differ; on a CPU, raise at once."""
        self._differences.append((where, (tokens_E - planned_E).abs().sum()))
        if tokens_E.device.type == "cpu":
            self.check()


def _check_plan(layers: dict[int, PlannedMoELayer], plan: StepPlan, demand: Demand) -> ScheduledDemand:
    """Return the demand as planned; EngineError where plan and model do not fit, or ranks differ; collective."""
    refusal: RelibraError | None = None
    try:
        scheduled = plan.scheduled(demand)
        _check_fit(layers, plan, scheduled)
    except RelibraError as error:
        refusal = error  # raised after the exchange, so that no rank waits for this one
    first = next(iter(layers.values()))
    state = bytes.fromhex(plan.digest() + demand.digest())
    if len(set(states_of_ranks(first, refusal, state, "the plan does not fit the model"))) > 1:
        raise EngineError("ranks of an expert-parallel group have different plans: make it on one rank, and send it")
    return scheduled


def _check_fit(layers: dict[int, PlannedMoELayer], plan: StepPlan, demand: ScheduledDemand) -> None:
    """Raise where a plan does not fit its demand, or the model on this rank."""
    validate_plan(plan, plan.topology, demand)
    first = next(iter(layers.values()))
    group, config = first.ep_group, first.config
    if (plan.num_ranks, plan.num_experts) != (dist.get_world_size(group), config.num_moe_experts):
        raise EngineError(
            f"the plan is for {plan.num_experts} experts on {plan.num_ranks} ranks, the model has "
            f"{config.num_moe_experts} on {dist.get_world_size(group)} expert-parallel ranks"
        )
    positions = {int(layer): position for position, layer in enumerate(plan.layer_ids)}
    for layer_id, layer in layers.items():
        if layer_id not in positions:
            raise EngineError(f"layer {layer_id} has experts and is not in the plan, of layers {list(positions)}")
        if not np.array_equal(plan.physical_to_logical_map[positions[layer_id]], layer.physical_to_logical_E):
            raise EngineError(
                f"layer {layer_id}: experts are not at the homes of the plan: call relocate(chunks, plan.physical_to_"
                "logical_map, optimizer) before"
            )
    if plan.slots and getattr(config, "gradient_accumulation_fusion", False):
        raise EngineError(
            "gradient_accumulation_fusion=True writes gradients past autograd, and those of replicas would be lost: "
            "build the model with False, or plan with Budget(slots=0)"
        )


def states_of_ranks(layer: PlannedMoELayer, refusal: RelibraError | None, state: bytes, what: str) -> list[bytes]:
    """Return the state of each expert-parallel rank; collective, so that no rank waits for one that refuses.

    refusal   why this rank cannot go on; None: it can
    state     of this rank; as long as that of others
    raises    the refusal here, elsewhere an EngineError with `what` and the ranks that refuse
    """
    own = torch.frombuffer(bytearray([refusal is not None, *state]), dtype=torch.uint8)
    gathered = all_gather(own.to(next(layer.parameters()).device), layer.ep_group)
    states_R = [bytes(one.cpu().numpy()) for one in gathered]
    if refusal is not None:
        raise refusal
    if refusing := [rank for rank, one in enumerate(states_R) if one[0]]:
        raise EngineError(f"{what}: see what expert-parallel ranks {refusing} say")
    return [one[1:] for one in states_R]
