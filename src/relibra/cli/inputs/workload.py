"""`open_workload`: the samples of a trace in micro-batches, for the ranks of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.cli.inputs.machine import fit_cluster, open_cluster
from relibra.cli.inputs.mini_batches import fill_in_words, mini_batches_for, samples_in_words, schedule_mini_batches
from relibra.cli.inputs.models import choose_model
from relibra.cli.inputs.options import Order, Take
from relibra.cli.inputs.recordings import Recording
from relibra.cli.inputs.requests import SimulationRequest, WorkloadRequest
from relibra.errors import ConfigError, TraceError
from relibra.printable import plural

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.cluster import Cluster
    from relibra.planning.budget import Budget
    from relibra.planning.plan import StepPlan
    from relibra.planning.traffic.distinct_rows import DistinctRows
    from relibra.routing.demand import ScheduledDemand
    from relibra.routing.readers.given_schedule import GivenSchedule
    from relibra.routing.trace import RoutingTrace
    from relibra.simulation import ModelShape

MANY_IDLE = 0.1
"""Share of ranks without tokens in a mean micro-batch above which a message says so."""


MAX_CHOICES = 1 << 31
"""Choices (row, layer, k) of samples that are drawn again; more take gigabytes."""
DEFAULT_TOKENS = 2048
"""Most tokens per rank in a micro-batch where neither an option nor a run says: the default of a run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """What is planned for, and on what.

    recording     where the routes are; request: which of them are planned
    model         as named, with all its layers
    machine       the cluster with the requested ranks
    rank_tokens   most tokens of a rank in a micro-batch; None: as many as the given schedule has
    schedule      file of the schedule that was given; None: samples were scheduled here
    demand        of the planned micro-batches
    history_MLE   loads of the micro-batches before them; None without a history
    notes         how samples were scheduled, what is left out, rows without routes, and what is history, as sentences
                  without their dots
    """

    recording: Recording
    request: WorkloadRequest
    model: ModelShape
    machine: Cluster
    rank_tokens: int | None
    schedule: Path | None
    demand: ScheduledDemand
    history_MLE: ndarray | None
    notes: tuple[str, ...]

    def open_routes(self) -> RoutingTrace:
        """Read the trace again, with the samples that were drawn again."""
        return _open_routes(self.recording.trace, self.request, self.rank_tokens)

    @cached_property
    def _choices(self) -> tuple[ndarray, ndarray]:
        """Experts that each token chose, and the sample of the demand that the token belongs to."""
        from relibra.routing.demand_rows import sample_of_rows

        routes = self.open_routes()
        return routes.experts_TLK, sample_of_rows(routes, self.demand)

    def count_rows(self, plan: StepPlan, scheduled: ScheduledDemand) -> DistinctRows | None:
        """Count the tokens that travel from rank to rank and to node; None where that would take too long."""
        from relibra.planning.traffic.distinct_rows import MAX_PAIRS, distinct_rows_of_step

        M, L, R, _ = scheduled.tokens_MLRE.shape
        return None if M * L * R * R > MAX_PAIRS else distinct_rows_of_step(plan, scheduled, *self._choices)

    @property
    def cut(self) -> str:
        """The notes, in one line: how samples were scheduled, what is left out, rows without routes, history."""
        return "; ".join(self.notes)

    @property
    def tokens_per_rank(self) -> float:
        """Tokens of a mean rank and micro-batch."""
        load_MLE = self.demand.load_MLE
        tokens = load_MLE[:, 0].sum() / (self.demand.top_k or 1)
        return float(tokens / max(1, len(load_MLE)) / self.machine.num_ranks)

    def missing_history(self, balancer: str) -> str:
        """Return which loads a balancer lacks in this workload, and the option for them; else an empty string."""
        from relibra.planning.registry import BALANCERS

        if self.history_MLE is not None or balancer not in BALANCERS or BALANCERS[balancer].sees != "history":
            return ""
        return (
            f"{balancer} plans from loads of earlier micro-batches and has none, so it plans from even loads: "
            "--take second-half gives it the first half"
        )


def open_workload(recording: Recording, request: WorkloadRequest) -> Workload:
    """Read a trace, fit the machine to it, and schedule its samples, or take the schedule that is given.

    raises    ClusterError for an unknown or damaged cluster; TraceError for a damaged trace or schedule; ConfigError
              for an unknown model, when the ranks do not fit experts or nodes, options contradict each other, or the
              second half is empty
    """
    from relibra.routing.readers import open_trace

    trace, model = recording.trace, choose_model(request.model, recording.trace)
    cluster = open_cluster(request.cluster, None if request.dispatch is None else request.dispatch.value)
    check_num_experts(trace, request.num_experts)
    given, tokens = _given_schedule(recording, request), request.micro_batch_tokens
    if given is None and tokens is None:
        tokens = _default_tokens(open_trace(trace, request.num_experts), recording, request)
    routes = _open_routes(trace, request, tokens)
    machine = fit_cluster(cluster, routes.num_experts, request.ranks, request.ranks_per_node)
    if given is not None:
        demand, words = _with_given_schedule(routes, given, request)
    else:
        assert tokens is not None, "given, or a default"
        mini_batches = mini_batches_for(recording, request)
        if mini_batches is None:
            demand, words = _scheduled(routes, request, tokens)
        else:
            demand, words = schedule_mini_batches(routes, recording, request, mini_batches, tokens)
    of_trainer = given is not None or (demand.group_M is not None and demand.group_M.max(initial=0) > 0)
    take = request.take or (Take.ALL if of_trainer else Take.SECOND_HALF)
    demand, history_MLE = (demand, None) if take is Take.ALL else _second_half(trace, demand)
    if missing := int((~routes.valid_T).sum()):
        words = (*words, f"{plural(missing, 'row')} without a route, not counted")
    if history_MLE is not None:
        words = (*words, f"planned: the last {plural(len(demand.load_MLE), 'micro-batch')}; those before are history")
    return Workload(
        recording=recording,
        request=request,
        model=model,
        machine=machine,
        rank_tokens=tokens,
        schedule=None if given is None else given.path,
        demand=demand,
        history_MLE=history_MLE,
        notes=words,
    )


def check_num_experts(path: Path, num_experts: int | None) -> None:
    """Raise a TraceError when --num-experts contradicts the number in a trace folder."""
    from relibra.routing.trace_files import read_index

    if num_experts is None or not path.is_dir():
        return
    recorded = read_index(path).num_experts
    if recorded != num_experts:
        raise TraceError(f"{path} was recorded with {recorded} experts: leave out --num-experts {num_experts}")


def assumed_experts(path: Path, num_experts: int | None) -> str:
    """Return how the number of experts is assumed, where neither the file nor --num-experts gives it; else nothing."""
    if num_experts is not None or path.is_dir():
        return ""
    return "the number of experts is assumed, a multiple of 8 above the largest id: --num-experts gives it"


def _open_routes(trace: Path, request: WorkloadRequest, tokens: int | None) -> RoutingTrace:
    """Return the trace, or samples of it drawn again until they fill the requested micro-batches."""
    import numpy as np

    from relibra.routing.micro_batches import draw_samples
    from relibra.routing.readers import open_trace

    routes = open_trace(trace, request.num_experts)
    if request.micro_batches is None or tokens is None:
        return routes
    rows = request.micro_batches * tokens * request.ranks
    if rows * routes.num_layers * routes.top_k > MAX_CHOICES:
        raise ConfigError(
            f"--micro-batches {request.micro_batches} of {tokens:,} tokens on {plural(request.ranks, 'rank')} are "
            f"{rows * routes.num_layers * routes.top_k:,} choices of experts: at most {MAX_CHOICES:,}, choose fewer"
        )
    return draw_samples(routes, rows, np.random.default_rng(request.seed))


def _default_tokens(routes: RoutingTrace, recording: Recording, request: WorkloadRequest) -> int:
    """Return the tokens per rank of the run, else the default of runs; fewer where a second half would be missing."""
    tokens = recording.micro_batch_tokens or DEFAULT_TOKENS
    if (mini_batches_for(recording, request) or 1) > 1:  # each has a micro-batch at least
        return tokens
    if request.take is Take.ALL or request.micro_batches is not None:
        return tokens
    return max(1, min(tokens, int(routes.valid_T.sum()) // (2 * request.ranks)))


def _scheduled(routes: RoutingTrace, request: WorkloadRequest, tokens: int) -> tuple[ScheduledDemand, tuple[str, ...]]:
    """Schedule whole samples, and say how."""
    import numpy as np

    from relibra.routing.micro_batches import schedule_samples

    shuffled = request.order is Order.SHUFFLED
    rng = np.random.default_rng(request.seed) if shuffled else None
    demand = schedule_samples(routes, tokens, request.ranks, rng)
    order = f"random order, seed {request.seed}" if shuffled else "recorded order"
    words = [f"whole samples in {order}, at most {plural(tokens, 'token')} per rank, {fill_in_words(demand)}"]
    if not shuffled:
        words += _groups_in_words(routes, tokens * request.ranks)
    return demand, (*words, *samples_in_words(demand, request, tokens))


def _given_schedule(recording: Recording, request: WorkloadRequest) -> GivenSchedule | None:
    """Read the schedule of --schedule, else the one in an .npz trace; None where there is none."""
    from relibra.routing.readers.given_schedule import read_schedule

    drawn_here = request.order is Order.SHUFFLED or request.micro_batches is not None
    if request.schedule is None and (drawn_here or request.mini_batches is not None):
        return None
    found = read_schedule(request.schedule or recording.trace, required=request.schedule is not None)
    contradictions = {
        ("micro-batch", "--order shuffled"): request.order is Order.SHUFFLED,
        ("micro-batch", "--micro-batches"): request.micro_batches is not None,
        ("mini-batch", "--mini-batches"): request.mini_batches is not None,
    }
    for (unit, option), is_given in contradictions.items():
        if found is not None and is_given:
            raise ConfigError(f"--schedule gives the {unit} of every sample: leave out {option}")
    return found


def _with_given_schedule(
    routes: RoutingTrace, given: GivenSchedule, request: WorkloadRequest
) -> tuple[ScheduledDemand, tuple[str, ...]]:
    """Apply the schedule of a trainer, and say what it is."""
    from relibra.routing.readers.given_schedule import schedule_of

    demand = schedule_of(routes, given, request.ranks, request.micro_batch_tokens)
    groups = 1 if demand.group_M is None else len(set(demand.group_M.tolist()))
    words = [
        f"schedule of {given.path}: {plural(len(demand.load_MLE), 'micro-batch')} in "
        f"{plural(groups, 'mini-batch')}, {fill_in_words(demand)}"
    ]
    if left := int((demand.micro_batch_S < 0).sum()):
        tokens = int(demand.length_S[demand.micro_batch_S < 0].sum())
        words.append(
            f"{plural(left, 'sample')} with {plural(tokens, 'token')} left out: the schedule gives micro-batch -1"
        )
    return demand, tuple(words)


def _second_half(trace: Path, demand: ScheduledDemand) -> tuple[ScheduledDemand, ndarray]:
    """Return the demand of the later micro-batches, and the loads of the earlier ones."""
    from relibra.routing.micro_batches import select_micro_batches

    load_MLE = demand.load_MLE
    half = len(load_MLE) // 2
    if half == 0:
        raise ConfigError(
            f"--take second-half: {trace} makes only {plural(len(load_MLE), 'micro-batch')} and has no second half: "
            "choose a smaller --micro-batch-tokens, or --take all"
        )
    return select_micro_batches(demand, half), load_MLE[:half]


def _groups_in_words(trace: RoutingTrace, tokens: int) -> list[str]:
    """Return whether the named groups of samples take turns; tokens: of a micro-batch over all ranks."""
    from relibra.routing.micro_batches import task_sets

    if len(trace.group_names) < 2:
        return []
    sets = len(task_sets(trace, tokens))
    if sets == 1:
        return ["groups are not kept apart: each sample needs one, and each group a micro-batch"]
    return [f"micro-batches of {sets} named groups take turns"]


def workload_in_words(workload: Workload) -> list[str]:
    """Return which step is planned, its sizes, how it was cut, and a warning where many ranks have no tokens."""
    demand, machine = workload.demand, workload.machine
    M, L, R, E = demand.tokens_MLRE.shape
    nodes = f"{plural(machine.num_nodes, 'node')} of {machine.ranks_per_node}, {machine.name}"
    nodes += f", {machine.dispatch} dispatch" * (machine.dispatch != "flat")
    assumed = assumed_experts(workload.recording.trace, workload.request.num_experts)
    sizes = ", ".join((plural(M, "micro-batch"), plural(L, "layer"), plural(E, "expert")))
    idle = float((demand.tokens_MLRE.sum(axis=(1, 3)) == 0).mean())
    used = int(demand.rank_S.max(initial=0)) + 1
    warning = (
        f"{idle:.0%} of ranks have no tokens in a mean micro-batch, samples are on {used} of {R}: choose fewer "
        "--ranks, or a larger --micro-batch-tokens"
    )
    warning *= idle >= MANY_IDLE
    lines = workload.recording.label, f"{sizes} on {plural(R, 'rank')} ({nodes})", workload.cut + ".", assumed, warning
    return [line for line in lines if line]


def budget_for(request: WorkloadRequest, workload: Workload) -> Budget:
    """Return what a plan of a workload may use: memory that the model leaves, tokens of a rank by the schedule."""
    from relibra.planning.budget import Budget
    from relibra.simulation import Execution, memory_for_slots

    memory_gib = request.memory_gib
    if memory_gib is None:
        stages = request.pipeline_stages if isinstance(request, SimulationRequest) else 1
        how = Execution(pipeline_stages=stages, recompute_activations=True)
        memory_gib = memory_for_slots(workload.demand, workload.machine, workload.model, how)
    return Budget(
        slots=request.slots,
        memory_gib=memory_gib,
        tolerance=request.tolerance,
        steps_served=request.steps,
        pack_samples=request.pack,
        rank_tokens=workload.rank_tokens,
    )


def describe_budget(budget: Budget) -> str:
    """Return the limits of a plan in one line."""
    limits = [
        "any number of slots" if budget.slots is None else f"at most {plural(budget.slots, 'slot')} per rank",
        "" if budget.memory_gib is None else f"at most {budget.memory_gib:.3g} GiB of slots",
        f"tolerance {budget.tolerance:g}",
        f"moves over {plural(budget.steps_served, 'step')}",
        "samples may be packed" if budget.pack_samples else "samples stay in their micro-batch",
    ]
    return ", ".join(filter(None, limits))
