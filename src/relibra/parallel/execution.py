"""`execute_plan`: run the micro-batches of a model as a `StepPlan` says.

Before each micro-batch (`micro_batch.py`) all ranks agree on it; its layers then run as in `layer.py`. What makes ranks
run at home instead is in `fallback.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from relibra.errors import EngineError
from relibra.parallel.agreement import LastForward, Point
from relibra.parallel.balanced import LayerInput, agreement_of, balanced_layers, group_state_of
from relibra.parallel.canonical import Sums, chunk_of
from relibra.parallel.fallback import agree_on_step
from relibra.parallel.layer import run_at_home, run_layer
from relibra.parallel.micro_batch import ExecutedPlan, PlannedMicroBatch, prepare_micro_batch
from relibra.parallel.replicas.replica_gradients import GradientReturn
from relibra.parallel.replicas.replica_slots import ReplicaSlots
from relibra.parallel.replicas.residency import Residency, keep_slots
from relibra.parallel.rows.exchange import explain_peer_failure
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import Place
from relibra.replay import BatchRoutes, RoutingReplay, replay_routing
from relibra.replay.routers import is_recompute
from relibra.routing.demand import Demand
from relibra.timeline import Timeline, TimelineRecorder


class _Current(NamedTuple):
    """The micro-batch that is being run; `planned` is None where it runs at home."""

    number: int
    planned: PlannedMicroBatch | None


def _register_first_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a hook before those that FSDP has registered: those gather weights, which all ranks have to do."""
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks  # called in the order of this dictionary, for which there is no public API
    others = {key: other for key, other in hooks.items() if key != handle.id}
    hooks.clear()
    hooks.update({handle.id: hook, **others})


class PlanExecution:
    """A plan being executed, as `execute_plan` yields it.

    ran_at_home   numbers of micro-batches that did not follow the plan, in the order in which they were entered; one
                  that was entered twice is there twice
    followed      numbers of those that did
    """

    def __init__(self, executed: ExecutedPlan) -> None:
        """Start outside of any micro-batch."""
        self.ran_at_home: list[int] = []
        self.followed: list[int] = []
        self._executed = executed
        self._current: _Current | None = None
        self._forward_has_begun = True  # in the current micro-batch; nothing is to begin outside of one
        self._ran_inside: set[int] = set()  # layers whose last forward pass was inside a micro-batch

    @contextmanager
    def micro_batch(self, number: int, routes: BatchRoutes | None = None) -> Iterator[RoutingReplay | None]:
        """Replay routes inside, forward and backward, and run the experts as the plan says; collective.

        With activation checkpointing the backward pass has to be inside too. Several micro-batches may be in flight:
        enter the context of one again, with the same `BatchRoutes`, around its backward pass. If the routes of any rank
        are not those of the plan, all ranks run this micro-batch at home.

        number    micro-batch of the plan, from 0
        routes    recorded routes of this rank's batch. Rows of samples without a route, such as last tokens, run at
                  homes of the experts that the router picks; no expert computes padding. None: no sample of this rank
        raises    EngineError inside another micro-batch, for a number that a followed plan does not have, or when a
                  peer is gone
        """
        executed, state = self._executed, self._executed.state
        if self._current is not None:
            raise EngineError(
                f"micro-batch {number} begins inside micro-batch {self._current.number}: leave that one first"
            )
        last = len(executed.plan.replica_MLRB) - 1
        if executed.demand is not None and not 0 <= number <= last:
            raise EngineError(f"the plan has micro-batches 0 to {last}, not {number}")
        if routes is not None and routes.num_rows == 0:
            routes = None
        planned = prepare_micro_batch(executed, number, routes)
        (self.ran_at_home if planned is None else self.followed).append(number)
        self._current, self._forward_has_begun = _Current(number, planned), False
        try:
            with nullcontext() if routes is None else replay_routing(executed.model, routes) as replay:
                yield replay
            executed.slots.end_pass()
        except BaseException:
            executed.slots.forget_weights(frozen=True)
            # Errors of FSDP's own collectives do not say where they happened.
            layers = [event.layer for event in self.timeline().events if event.layer >= 0]
            place = Place(state.rank, layers[-1] if layers else -1, number)  # of the last exchange
            with explain_peer_failure("the model's own communication", place, range(state.num_ranks)):
                raise
        finally:
            self._current = None

    def timeline(self) -> Timeline:
        """Return what this rank did so far: pushes, returns, exchanges, and how long it waited for them."""
        return self._executed.recorder.timeline()

    def run_layer(self, position: int, tokens: LayerInput) -> Tensor:
        """Run one layer as the plan says, or at home without a plan; collective."""
        self._check_pass(position)
        executed, current = self._executed, self._current
        layer = executed.layers[position]
        self._begin_forward()
        if current is not None and current.planned is not None:
            return run_layer(layer, current.planned, position, tokens)
        number = -1 if current is None else current.number
        place = Place(executed.state.rank, executed.layer_ids[position], number)
        waiting = self._waiting_gradients(place, position)
        return run_at_home(
            layer,
            tokens,
            place,
            executed.recorder,
            canonical=executed.chunk is not None,
            ranks_per_node=executed.plan.ranks_per_node,
            waiting=waiting,
        )

    @torch.compiler.disable
    def start_first_push(self, *_: object) -> None:
        """Start the first push when the forward pass of a micro-batch begins."""
        if self._current is not None and not is_recompute():
            self._begin_forward()
            if self._current.planned is not None:
                self._current.planned.pushes.before_forward()

    @torch.compiler.disable
    def agree_before_backward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Make the backward pass of this forward pass begin with an agreement, a collective.

        So ranks learn that another rank does not run it before they wait for rows of that rank.
        """
        if self._current is None:
            return
        agreement, number = self._executed.agreement, self._current.number
        agreement.last_forward = LastForward.WITHOUT_GRADIENTS
        begun: list[None] = []

        def begin(_gradient: Tensor) -> None:
            if not begun:  # with the first gradient of any output
                begun.append(None)
                agreement.reach(Point.BACKWARD, number)

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                agreement.last_forward = LastForward.WITH_GRADIENTS
                _register_first_hook(tensor, begin)

    def _begin_forward(self) -> None:
        """Note, once per micro-batch, that its forward pass begins."""
        if self._current is not None and not self._forward_has_begun and not is_recompute():
            self._forward_has_begun = True
            self._executed.slots.begin_forward(self._current.number, training=torch.is_grad_enabled())

    def _waiting_gradients(self, place: Place, position: int) -> GradientReturn | None:
        """Return what sends home gradient sums that wait in slots of a layer that runs at home; None: none can wait."""
        executed, slots = self._executed, self._executed.slots
        if executed.chunk is not None or place.micro_batch < 0 or not torch.is_grad_enabled():
            return None
        if not slots.may_hold_gradients(place.micro_batch, position):
            return None
        buffer = slots.buffer(position, executed.layers[position].homes)
        assert buffer is not None, "the layer is running"
        return GradientReturn(slots, buffer, position, place, executed.recorder)

    def _check_pass(self, position: int) -> None:
        """Raise EngineError where a layer is recomputed outside of the micro-batch of its forward pass."""
        inside = self._current is not None
        if not is_recompute():
            self._ran_inside = self._ran_inside | {position} if inside else self._ran_inside - {position}
        elif not inside and position in self._ran_inside:
            raise EngineError(
                f"layer {self._executed.layer_ids[position]}: activation checkpointing recomputes it outside of "
                "any micro-batch of the plan: call backward() inside micro_batch(...) of its forward pass"
            )


@contextmanager
def execute_plan(
    model: nn.Module,
    plan: StepPlan,
    demand: Demand,
    *,
    sums: Sums = "fast",
    routes: Mapping[int, BatchRoutes | None] | None = None,
) -> Iterator[PlanExecution]:
    """Execute a plan inside a model that was loaded with `ep_implementation="relibra"`.

    Collective over the expert-parallel group; the first time for a model over all ranks. Outputs and gradients are
    those of the same model without a plan, up to the order of sums. Outside of `micro_batch` the model runs as with
    `all_to_all`. A plan that breaks a rule, or that ranks disagree on, is not followed (`fallback.py`).

    plan     of the same layers, experts and ranks; its homes are where the model's experts are (`relocate`)
    demand   what the plan was made for, under any schedule
    sums     "fast", or "canonical": the same bits under every plan of one schedule (`canonical.py`)
    routes   recorded routes of this rank's batches by micro-batch, in the order in which they will run, None for those
             without a sample: each is prepared in a thread while the one before it runs. Pass `micro_batch` the same
             objects
    raises   EngineError when plan and model do not fit, or another plan is being executed; and on all ranks when they
             are at different points of the step

        with execute_plan(model, plan, demand) as step:
            for m, batch in enumerate(batches):
                with step.micro_batch(m, batch.routes):
                    loss(model(batch.input_ids)).backward()
    """
    executed, first_prepared = _begin(model, plan, demand, sums, dict(routes or {}))
    execution = PlanExecution(executed)
    handles = [
        model.register_forward_pre_hook(execution.start_first_push),
        model.register_forward_hook(execution.agree_before_backward, prepend=True),
    ]
    try:
        for position, layer in enumerate(executed.layers):
            layer.runner = partial(execution.run_layer, position)
        with executed.preparing(first_prepared=first_prepared), executed.slots.in_execution(model):
            yield execution
            executed.agreement.reach(Point.END)
    finally:
        for handle in handles:
            handle.remove()
        for layer in executed.layers:
            layer.runner = None
        executed.slots.forget_weights()


def _begin(
    model: nn.Module, plan: StepPlan, demand: Demand, sums: Sums, routes: dict[int, BatchRoutes | None]
) -> tuple[ExecutedPlan, bool]:
    """Agree on a plan; return it, and whether all ranks have prepared its first micro-batch already; collective."""
    by_layer = balanced_layers(model)
    layers = list(by_layer.values())
    if any(layer.runner is not None for layer in layers):
        raise EngineError("the model is executing another plan, or balances live: leave that context first")
    agreement, source, chunk = agreement_of(layers), (plan, demand), chunk_of(sums)
    state, first = layers[0].group_state, next(iter(routes.items()), None)
    prepared = state is not None and first is not None and state.preparation.holds(*source, chunk, *first)
    agreed = agree_on_step(plan, demand, by_layer, sums, list(routes), agreement, prepared=prepared)
    keeps = agreed.demand is not None and plan.resident
    plan = keep_slots(plan) if keeps else plan
    residency = Residency(plan) if keeps else None
    executed = ExecutedPlan(
        model=model,
        layers=layers,
        layer_ids=list(by_layer),
        source=source,
        plan=plan,
        demand=agreed.demand,
        slots=ReplicaSlots(
            group_state_of(model, layers),
            plan.slots,
            residency,
            plan.gradient_wire,
            frozen=frozenset.intersection(*(layer.frozen_names for layer in layers)),
            keeps=layers[0].has_adapters,
        ),
        chunk=chunk,
        agreement=agreement,
        recorder=TimelineRecorder(dist.get_rank(), dist.get_world_size()),
        routes=routes if agreed.known else {},
    )
    return executed, agreed.prepared
