"""`open_workload`: the samples of a trace in micro-batches, for the ranks of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.cli.inputs.models import choose_model
from relibra.cli.inputs.options import Take
from relibra.cli.inputs.recordings import RecordedStep, find_recording
from relibra.cli.inputs.requests import SimulationRequest, WorkloadRequest
from relibra.cli.inputs.schedules import Cut, mini_batches_for, read_given_schedule, schedule_step
from relibra.cli.outputs.files import NamedPath, check_outputs, input_files
from relibra.cli.outputs.terminal import print_note, progress
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.cluster import Cluster, Dispatch
    from relibra.planning.budget import Budget
    from relibra.planning.plan import StepPlan
    from relibra.planning.traffic.distinct_rows import DistinctRows
    from relibra.routing.demand import ScheduledDemand
    from relibra.routing.trace import RoutingTrace
    from relibra.simulation import ModelShape

MANY_IDLE = 0.1
"""A note names the share of ranks without tokens in a mean micro-batch if it is at least this."""
MAX_CHOICES = 1 << 31
"""Choices (row, layer, k) of samples that are drawn again; more take gigabytes."""
DEFAULT_TOKENS = 2048
"""Most tokens per rank in a micro-batch where neither an option nor a run gives a number: the default of a run."""


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
    cut           how samples were scheduled, what is left out, and what is history
    """

    recording: RecordedStep
    request: WorkloadRequest
    model: ModelShape
    machine: Cluster
    rank_tokens: int | None
    schedule: Path | None
    demand: ScheduledDemand
    history_MLE: ndarray | None
    cut: Cut

    def open_routes(self) -> RoutingTrace:
        """Read the trace again, with the samples that were drawn again."""
        from relibra.routing.readers import open_trace

        routes = open_trace(self.recording.trace, self.request.num_experts)
        return _draw_again(routes, self.request, self.rank_tokens)

    def with_prompts(self, *, shared: bool) -> Workload:
        """Return the same step with prompts once per piece (`Demand.piece_S`) or response; a given schedule stays."""
        if self.schedule is not None:
            return self
        recording = replace(self.recording, prompts_once=shared)
        demand, cut = schedule_step(self.open_routes(), recording, self.request, None, self.rank_tokens)
        if self.history_MLE is not None:
            demand, _ = _second_half(self.recording.trace, demand)
        return replace(self, recording=recording, demand=demand, cut=cut)

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

    def facts(self) -> dict[str, object]:
        """Return the step, its sizes, its schedule and what its plan may use, for JSON and for a terminal."""
        machine, model = self.machine, self.model
        sizes = dict(zip(("micro_batches", "layers", "ranks", "experts"), self.demand.tokens_MLRE.shape, strict=True))
        return {
            "trace": str(self.recording.trace),
            "recorded": self.recording.label,
            "sizes": {**sizes, "ranks_per_node": machine.ranks_per_node},
            "experts_assumed": are_experts_assumed(self.recording.trace, self.request.num_experts),
            "cut": self.cut,
            "model": model.name,
            "model_sizes": {"layers": model.moe_layers, "experts": model.experts, "top_k": model.top_k},
            "cluster": machine.name,
            "cluster_label": machine.label,
            "cluster_source": machine.source,
            "dispatch": machine.dispatch,
            "budget": asdict(budget_for(self.request, self)),
        }

    def note_problems(self, *balancers: str) -> None:
        """Print what makes the figures of these balancers less telling, and the option that mends it."""
        from relibra.planning.registry import BALANCERS

        lacking = [name for name in balancers if name in BALANCERS and BALANCERS[name].sees == "history"]
        if self.history_MLE is None and lacking:
            print_note(f"without history (--take second-half), planned from even loads: {', '.join(lacking)}")
        model, (_, layers, experts) = self.model, self.demand.counts_SLE.shape
        routed_alike = (self.demand.top_k, experts) == (model.top_k, model.experts) and layers <= model.moe_layers
        if model.experts > 1 and not routed_alike:
            hint = "" if self.request.model else ": name the recorded model with --model"
            print_note(f"the routes are of another model than {model.name}, whose other sizes are taken{hint}")
        idle = float((self.demand.tokens_MLRE.sum(axis=(1, 3)) == 0).mean())
        if idle >= MANY_IDLE:
            used = int(self.demand.rank_S.max(initial=0)) + 1
            print_note(
                f"{idle:.0%} of ranks have no tokens in a mean micro-batch, samples are on {used} of "
                f"{self.machine.num_ranks}: choose fewer --ranks, or a larger --micro-batch-tokens"
            )


def open_request(request: WorkloadRequest, outputs: Sequence[NamedPath], inputs: Sequence[NamedPath] = ()) -> Workload:
    """Return the workload of a request, after a check of its outputs.

    inputs   besides the trace, the cluster and the schedule: outputs must not overwrite them
    raises   as `check_outputs` and `open_workload`
    """
    recording = find_recording(request.source)
    check_outputs(outputs, [*input_files(recording.trace, request.cluster, request.schedule), *inputs])
    with progress(f"cutting {recording.trace}"):
        return open_workload(recording, request)


def open_workload(recording: RecordedStep, request: WorkloadRequest) -> Workload:
    """Read a trace, fit the machine to it, and schedule its samples, or take the schedule that is given.

    raises    ClusterError for an unknown or damaged cluster; TraceError for a damaged trace or schedule; ConfigError
              for an unknown model, when the ranks do not fit experts or nodes, options contradict each other, or the
              second half has no micro-batch before it
    """
    from relibra.routing.readers import open_trace

    trace, model = recording.trace, choose_model(request.model, recording.trace)
    cluster = open_cluster(request.cluster, None if request.dispatch is None else request.dispatch.value)
    routes = open_trace(trace, request.num_experts)
    given, tokens = read_given_schedule(recording, request), request.micro_batch_tokens
    if given is None and tokens is None:
        tokens = _default_tokens(routes, recording, request)
    routes = _draw_again(routes, request, tokens)
    machine = fit_cluster(cluster, routes.num_experts, request.ranks, request.ranks_per_node)
    demand, cut = schedule_step(routes, recording, request, given, tokens)
    of_trainer = given is not None or (demand.group_M is not None and demand.group_M.max(initial=0) > 0)
    take = request.take or (Take.ALL if of_trainer else Take.SECOND_HALF)
    history_MLE: ndarray | None = None
    if take is Take.SECOND_HALF:
        demand, history_MLE = _second_half(trace, demand)
        cut = {**cut, "micro_batches_of_history": len(history_MLE)}
    return Workload(
        recording=recording,
        request=request,
        model=model,
        machine=machine,
        rank_tokens=tokens,
        schedule=None if given is None else given.path,
        demand=demand,
        history_MLE=history_MLE,
        cut=cut,
    )


def open_cluster(name: str, dispatch: Dispatch | None = None) -> Cluster:
    """Return a preset, or the machine of a TOML file, with its own number of ranks.

    dispatch   None: that of the machine
    raises     ClusterError when it is unknown or damaged
    """
    from relibra.cluster import cluster_preset, read_cluster

    cluster = read_cluster(Path(name)) if name.endswith(".toml") else cluster_preset(name)
    return cluster if dispatch is None else replace(cluster, dispatch=dispatch)


def fit_cluster(cluster: Cluster, num_experts: int, ranks: int, ranks_per_node: int | None) -> Cluster:
    """Return the same machine with the given number of ranks.

    ranks_per_node   as given; None: those of the machine, and fewer ranks are one smaller node
    raises           ConfigError when the ranks do not divide the experts, or do not fill nodes
    """
    per_node = ranks_per_node or cluster.ranks_per_node
    least = 1 if ranks_per_node is None else per_node
    allowed = [r for r in range(least, num_experts + 1) if num_experts % r == 0 and r % min(r, per_node) == 0]
    listed = ", ".join(map(str, allowed)) or "none"
    nodes = ", ".join(str(g) for g in range(1, ranks + 1) if ranks % g == 0)
    if num_experts % ranks:
        raise ConfigError(
            f"--ranks {ranks} does not divide {num_experts} experts: allowed are {listed}, in nodes of {per_node}"
        )
    if ranks_per_node is not None and ranks % ranks_per_node:
        raise ConfigError(f"--ranks-per-node {ranks_per_node} does not divide --ranks {ranks}: choose it from {nodes}")
    if ranks % min(ranks, per_node):
        raise ConfigError(
            f"--ranks {ranks} does not fill nodes of {per_node} ranks: choose --ranks from {listed}, or "
            f"--ranks-per-node from {nodes}"
        )
    return cluster.with_ranks(ranks, ranks_per_node)


def are_experts_assumed(path: Path, num_experts: int | None) -> bool:
    """Return whether the number of experts is assumed (a multiple of 8 above the largest id): nothing gives it."""
    return num_experts is None and not path.is_dir()


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


def _draw_again(routes: RoutingTrace, request: WorkloadRequest, tokens: int | None) -> RoutingTrace:
    """Return the samples, drawn again until they fill the requested micro-batches if a number of these is given."""
    import numpy as np

    from relibra.routing.micro_batches import draw_samples

    if len(set(routes.sample_ids.tolist())) < routes.num_samples:  # ids are unknown, or those of several steps
        routes = replace(routes, sample_ids=np.arange(routes.num_samples))
    if request.micro_batches is None or tokens is None:
        return routes
    rows = request.micro_batches * tokens * request.ranks
    if (choices := rows * routes.num_layers * routes.top_k) > MAX_CHOICES:
        raise ConfigError(
            f"--micro-batches {request.micro_batches} of {tokens:,} tokens on each of {request.ranks} ranks are "
            f"{choices:,} choices of experts: at most {MAX_CHOICES:,}, choose fewer"
        )
    return draw_samples(routes, rows, np.random.default_rng(request.seed))


def _default_tokens(routes: RoutingTrace, recording: RecordedStep, request: WorkloadRequest) -> int:
    """Return the tokens per rank of the run, else the default of runs; fewer where a second half would be missing."""
    tokens = recording.micro_batch_tokens or DEFAULT_TOKENS
    if (mini_batches_for(recording, request) or 1) > 1:  # each has a micro-batch at least
        return tokens
    if request.take is Take.ALL or request.micro_batches is not None:
        return tokens
    return max(1, min(tokens, int(routes.valid_T.sum()) // (2 * request.ranks)))


def _second_half(trace: Path, demand: ScheduledDemand) -> tuple[ScheduledDemand, ndarray]:
    """Return the demand of the later micro-batches, and the loads of the earlier ones."""
    from relibra.routing.micro_batches import select_micro_batches

    load_MLE = demand.load_MLE
    half = len(load_MLE) // 2
    if half == 0:
        raise ConfigError(
            f"--take second-half: {trace} makes only {len(load_MLE)} micro-batches: choose a smaller "
            "--micro-batch-tokens, or --take all"
        )
    return select_micro_batches(demand, half), load_MLE[:half]
