"""Forward and backward pass through the layers of one stage: when each rank does what, for all micro-batches at once.

Ranks meet at every exchange, so a layer starts on all ranks together, and all that a micro-batch has from others
is when it starts: the walk is a loop over layers with arrays `[micro-batch, rank]` inside. It does what the executor
does (`relibra.parallel`, docs/execution.md), in its order:

    forward    attention, host, dispatch (rows, gate weights), experts at home, wait push, replicas, combine
    backward   host, dispatch, wait push, replicas, experts at home, wait return, combine (gate weights, rows),
               attention

Rows travel in one exchange, or with hierarchical dispatch in two: between nodes, then inside them, and back in reverse.
Copies run beside this, one transfer after another. A push begins when the slots are free: at the start of the
pass, then when the layer that used them last is done with them. Between nodes a push shares links with rows, and
pauses while these travel there. Gradients leave when the last rank has computed those of its replicas, and arrive
before rows travel again. The weights of a layer outside of its experts (FSDP) are gathered while the layer before runs,
the first ones of a pass while all ranks wait. A live balancer decides after the host work of the forward pass, and
pushes only then. Without overlap all ranks wait for each copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.planning.costs.copies import CopyCosts
from relibra.planning.costs.exchange import Links
from relibra.simulation.step.stage_costs import StageCosts

TERMS = ("attention", "host", "gathers", "exchange", "gates", "compute", "copies")
"""Parts of the time of a pass: they add up to it."""

STAGES = (
    "attention",
    "dispatch",
    "dispatch in node",
    "experts",
    "combine in node",
    "combine",
    "wait push",
    "push",
    "wait return",
    "return",
)
"""Stages of events, named as the executor names those that it records."""

_ROUNDING = 1e-12
"""Times that differ by less than this share count as equal."""

Note = Callable[[str, int, ndarray, ndarray, ndarray | None, ndarray | None, str], None]
"""Takes one kind of event of all micro-batches and ranks: stage, layer id, start and end [M, R], bytes [M, R] or None,
ranks that have it [M, R] or None for all, label."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PassSeconds:
    """Seconds of one pass in each micro-batch, by term and by stage.

    terms        TERMS: seconds on the way from its start to its end
    spent        STAGES: seconds of each rank, summed over layers; stages may overlap
    waited_MR    seconds of each rank before exchanges, until the last rank was there
    copying_M    seconds of copies, hidden or not
    """

    seconds_M: Float64[ndarray, " M"]
    terms: dict[str, Float64[ndarray, " M"]]
    spent: dict[str, Float64[ndarray, "M R"]]
    waited_MR: Float64[ndarray, "M R"]
    copying_M: Float64[ndarray, " M"]


def forward_pass(costs: StageCosts, *, overlap: bool = True, note: Note | None = None) -> PassSeconds:
    """Return the seconds of a forward pass."""
    walk = _Walk(costs, overlap, note)
    for layer in range(len(costs.layer_ids)):
        walk.gather(costs.gather(layer, root=True))
        walk.attention(layer, costs.before_MR(layer))
        walk.forward_experts(layer, costs.push, decides=costs.live)
    walk.attention(-1, costs.last_MR)
    return walk.result()


def backward_pass(
    costs: StageCosts, *, overlap: bool = True, recompute_activations: bool = False, note: Note | None = None
) -> PassSeconds:
    """Return the seconds of a backward pass.

    recompute_activations   each layer runs forward once more before its backward pass; replicas are pushed before that
    """
    walk = _Walk(costs, overlap, note)
    walk.attention(-1, 2 * costs.last_MR)
    for layer in reversed(range(len(costs.layer_ids))):
        walk.gather(costs.gather(layer, root=False))
        if recompute_activations:
            walk.attention(layer, costs.before_MR(layer))
            walk.forward_experts(layer, costs.push_again, frees_slots=False)
        walk.backward_experts(layer, pushed=recompute_activations)
        walk.attention(layer, 2 * costs.before_MR(layer))
    return walk.result()


class _Transfer(NamedTuple):
    """Copies of one kind in one layer, and when they began in each micro-batch."""

    kind: str
    layer: int
    copies: CopyCosts
    begun_M: ndarray


@dataclass(eq=False)
class _Walk:
    """Clocks of the ranks in a pass; times count from its start.

    now_MR      end of each rank's last event
    met_M       last time at which all ranks waited for each other
    free_M      when the next push may begin
    gathered_M  when the last rank got the weights gathered before: the next gather begins then
    late_M      delay of the last rank by gathers since the ranks last met
    rows        start and end of each exchange between nodes, in order
    """

    costs: StageCosts
    overlap: bool
    note: Note | None
    now_MR: ndarray = field(init=False)
    met_M: ndarray = field(init=False)
    free_M: ndarray = field(init=False)
    rows: list[tuple[ndarray, ndarray]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        M, R = self.costs.attention_MR.shape
        self.now_MR, self.met_M, self.free_M = np.zeros((M, R)), np.zeros(M), np.zeros(M)
        self.gathered_M, self.late_M = np.zeros(M), np.zeros(M)
        self.terms = {name: np.zeros(M) for name in TERMS}
        self.spent = {name: np.zeros((M, R)) for name in STAGES}
        self.waited_MR, self.copying_M = np.zeros((M, R)), np.zeros(M)

    def result(self) -> PassSeconds:
        """Return the sums, up to the end of the last rank."""
        self._meet("attention")
        return PassSeconds(
            seconds_M=self.met_M, terms=self.terms, spent=self.spent, waited_MR=self.waited_MR, copying_M=self.copying_M
        )

    def attention(self, layer: int, seconds_MR: Float64[ndarray, "M R"]) -> None:
        """Add what ranks compute without waiting; layer -1: after all layers."""
        if seconds_MR.any():
            self._work("attention", layer, seconds_MR, "" if layer >= 0 else "head")

    def gather(self, seconds: float) -> None:
        """Add the wait for the weights of a layer outside of its experts.

        They are gathered beside the layer before; without overlap all ranks begin together.
        """
        last_M = self.now_MR.max(axis=1)
        if not self.overlap and not seconds:
            return
        ready_M = (self.gathered_M if self.overlap else last_M) + seconds
        self.now_MR = np.maximum(self.now_MR, ready_M[:, None])
        self.gathered_M = self.now_MR.max(axis=1)
        self.late_M = self.late_M + self.gathered_M - last_M
        self.terms["gathers"] += self.gathered_M - last_M

    def forward_experts(self, layer: int, push: CopyCosts, *, decides: bool = False, frees_slots: bool = True) -> None:
        """Add dispatch, experts and combine.

        decides   a live balancer makes the plan of the layer first
        """
        costs, exchange = self.costs, self.costs.exchange
        self._meet("attention")
        self._pause(costs.host_seconds + (costs.decision_seconds if decides else 0.0))
        pushed = self._begin("push", layer, push, np.maximum(self.free_M, self.met_M) if decides else self.free_M)
        if not self.overlap:
            arrived_M = self._wait_for_all(pushed)
        self._dispatch(layer)
        self._exchange("dispatch", layer, exchange.gates_ML, exchange.gates_out_MLR)
        self._work("experts", layer, costs.home_MLR[:, layer], "homes")
        if self.overlap:
            arrived_M = self._wait(pushed)
        self._work("experts", layer, costs.replica_MLR[:, layer], "replicas")
        self._meet("compute", costs.home_MLR[:, layer] + costs.replica_MLR[:, layer])
        self._combine(layer)
        has_M = push.takes_part_MLR[:, layer].any(axis=1)
        after_M = arrived_M if costs.resident else self.met_M
        if frees_slots:
            self.free_M = np.where(has_M, after_M, self.free_M)

    def backward_experts(self, layer: int, *, pushed: bool) -> None:
        """Add dispatch and combine of gradients, the experts' backward between them, and gradients of replicas home.

        pushed   the weights of replicas are there already
        """
        costs, exchange, again, home = self.costs, self.costs.exchange, self.costs.push_again, self.costs.gradients
        self._meet("attention")
        self._pause(2 * costs.host_seconds)
        push = None if pushed else self._begin("push", layer, again, self.free_M)
        if push and not self.overlap:
            self._wait_for_all(push)
        self._dispatch(layer)
        if push and self.overlap:
            self._wait(push)
        self._work("experts", layer, 2 * costs.replica_MLR[:, layer], "replicas")
        leave_M = self.now_MR.max(axis=1)
        self._work("experts", layer, 2 * costs.home_MLR[:, layer], "homes")
        if self.overlap:
            back_M = self._wait(self._begin("return", layer, home, leave_M))
        self._meet("compute", 2 * (costs.home_MLR[:, layer] + costs.replica_MLR[:, layer]))
        if not self.overlap:
            back_M = self._wait_for_all(self._begin("return", layer, home, self.met_M))
        has_M = home.takes_part_MLR[:, layer].any(axis=1)
        if not costs.resident:
            self.free_M = np.where(has_M, back_M, self.free_M)
        self._exchange("combine", layer, exchange.gates_back_ML, exchange.gates_in_MLR)
        self._combine(layer)

    def _work(self, stage: str, layer: int, seconds_MR: Float64[ndarray, "M R"], label: str) -> None:
        start_MR = self.now_MR
        self.now_MR = start_MR + seconds_MR
        self.spent[stage] += seconds_MR
        if self.note is not None:
            busy_MR = seconds_MR > 0 if label == "replicas" else None
            self.note(stage, self._id(layer), start_MR, self.now_MR, None, busy_MR, label)

    def _meet(self, term: str, work_MR: Float64[ndarray, "M R"] | None = None) -> None:
        """Wait for the last rank; with `work_MR`, time beyond that of the busiest rank counts as waiting for copies."""
        met_M = self.now_MR.max(axis=1)
        passed_M = met_M - self.met_M - self.late_M
        self.late_M = np.zeros_like(met_M)
        if work_MR is not None:
            more_M = passed_M - work_MR.max(axis=1)
            waited_M = np.where(more_M > _ROUNDING * met_M, more_M, 0.0)
            self.terms["copies"] += waited_M
            passed_M = passed_M - waited_M
        self.terms[term] += passed_M
        self.met_M = met_M

    def _pause(self, seconds: float) -> None:
        """Add host work, for which all ranks wait."""
        self.met_M = self.met_M + seconds
        self.now_MR = self.now_MR + seconds
        self.terms["host"] += seconds

    def _dispatch(self, layer: int) -> None:
        for stage in self.costs.exchange.stages:
            self._exchange("dispatch", layer, stage.seconds_ML, stage.out_MLR, stage.links)

    def _combine(self, layer: int) -> None:
        for stage in reversed(self.costs.exchange.stages):
            self._exchange("combine", layer, stage.back_ML, stage.in_MLR, stage.links)

    def _exchange(
        self, stage: str, layer: int, seconds_ML: ndarray, rows_MLR: ndarray, links: Links | None = None
    ) -> None:
        """Add an exchange that starts with the last rank and ends on all ranks together.

        links   of rows; None: gate weights, on all links
        """
        term = "gates" if links is None else "exchange"
        start_MR, end_M = self.now_MR, self.met_M + seconds_ML[:, layer]
        if links == "inside nodes":
            stage += " in node"
        else:
            self.rows.append((self.met_M, end_M))
        self.terms[term] += seconds_ML[:, layer]
        self.waited_MR += self.met_M[:, None] - start_MR
        self.met_M = end_M
        self.now_MR = np.repeat(end_M[:, None], start_MR.shape[1], axis=1)
        self.spent[stage] += self.now_MR - start_MR
        if self.note is not None:
            row_bytes = self.costs.gate_bytes if links is None else self.costs.row_bytes
            label = "gate weights" if links is None else "rows"
            rows_MR: ndarray = rows_MLR[:, layer]
            # The executor leaves out an exchange in which no rank has rows for another.
            travel_MR = np.broadcast_to(rows_MR.any(axis=1, keepdims=True), rows_MR.shape)
            self.note(stage, self._id(layer), start_MR, self.now_MR, rows_MR * row_bytes, travel_MR, label)

    def _begin(self, kind: str, layer: int, copies: CopyCosts, begin_M: ndarray) -> _Transfer:
        self.copying_M += copies.seconds_ML[:, layer]
        return _Transfer(kind, layer, copies, begin_M)

    def _arrival(self, transfer: _Transfer) -> Float64[ndarray, " M"]:
        """Return when copies are done: those between nodes pause while rows travel.

        Called where ranks wait for the copies: `rows` has all exchanges beside them by then.
        """
        _, layer, copies, begun_M = transfer
        done_M, network_M = begun_M + copies.seconds_ML[:, layer], copies.network_ML[:, layer]
        if not network_M.any():
            return done_M
        self.rows = [pair for pair in self.rows if (pair[1] > self.free_M).any()]
        through_M = begun_M + network_M
        for start_M, end_M in self.rows:
            pauses_M = (start_M < through_M * (1 - _ROUNDING)) & (end_M > begun_M)
            through_M = through_M + np.where(pauses_M, end_M - np.maximum(start_M, begun_M), 0.0)
        return np.where(network_M > 0, np.maximum(done_M, through_M), done_M)

    def _wait(self, transfer: _Transfer) -> Float64[ndarray, " M"]:
        """Make the ranks that take part wait; return when the copies are done.

        A transfer is noted as lasting until its rank has waited for it, even if it is done before.
        """
        kind, layer, copies, begun_M = transfer
        done_M = self._arrival(transfer)
        part_MR, start_MR = copies.takes_part_MLR[:, layer], self.now_MR
        self.now_MR = np.where(part_MR, np.maximum(start_MR, done_M[:, None]), start_MR)
        begun_MR = np.broadcast_to(begun_M[:, None], start_MR.shape)
        self.spent[f"wait {kind}"] += self.now_MR - start_MR
        self.spent[kind] += (self.now_MR - begun_MR) * part_MR
        if self.note is not None:
            self.note(f"wait {kind}", self._id(layer), start_MR, self.now_MR, None, part_MR, "")
            sent_MR = copies.sent_MLR[:, layer] * copies.bytes_each
            self.note(kind, self._id(layer), begun_MR, self.now_MR, sent_MR, part_MR, "")
        return done_M

    def _wait_for_all(self, transfer: _Transfer) -> Float64[ndarray, " M"]:
        """Start copies when all ranks are ready, make all wait until they are done, and return that time."""
        done_M = self._wait(transfer._replace(begun_M=self.met_M))
        self.terms["copies"] += transfer.copies.seconds_ML[:, transfer.layer]
        self.met_M = done_M
        return done_M

    def _id(self, layer: int) -> int:
        return int(self.costs.layer_ids[layer]) if layer >= 0 else -1
