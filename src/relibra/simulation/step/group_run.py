"""One expert-parallel group through one step: passes of its stages, their schedule, and their sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.planning.costs.copies import CopyCosts
from relibra.planning.costs.step_bytes import StepBytes, add_bytes, sent_bytes
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.step.passes import TERMS, Note, PassSeconds, backward_pass, forward_pass
from relibra.simulation.step.pipeline_schedule import BACKWARD, FORWARD, run_schedule
from relibra.simulation.step.stage_costs import StageCosts


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a plan is executed.

    pipeline_stages          parts of the layers, each on ranks of its own
    mini_batches             optimizer steps: their number (parts as equal as possible), or a tuple with the
                             micro-batches of each
    forward_only             log-probabilities under the current policy: no backward pass, no optimizer
    overlap                  copies of experts and sums of gradients run beside other work where the cluster can; False:
                             ranks wait for them
    recompute_activations    layers run forward again in the backward pass
    live                     the plan is made after the router of each layer, as UltraEP and MoonEP do: counts are
                             exchanged, a solver runs, and only then weights leave for their replicas
    shard_dense              weights outside of experts are spread over the ranks of a group, gathered for each layer
                             and pass, and their gradients are reduce-scattered (FSDP, replicated over groups), as
                             `relibra.rl` trains; False: every rank holds them
    whole_logits             logits of all rows of a micro-batch exist at once, as in TRL; False: in chunks, as in
                             `relibra.rl`

    raises   ConfigError
    """

    pipeline_stages: int = 1
    mini_batches: int | tuple[int, ...] = 1
    forward_only: bool = False
    overlap: bool = True
    recompute_activations: bool = False
    live: bool = False
    shard_dense: bool = True
    whole_logits: bool = False

    @property
    def num_mini_batches(self) -> int:
        """Return the number of optimizer steps."""
        return self.mini_batches if isinstance(self.mini_batches, int) else len(self.mini_batches)

    def on(self, cluster: Cluster) -> Execution:
        """Return the same, without overlap on a cluster that hides no copies."""
        return self if cluster.hides_copies else replace(self, overlap=False)

    def layout(self, num_ranks: int, groups: int) -> ParallelLayout:
        """Return the layout of `groups` expert-parallel groups of `num_ranks` ranks."""
        return ParallelLayout(expert_parallel=num_ranks, pipeline_stages=self.pipeline_stages, data_parallel=groups)

    def __post_init__(self) -> None:
        sizes = (self.mini_batches,) if isinstance(self.mini_batches, int) else self.mini_batches
        if self.pipeline_stages < 1 or min(sizes, default=0) < 1:
            raise ConfigError(
                f"execution in {self.pipeline_stages} pipeline stages and {self.mini_batches} mini-batches: both are "
                "at least 1, and so are the micro-batches of each mini-batch"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class MiniBatchRun:
    """The passes of one mini-batch in one group.

    number_M         its micro-batches, as positions among those of the group
    seconds          from its first forward to its last backward pass
    busy             seconds of the busiest stage, by term
    copying          seconds of copies in that stage
    last_backward_D  seconds of the last micro-batch's backward pass in each stage: sums of gradients run beside it
    start_2DM        when each pass starts, counted from the start of the mini-batch
    """

    number_M: Int64[ndarray, " M"]
    seconds: float
    busy: dict[str, float]
    copying: float
    last_backward_D: Float64[ndarray, " D"]
    start_2DM: Float64[ndarray, "2 D M"]

    @property
    def end_D(self) -> Float64[ndarray, " D"]:
        """Return when each stage ends its last backward pass, counted from the start of the mini-batch."""
        return self.start_2DM[BACKWARD, :, -1] + self.last_backward_D if len(self.number_M) else self.last_backward_D


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupRun:
    """A step of one group; arrays are [stage, rank of the group].

    bytes        of all ranks by kind, without moves
    uneven       forward seconds of the busiest and of the mean rank, summed over micro-batches and layers: attention
                 (with dense parts), experts
    """

    mini_batches: tuple[MiniBatchRun, ...]
    spent: dict[str, Float64[ndarray, "D R"]]
    waited_DR: Float64[ndarray, "D R"]
    sent: dict[str, Float64[ndarray, "D R"]]
    bytes: StepBytes
    token_slots_DR: Int64[ndarray, "D R"]
    uneven: dict[str, tuple[float, float]]
    flops: float


def run_group(
    costs_D: list[StageCosts], how: Execution, notes: Mapping[tuple[int, int], Note] | None = None
) -> GroupRun:
    """Return the passes of a group and when each starts.

    notes    recorders of the events of (stage, direction)
    """
    passes_2D: list[list[PassSeconds]] = [[], []]
    for stage, costs in enumerate(costs_D):
        forward, backward = ((notes or {}).get((stage, direction)) for direction in (FORWARD, BACKWARD))
        passes_2D[FORWARD].append(forward_pass(costs, overlap=how.overlap, note=forward))
        if not how.forward_only:
            passes_2D[BACKWARD].append(
                backward_pass(
                    costs, overlap=how.overlap, recompute_activations=how.recompute_activations, note=backward
                )
            )
    pairs_D = [list(pair) for pair in zip(*(item for item in passes_2D if item), strict=True)]
    last = len(costs_D) - 1
    sent_D = [_sent(costs, how, int(s > 0), int(s < last)) for s, costs in enumerate(costs_D)]
    return GroupRun(
        mini_batches=tuple(
            _mini_batch(pairs_D, costs_D, number, how)
            for number in mini_batches_of(len(costs_D[0].rows_MR), how.mini_batches)
        ),
        spent={
            name: np.stack([sum(item.spent[name] for item in pair) for pair in pairs_D]) for name in pairs_D[0][0].spent
        },
        waited_DR=np.stack([sum(item.waited_R for item in pair) for pair in pairs_D]),
        sent={kind: np.stack([item[kind] for item in sent_D]) for kind in sent_D[0]},
        bytes=add_bytes(
            sent_bytes(
                costs,
                costs.row_bytes,
                costs.gate_bytes,
                trained=not how.forward_only,
                recomputed=how.recompute_activations,
            )
            for costs in costs_D
        ),
        token_slots_DR=np.stack([costs.load_MLR.sum(axis=(0, 1)) for costs in costs_D]),
        uneven={name: _uneven(costs_D, name) for name in ("attention", "experts")},
        flops=sum(costs.flops for costs in costs_D) / (3 if how.forward_only else 1),
    )


def _uneven(costs_D: list[StageCosts], name: str) -> tuple[float, float]:
    busiest = mean = 0.0
    for costs in costs_D:
        if name == "experts":
            seconds_XR = (costs.home_MLR + costs.replica_MLR).reshape(-1, costs.home_MLR.shape[2])
        else:
            seconds_XR = len(costs.layer_ids) * costs.attention_MR + costs.first_MR + costs.last_MR
        busiest += float(seconds_XR.max(axis=1).sum())
        mean += float(seconds_XR.mean(axis=1).sum())
    return busiest, mean


def mini_batches_of(micro_batches: int, mini_batches: int | tuple[int, ...]) -> list[Int64[ndarray, " M"]]:
    """Return the micro-batches of each mini-batch; where a number does not divide them, the first have one more.

    mini_batches   as in `Execution`
    """
    cuts = mini_batches if isinstance(mini_batches, int) else np.cumsum(mini_batches[:-1], dtype=np.int64)
    return [number_M.astype(np.int64) for number_M in np.array_split(np.arange(micro_batches), cuts)]


def _mini_batch(
    pairs_D: list[list[PassSeconds]], costs_D: list[StageCosts], number_M: Int64[ndarray, " M"], how: Execution
) -> MiniBatchRun:
    D = len(pairs_D)
    seconds_2DM = np.zeros((2, D, len(number_M)))
    for stage, pair in enumerate(pairs_D):
        for direction, item in enumerate(pair):
            seconds_2DM[direction, stage] = item.seconds_M[number_M]
    start_2DM, end = run_schedule(seconds_2DM, costs_D[0].handover_M[number_M], forward_only=how.forward_only)
    busiest = int(np.argmax(seconds_2DM.sum(axis=(0, 2))))
    busy = {name: float(sum(item.terms[name][number_M].sum() for item in pairs_D[busiest])) for name in TERMS}
    return MiniBatchRun(
        number_M=number_M,
        seconds=end,
        busy=busy,
        copying=float(sum(item.copying_M[number_M].sum() for item in pairs_D[busiest])),
        last_backward_D=seconds_2DM[BACKWARD, :, -1] if len(number_M) else np.zeros(D),
        start_2DM=start_2DM,
    )


def _sent(costs: StageCosts, how: Execution, before: int, after: int) -> dict[str, Float64[ndarray, " R"]]:
    """Return the bytes that each rank of a stage sends, by kind.

    before, after   1 if the pipeline has a stage before it, after it; else 0
    """
    backwards = 0 if how.forward_only else 1
    forwards = 1 + (backwards if how.recompute_activations else 0)
    exchange, weights = costs.exchange, costs.gather_bytes
    out_R, in_R, gates_R, gates_back_R = (
        rows_MLR.sum(axis=(0, 1))
        for rows_MLR in (exchange.out_MLR, exchange.in_MLR, exchange.gates_out_MLR, exchange.gates_in_MLR)
    )
    gathered = weights.root + (1 + backwards) * (weights.first + (len(costs.layer_ids) - 1) * weights.each)
    own_R = costs.rows_MR.sum(axis=0) * costs.row_bytes
    return {
        "dispatch": (forwards + backwards) * costs.row_bytes * out_R,
        "combine": (forwards + backwards) * costs.row_bytes * in_R,
        "gates": costs.gate_bytes * (forwards * gates_R + backwards * gates_back_R),
        "push": np.sum([_copied(copies) for copies in (costs.push, costs.push_again)[: 1 + backwards]], axis=0),
        "return": backwards * _copied(costs.gradients),
        "gather": np.full(len(own_R), len(costs.rows_MR) * gathered),
        "handover": own_R * (after + backwards * before),
    }


def _copied(copies: CopyCosts) -> Float64[ndarray, " R"]:
    return copies.sent_MLR.sum(axis=(0, 1)) * float(copies.bytes_each)
