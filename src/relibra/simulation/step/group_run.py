"""One expert-parallel group through one step: passes of its stages, their schedule, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.planning.costs.copies import CopyCosts
from relibra.planning.costs.step_bytes import StepBytes, add_bytes, sent_bytes
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.step.passes import TERMS, Note, PassSeconds, backward_pass, forward_pass
from relibra.simulation.step.pipeline_schedule import PipelineTask, round_tasks, run_tasks, stage_tasks
from relibra.simulation.step.stage_costs import StageCosts
from relibra.simulation.step.stage_cuts import RoundCut


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a plan is executed.

    pipeline_stages          parts of the layers, each on ranks of its own
    stage_sizes              expert layers of each; (): even (`choose_stages` finds sizes)
    round_cut                stages take turns on a pool of ranks (`RoundCut`), which recompute activations and, unless
                             each holds one part only, fetch weights from host memory; None: 1F1B
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
    stage_sizes: tuple[int, ...] = ()
    round_cut: RoundCut | None = None
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
        return ParallelLayout(
            expert_parallel=num_ranks,
            pipeline_stages=self.pipeline_stages,
            data_parallel=groups,
            stage_sizes=self.stage_sizes,
        )

    @property
    def fetches(self) -> bool:
        """Return whether weights wait in host memory for their turn."""
        return self.round_cut is not None and len(self.round_cut.parts()) != self.pipeline_stages

    def tasks(self, num_parts: int, num_micro_batches: int) -> list[list[PipelineTask]]:
        """Return the tasks of each stage's ranks in a mini-batch."""
        D, M = self.pipeline_stages, num_micro_batches
        if self.round_cut is None:
            return [stage_tasks(s, D, M, forward_only=self.forward_only) for s in range(D)]
        return round_tasks(num_parts, D, self.round_cut.round_M(M, D))

    def __post_init__(self) -> None:
        sizes = (self.mini_batches,) if isinstance(self.mini_batches, int) else self.mini_batches
        if self.pipeline_stages < 1 or min(sizes, default=0) < 1:
            raise ConfigError(
                f"execution in {self.pipeline_stages} pipeline stages and {self.mini_batches} mini-batches: both are "
                "at least 1, and so are the micro-batches of each mini-batch"
            )
        if self.round_cut is not None and self.forward_only:
            raise ConfigError(
                "a forward pass in round-robin stages: their cut has a backward pass, leave out round_cut"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class MiniBatchRun:
    """The passes of one mini-batch in one group.

    number_M         its micro-batches, as positions among those of the group
    seconds          from its first forward to its last backward pass
    busy             seconds of the busiest stage, by term
    copying          seconds of copies in that stage
    last_backward_D  seconds of the last backward pass of each stage's ranks: sums of gradients run beside it
    end_D            when each stage's ranks end that pass, counted from the start of the mini-batch
    store_seconds    of the last gradients on their way to host memory
    start_XM         when each part of each micro-batch starts, counted from the start of the mini-batch
    """

    number_M: Int64[ndarray, " M"]
    seconds: float
    busy: dict[str, float]
    copying: float
    last_backward_D: Float64[ndarray, " D"]
    end_D: Float64[ndarray, " D"]
    store_seconds: float
    start_XM: Float64[ndarray, "X M"]


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


class PartRun(NamedTuple):
    """All micro-batches in one part of the model: a forward pass, a backward pass, or one after the other.

    sent   bytes of each rank by kind, without those handed to the next part
    """

    passes: list[PassSeconds]
    backward_M: Float64[ndarray, " M"]
    sent: dict[str, Float64[ndarray, "M R"]]

    @property
    def seconds_M(self) -> Float64[ndarray, " M"]:
        """Return the seconds of each micro-batch."""
        return sum((item.seconds_M for item in self.passes), np.zeros(len(self.backward_M)))


def run_part(costs: StageCosts, how: Execution, *, forward: bool, backward: bool, note: Note | None = None) -> PartRun:
    """Return the passes of a part; a forward pass right before the backward pass makes recomputation needless."""
    recompute = how.recompute_activations or (how.round_cut is not None and not forward)
    passes, backward_M = [], np.zeros(len(costs.rows_MR))
    if forward:
        passes.append(forward_pass(costs, overlap=how.overlap, note=note))
    if backward:
        if note is not None and forward:
            note = _later(note, passes[0].seconds_M[:, None])
        passes.append(backward_pass(costs, overlap=how.overlap, recompute_activations=recompute, note=note))
        backward_M = passes[-1].seconds_M
    return PartRun(
        passes=passes,
        backward_M=backward_M,
        sent=_sent(costs, forwards=forward + (backward and recompute), forward=forward, backward=backward),
    )


def _later(note: Note, more_M1: ndarray) -> Note:
    return lambda stage, layer, start_MR, end_MR, *rest: note(stage, layer, start_MR + more_M1, end_MR + more_M1, *rest)


def run_group(costs_X: list[StageCosts], how: Execution, notes: Mapping[int, Note] | None = None) -> GroupRun:
    """Return the passes of a group and when each starts.

    costs_X  of each stage, or of each part of a `RoundCut`
    notes    recorders of the events of each part
    """
    last = len(costs_X) - 1
    kinds = [(s, True, False) for s in range(last + 1)]  # index into costs_X, has a forward pass, has a backward pass
    kinds += [] if how.forward_only else [(s, False, True) for s in range(last, -1, -1)]
    if how.round_cut is not None:
        fused = len(how.round_cut.forward)
        kinds = [(x, x <= fused, x >= fused) for x in range(last + 1)]
    parts = [
        run_part(costs_X[x], how, forward=forward, backward=backward, note=(notes or {}).get(part))
        for part, (x, forward, backward) in enumerate(kinds)
    ]
    M, R = costs_X[0].rows_MR.shape
    numbers, device_XM = mini_batches_of(M, how.mini_batches), np.zeros((len(parts), M), dtype=np.int64)
    for number_M in numbers:
        for stage, tasks in enumerate(how.tasks(len(parts), len(number_M))):
            for part, m in tasks:
                device_XM[part, number_M[m]] = stage
    hops_XM = np.diff(device_XM, axis=0, prepend=device_XM[:1]) != 0
    own_MR = costs_X[0].rows_MR * costs_X[0].row_bytes
    leaves_XM1 = np.append(hops_XM[1:], np.zeros((1, M), dtype=bool), axis=0)[:, :, None]

    def of_stages(values_X: Iterable[ndarray]) -> ndarray:
        total_DR: ndarray = np.zeros((how.pipeline_stages, R))
        for device_M, value_MR in zip(device_XM, values_X, strict=True):
            np.add.at(total_DR, device_M, value_MR)
        return total_DR

    layers_once = [costs_X[x] for x, _, backward in kinds if backward or how.forward_only]
    sent = {kind: of_stages(part.sent[kind] for part in parts) for kind in parts[0].sent}
    return GroupRun(
        mini_batches=tuple(
            _mini_batch(parts, costs_X, number_M, device_XM[:, number_M], hops_XM[:, number_M], how)
            for number_M in numbers
        ),
        spent={
            name: of_stages([np.sum([item.spent[name] for item in part.passes], axis=0) for part in parts])
            for name in parts[0].passes[0].spent
        },
        waited_DR=of_stages([np.sum([item.waited_MR for item in part.passes], axis=0) for part in parts]),
        sent=sent | {"handover": of_stages(own_MR * leaves_XM1)},
        bytes=add_bytes(
            sent_bytes(
                costs,
                costs.row_bytes,
                costs.gate_bytes,
                trained=not how.forward_only,
                recomputed=how.recompute_activations or (how.round_cut is not None and number > 0),
            )
            for number, costs in enumerate(layers_once)
        ),
        token_slots_DR=of_stages([costs_X[x].load_MLR.sum(axis=1) * f for x, f, _ in kinds]).astype(np.int64),
        uneven={name: _uneven(layers_once, name) for name in ("attention", "experts")},
        flops=sum(costs.flops for costs in layers_once) / (3 if how.forward_only else 1),
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
    parts: list[PartRun],
    costs_X: list[StageCosts],
    number_M: Int64[ndarray, " M"],
    device_XM: Int64[ndarray, "X M"],
    hops_XM: Bool[ndarray, "X M"],
    how: Execution,
) -> MiniBatchRun:
    seconds_XM = np.stack([part.seconds_M[number_M] for part in parts])
    tasks_D = how.tasks(len(parts), len(number_M))
    fetch_X = None
    if how.fetches:  # both directions at once
        stored_X = [costs.store_seconds * part.backward_M.any() for costs, part in zip(costs_X, parts, strict=True)]
        fetch_X = np.maximum([costs.fetch_seconds for costs in costs_X], stored_X)
    handover_XM = hops_XM * costs_X[0].handover_M[number_M]
    (start_XM,) = run_tasks(tasks_D, seconds_XM[None], handover_XM, fetch_X)
    end_D, last_backward_D = np.zeros((2, how.pipeline_stages))
    for stage, tasks in enumerate(tasks_D):
        if tasks:
            part, m = tasks[-1]
            end_D[stage] = start_XM[part, m] + seconds_XM[part, m]
            last_backward_D[stage] = parts[part].backward_M[number_M[m]]
    work_D = np.bincount(device_XM.ravel(), seconds_XM.ravel(), minlength=how.pipeline_stages)
    here_XM = device_XM == int(np.argmax(work_D))

    def of_busiest(value: Callable[[PassSeconds], ndarray]) -> float:
        values_X = [sum(value(item)[number_M] for item in part.passes) for part in parts]
        return float(np.stack(values_X)[here_XM].sum())

    return MiniBatchRun(
        number_M=number_M,
        seconds=float(end_D.max()),
        busy={name: of_busiest(lambda item, name=name: item.terms[name]) for name in TERMS},  # type: ignore[misc]
        copying=of_busiest(lambda item: item.copying_M),
        last_backward_D=last_backward_D,
        end_D=end_D,
        store_seconds=costs_X[-1].store_seconds if how.fetches else 0.0,
        start_XM=start_XM,
    )


def _sent(costs: StageCosts, *, forwards: int, forward: bool, backward: bool) -> dict[str, Float64[ndarray, "M R"]]:
    """Return the bytes that each rank of a part sends, by kind.

    forwards   times that layers run forward
    """
    exchange, weights = costs.exchange, costs.gather_bytes
    out_MR, in_MR, gates_MR, gates_back_MR = (
        rows_MLR.sum(axis=1)
        for rows_MLR in (exchange.out_MLR, exchange.in_MLR, exchange.gates_out_MLR, exchange.gates_in_MLR)
    )
    gathered = forward * weights.root
    gathered += (forward + backward) * (weights.first + (len(costs.layer_ids) - 1) * weights.each)
    return {
        "dispatch": (forwards + backward) * costs.row_bytes * out_MR,
        "combine": (forwards + backward) * costs.row_bytes * in_MR,
        "gates": costs.gate_bytes * (forwards * gates_MR + backward * gates_back_MR),
        "push": forward * _copied(costs.push) + backward * _copied(costs.push_again),
        "return": backward * _copied(costs.gradients),
        "gather": np.full(costs.rows_MR.shape, gathered),
    }


def _copied(copies: CopyCosts) -> Float64[ndarray, "M R"]:
    return copies.sent_MLR.sum(axis=1) * float(copies.bytes_each)
