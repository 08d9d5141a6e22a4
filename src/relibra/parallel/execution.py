"""Hand a `StepPlan` to the expert-parallel layers of a model, one micro-batch after another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn

from relibra.errors import EngineError, PlanError
from relibra.parallel.balanced import BalancedEP, balanced_layers
from relibra.parallel.canonical import CHUNK
from relibra.parallel.layer import run_at_home_canonically, run_planned
from relibra.parallel.micro_batch import PlannedMicroBatch, make_row_lists, mismatch, recorded
from relibra.parallel.plan_checks import broken_rule, check_fit, disagreement
from relibra.parallel.replicas.host_pool import HostPool
from relibra.parallel.replicas.replica_slots import LayerReplicas, ReplicaSlots
from relibra.parallel.rows.exchange import gathered, waiting
from relibra.parallel.rows.rank_tables import Place, RankTables, rank_tables
from relibra.planning.plan import StepPlan
from relibra.replay import BatchRoutes, RoutingReplay, replay_routing
from relibra.replay.checkpointing import is_recompute
from relibra.routing.demand import Demand
from relibra.timeline import Timeline, TimelineRecorder

Sums = Literal["fast", "canonical"]

_log = logging.getLogger(__name__)


class PlanExecution:
    """A plan on its way through a model; see `execute_plan`.

    follows_plan   whether plan and model fit and all ranks hold the same plan; else every layer runs at home
    ran_at_home    micro-batches that did not follow the plan, each time one was entered
    recorder       notes the events of `timeline`
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[BalancedEP],
        plan: StepPlan,
        demand: Demand | None,
        sums: Sums,
        pool: HostPool | None,
    ) -> None:
        """Take a plan, and the demand under its schedule; without a demand every micro-batch runs at home."""
        self._model, self._layers, self._plan, self._demand = model, layers, plan, demand
        self._sums, self._pool, self.follows_plan = sums, pool, demand is not None
        self.ran_at_home: list[int] = []
        self._awaiting_recompute: set[int] = set()  # layers whose last forward pass was inside a micro-batch
        self._group = layers[0].ep_mesh.get_group()
        self._rank, self._num_ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._device = next(model.parameters()).device
        self.recorder = TimelineRecorder(dist.get_rank(), dist.get_world_size())
        self._homes_stay_whole = layers[0].homes_stay_whole
        self._chunk = CHUNK if sums == "canonical" else None
        self._pool_is_current = False
        self._source: HostPool | None = None  # of the weights of replicas in this micro-batch; None: their homes
        self._number: int | None = None
        self._micro_batch: PlannedMicroBatch | None = None  # None inside a micro-batch: it runs at home

    @contextmanager
    def micro_batch(self, number: int, routes: BatchRoutes | None = None) -> Iterator[RoutingReplay | None]:
        """Replay routes inside, forward and backward, and run the experts as the plan says; collective.

        With activation checkpointing the backward pass has to be inside too. Several micro-batches may be in flight:
        enter the context of one again, with the same `BatchRoutes`, around its backward pass.

        number    micro-batch of the plan, from 0
        routes    recorded routes of this rank's batch. Rows that are not valid, such as padding and last tokens, go
                  where the router sends them, on the static layout, beside the planned ones. None: this rank has no
                  sample in this micro-batch, and its whole batch is filler
        raises    EngineError inside another micro-batch, for a number that the plan does not have, or when a peer is
                  gone

        Where the routes of any rank are not those of the plan, all ranks run this micro-batch at home, and the first of
        them that differs logs a warning that says where.
        """
        if self._number is not None:
            raise EngineError(f"micro-batch {number} begins inside micro-batch {self._number}: leave that one first")
        if not 0 <= number < len(self._plan.replica_MLRB):
            raise EngineError(f"the plan has micro-batches 0 to {len(self._plan.replica_MLRB) - 1}, not {number}")
        if routes is not None and routes.num_rows == 0:
            routes = None
        self._micro_batch = self._prepare(number, routes)
        if self._micro_batch is None:
            self.ran_at_home.append(number)
        self._number = number
        if self._slots is not None:
            self._slots.pool, self._slots.recorder = self._source, self.recorder
        try:
            with nullcontext() if routes is None else replay_routing(self._model, routes) as replay:
                yield replay
            if self._slots is not None and self._source is None:
                self._slots.forget()
        except BaseException:
            if self._slots is not None:
                self._slots.close()
            # What FSDP exchanges fails here without a word about where.
            with waiting("the model's own communication", self._last_place(number), range(self._num_ranks)):
                raise
        finally:
            self._number, self._micro_batch = None, None

    def timeline(self) -> Timeline:
        """Return what this rank did so far: pushes, returns, exchanges, and how long it waited for them."""
        return self.recorder.timeline()

    def run_layer(
        self,
        layer: BalancedEP,
        position: int,
        hidden_TH: Float[Tensor, "T H"],
        experts_TK: Int64[Tensor, "T K"],
        weights_TK: Float[Tensor, "T K"],
    ) -> Float[Tensor, "T H"]:
        """Run one layer as the plan says; what has no plan runs at home. Collective."""
        if not is_recompute():
            inside = self._number is not None
            (self._awaiting_recompute.add if inside else self._awaiting_recompute.discard)(position)
            if not inside and torch.is_grad_enabled():
                self._pool_is_current = False  # an optimizer step may follow
        elif self._number is None and position in self._awaiting_recompute:
            raise EngineError(
                f"layer {self._plan.layer_ids[position]}: activation checkpointing recomputes it outside of any "
                "micro-batch of the plan: call backward() inside micro_batch(...) of its forward pass"
            )
        current = self._micro_batch
        if current is None:
            return self._run_at_home(layer, position, hidden_TH, experts_TK, weights_TK)
        rows = current.rows(len(hidden_TH), position)
        if rows is None:
            return self._run_planned(current, position, hidden_TH, experts_TK, weights_TK)
        planned, live, back = rows
        outputs = [
            self._run_planned(current, position, hidden_TH[planned], experts_TK[planned], weights_TK[planned]),
            self._run_at_home(layer, position, hidden_TH[live], experts_TK[live], weights_TK[live]),
        ]
        return torch.cat(outputs)[back]

    def _run_planned(
        self, current: PlannedMicroBatch, position: int, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        current.check(position, experts_TK)
        layer, tables = self._layers[position], current.tables_L[position]
        replicas = None
        if tables.pushes:
            slots = self._slots_for(layer)
            replicas = LayerReplicas(
                slots,
                tables,
                fill=lambda: self._begin_push(current, position),
                next_before=lambda: self._begin_push_of_neighbour(current, position, -1),
            )
        output_TH = run_planned(layer, tables, current.lists_L[position], replicas, hidden_TH, weights_TK)
        if not is_recompute():
            self._begin_push_of_neighbour(current, position, +1)
        return output_TH

    def _run_at_home(
        self, layer: BalancedEP, position: int, hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        place = Place(self._rank, int(self._plan.layer_ids[position]), -1 if self._number is None else self._number)
        with (
            self.recorder.record("at home", layer=place.layer_id, micro_batch=place.micro_batch),
            waiting("the exchange of rows", place, range(self._num_ranks)),
        ):
            if self._sums == "canonical":
                return run_at_home_canonically(
                    layer, place.layer_id, place.micro_batch, hidden_TH, experts_TK, weights_TK
                )
            return layer.run_at_home(hidden_TH, experts_TK, weights_TK)

    def _begin_push(self, current: PlannedMicroBatch, position: int) -> None:
        layer = self._layers[position]
        self._slots_for(layer).begin(current.tables_L[position], position, layer.homes)

    def _begin_push_of_neighbour(self, current: PlannedMicroBatch, position: int, step: Literal[1, -1]) -> None:
        """Begin the pushes of the next layer with replicas: its weights are known, and the slots are free now."""
        if self._slots is None or (self._source is None and not self._homes_stay_whole):
            return
        position += step
        while 0 <= position < len(self._layers) and not current.tables_L[position].pushes:
            position += step
        if 0 <= position < len(self._layers):
            self._begin_push(current, position)
        elif step == 1 and self._source is not None:
            self._begin_fetch_of_next(current.number + 1)

    def _begin_fetch_of_next(self, number: int) -> None:
        """Begin to fetch the first replicas of the next micro-batch: what is in a pool does not change meanwhile."""
        if self._slots is None or number == len(self._plan.replica_MLRB):
            return
        for position in range(len(self._layers)):
            tables = self._tables(number, position)
            if tables.pushes:
                self._slots.begin(tables, position, self._layers[position].homes)
                return

    def begin_first_push(self) -> None:
        """Begin the pushes of the first layer, when the forward pass of a micro-batch begins."""
        if self._micro_batch is not None and not is_recompute():
            self._begin_push_of_neighbour(self._micro_batch, -1, +1)

    @property
    def _slots(self) -> ReplicaSlots | None:
        return self._layers[0].slots

    def _slots_for(self, layer: BalancedEP) -> ReplicaSlots:
        """Return the slots of all layers, made by the first layer that needs them."""
        slots = self._layers[0].slots
        if slots is None or slots.num_slots != self._plan.slots:
            assert layer.push_group is not None, "execute_plan made the group"
            homes = layer.homes()
            alike = [{name: getattr(other.experts, name).shape[1:] for name in other.names} for other in self._layers]
            assert all(shapes == alike[0] for shapes in alike), "all layers have experts of one shape"
            slots = ReplicaSlots(homes, self._plan.slots, layer.push_group, self.recorder)
            slots.pool = self._source
            self._layers[0].slots = slots
        return slots

    def _prepare(self, number: int, routes: BatchRoutes | None) -> PlannedMicroBatch | None:
        """Make the tables and row lists of a micro-batch; None: it does not follow the plan. Collective."""
        place = Place(self._rank, -1, number)
        problem, tables_L, experts_PLK = None, [], recorded(routes, len(self._layers))
        if self._demand is not None:
            tables_L = [self._tables(number, layer) for layer in range(len(self._layers))]
            problem = mismatch(tables_L, experts_PLK) if self._fits(routes) else "they are of other layers"
        any_live = routes is None or not bool(routes.valid_T.all())
        from_pool = self._pool is not None and not torch.is_grad_enabled()
        told_Rn = self._told_by_all([number, from_pool, problem is not None, any_live], place)
        differs_R, live_R = told_Rn[:, 2], told_Rn[:, 3]
        self._choose_source(place, from_pool)
        if self._demand is None:
            return None
        if differs_R.any():
            if self._rank == int(differs_R.nonzero()[0]):
                _log.warning(
                    "%s: the routes are not those of the plan (%s), so all ranks run this micro-batch without it: "
                    "replay the routes that the plan was made for, on the ranks and in the micro-batches it says",
                    place,
                    problem,
                )
            return None
        return PlannedMicroBatch(
            number=number,
            tables_L=tables_L,
            lists_L=make_row_lists(tables_L, experts_PLK, self._group, self._device, once=self._chunk is None),
            routes=routes,
            any_live=bool(live_R.any()),
            device=self._device,
        )

    def _fits(self, routes: BatchRoutes | None) -> bool:
        return routes is None or list(routes.layer_ids) == self._plan.layer_ids.tolist()

    def _tables(self, number: int, position: int) -> RankTables:
        assert self._demand is not None, "tables are of micro-batches that follow the plan"
        return rank_tables(self._plan, self._demand, self._rank, number, position, self._chunk)

    def _choose_source(self, place: Place, from_pool: bool) -> None:
        """Fetch weights from the pool where nobody needs gradients, after a look at its age; collective."""
        if self._slots is not None and not (from_pool and self._pool_is_current):
            self._slots.forget()  # weights may have changed since
        if self._pool is not None and from_pool and not self._pool_is_current:
            with waiting("a look at the host pool", place, range(dist.get_world_size())):
                self._pool.keep_current()
        self._pool_is_current = from_pool  # after a pass with gradients, an optimizer step may follow
        self._source = self._pool if from_pool else None

    def _last_place(self, number: int) -> Place:
        """Return where this rank was last seen: in the layer that last exchanged something."""
        events = self.recorder.timeline().events
        return Place(self._rank, events[-1].layer if events else -1, number)

    def _told_by_all(self, own: list[int], place: Place) -> Tensor:
        """Return what every rank says, `[R, n]`, after all have come to one micro-batch in one mode; collective.

        The first two numbers are the micro-batch and whether weights come from the pool. Ranks that differ in them do
        other things from here on, with messages that may fit by chance.
        """
        mine = torch.tensor(own, dtype=torch.int64, device=self._device)
        told_Rn = torch.stack(gathered(mine, self._group, "the agreement", place)).cpu()
        for column, what in enumerate(("micro-batches", "modes (1: without gradients and with a pool)")):
            if (told_Rn[:, column] != told_Rn[0, column]).any():
                raise EngineError(
                    f"{place}: the ranks of the group are in {what} {told_Rn[:, column].tolist()}: enter micro-batches "
                    "in one order on all ranks, all with gradients or all without; a rank without samples passes None"
                )
        return told_Rn


@contextmanager
def execute_plan(
    model: nn.Module, plan: StepPlan, demand: Demand, *, sums: Sums = "fast", pool: HostPool | None = None
) -> Iterator[PlanExecution]:
    """Execute a plan inside a model that was loaded with `ep_implementation="relibra"`.

    Collective over the expert-parallel group; the first time for a model, which makes process groups, over all ranks.
    Outputs and gradients are those of the same model without a plan, up to the order of sums. Outside of
    `micro_batch` the model runs as with `all_to_all`.

    plan     of the same layers, experts and ranks; its homes are where the model's experts are (`relocate`)
    demand   what the plan was made for; its own schedule does not matter
    sums     "fast", or "canonical": outputs, gradients and so the whole run have the same bits under every plan of one
             schedule, at a price (docs/execution.md)
    pool     weights of replicas come from it in micro-batches without gradients (log-probabilities of the old policy);
             with gradients they come from their homes
    raises   EngineError when plan and model do not fit, or another plan is being executed

    A plan that breaks a rule, or that ranks disagree on, is not followed: every micro-batch runs at home, and one rank
    logs one warning that says why.

        with execute_plan(model, plan, demand) as step:
            for m, batch in enumerate(batches):
                with step.micro_batch(m, batch.routes):
                    loss(model(batch.input_ids)).backward()
    """
    by_layer = balanced_layers(model)
    layers = list(by_layer.values())
    if any(layer.execution is not None for layer in layers):
        raise EngineError("the model is executing another plan: leave its execute_plan context first")
    _make_push_group(layers)
    group, device = layers[0].ep_mesh.get_group(), next(model.parameters()).device
    scheduled = _scheduled(plan, demand)
    problem = disagreement(plan, scheduled, layers, f"{sums}, pool: {pool is not None}", group, device)
    if problem is None:
        assert isinstance(scheduled, Demand), "a rank without a demand is a disagreement"
        check_fit(plan, by_layer)
        problem = broken_rule(plan, scheduled)
    if problem is not None and dist.get_rank(group) == 0:
        _log.warning("the plan is not followed, every expert runs at home: %s", problem)
    usable = scheduled if problem is None and isinstance(scheduled, Demand) else None
    execution = PlanExecution(model, layers, plan, usable, sums, pool)
    handle = model.register_forward_pre_hook(lambda *_: execution.begin_first_push())
    try:
        for position, layer in enumerate(layers):
            layer.execution = (execution, position)
        yield execution
    finally:
        handle.remove()
        for layer in layers:
            layer.execution = None
        if layers[0].slots is not None:
            layers[0].slots.close()


def _make_push_group(layers: list[BalancedEP]) -> None:
    """Make groups for pushes, once per model, one for each expert-parallel group; collective over all ranks.

    Groups that only their members make (`use_local_synchronization`) would do, but torch names them after the number of
    groups that a rank has, and ranks that have unequally many, as in a `HostPool`, would wait for each other forever.
    """
    if layers[0].push_group is not None:
        return
    group = layers[0].ep_mesh.get_group()
    ranks = dist.get_process_group_ranks(group)
    device = torch.device(layers[0].ep_mesh.device_type)
    timeout = group._get_backend(device).options._timeout  # else the default of half an hour
    own_R = torch.tensor(ranks, device=device)
    assert dist.group.WORLD is not None, "a model on several ranks has process groups"
    everyone = gathered(own_R, dist.group.WORLD, "making groups for pushes", Place(dist.get_rank(), -1, -1))
    all_groups = sorted({tuple(ranks_R.tolist()) for ranks_R in everyone})
    made = {members: dist.new_group(members, timeout=timeout) for members in all_groups}
    push_group = made[tuple(ranks)]
    assert dist.get_rank(push_group) == dist.get_rank(group), "both groups number their ranks alike"
    # NCCL wants all ranks in the first operation of a group, and not every rank takes part in every push.
    dist.all_reduce(torch.zeros(1, device=device), group=push_group)
    for layer in layers:
        layer.push_group = push_group


def _scheduled(plan: StepPlan, demand: Demand) -> Demand | PlanError:
    """Return the demand under the schedule of the plan, or why there is none: the others have to hear of it first."""
    try:
        return plan.scheduled(demand)
    except PlanError as error:
        return error
