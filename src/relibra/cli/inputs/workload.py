"""`open_workload`: a trace cut into micro-batches for the ranks of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.cli.inputs.machine import fit_cluster, open_cluster
from relibra.cli.inputs.options import Order, Take
from relibra.cli.inputs.recordings import Recording
from relibra.cli.inputs.requests import WorkloadRequest
from relibra.cli.outputs.terminal import plural
from relibra.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from numpy import ndarray

    from relibra.cluster import Cluster
    from relibra.routing.demand import ScheduledDemand
    from relibra.routing.trace import RoutingTrace

MANY_IDLE = 0.1
"""Share of ranks without tokens in a mean micro-batch above which a message says so."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """What is planned for, and on what.

    recording     where the routes are; num_experts: as given for formats that lack it
    machine       the cluster with the requested ranks
    demand        of the planned micro-batches
    history_MLE   loads of the micro-batches before them; None without a history
    cut           how the trace was cut, in words
    """

    recording: Recording
    num_experts: int | None
    machine: Cluster
    demand: ScheduledDemand
    history_MLE: ndarray | None
    cut: str

    def open_routes(self) -> RoutingTrace:
        """Read the trace again."""
        from relibra.routing.readers import open_trace

        return open_trace(self.recording.trace, self.num_experts)

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
    """Read a trace, fit the machine to it, and cut the trace into micro-batches.

    raises    ClusterError for an unknown or damaged cluster; TraceError for a damaged trace, or when no micro-batch
              fills up; ConfigError when the ranks do not fit experts or nodes, or when the second half is empty
    """
    from relibra.routing.readers import open_trace

    trace, cluster = recording.trace, open_cluster(request.cluster)
    check_num_experts(trace, request.num_experts)
    routes = open_trace(trace, request.num_experts)
    machine = fit_cluster(cluster, routes.num_experts, request.ranks, request.ranks_per_node)
    demand, cut = _cut(routes, request)
    demand, history_MLE = (demand, None) if request.take is Take.ALL else _second_half(trace, demand)
    return Workload(
        recording=recording,
        num_experts=request.num_experts,
        machine=machine,
        demand=demand,
        history_MLE=history_MLE,
        cut=cut if history_MLE is None else f"{cut}; the second half is planned",
    )


def check_num_experts(path: Path, num_experts: int | None) -> None:
    """Raise a TraceError when --num-experts contradicts the number in a trace folder."""
    from relibra.routing.trace_files import read_index

    if num_experts is None or not path.is_dir():
        return
    recorded = read_index(path).num_experts
    if recorded != num_experts:
        raise TraceError(f"{path} was recorded with {recorded} experts: leave out --num-experts {num_experts}")


def _cut(trace: RoutingTrace, request: WorkloadRequest) -> tuple[ScheduledDemand, str]:
    """Return the demand of all micro-batches, and how they were cut, in words."""
    import numpy as np

    from relibra.routing.micro_batches import cut_recorded, deal_samples
    from relibra.routing.trace_statistics import default_micro_batch_tokens

    tokens = request.micro_batch_tokens or default_micro_batch_tokens(trace.num_rows)
    if request.order is Order.RECORDED:
        words = f"cut every {plural(tokens, 'token')} in recorded order, {_task_sets_in_words(trace, tokens)}"
        demand = cut_recorded(trace, tokens, request.ranks)
        rest = trace.num_rows - tokens * len(demand.load_MLE)
        words += f"; {plural(rest, 'row')} left out, which fill no micro-batch" * (rest > 0)
        return demand, words
    words = f"whole samples dealt to micro-batches of at most {plural(tokens, 'token')}, seed {request.seed}"
    return deal_samples(trace, tokens, request.ranks, np.random.default_rng(request.seed)), words


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


def _task_sets_in_words(trace: RoutingTrace, tokens: int) -> str:
    """Return whether task sets alternate, and if not, why."""
    import numpy as np

    from relibra.routing.micro_batches import task_sets

    sets = task_sets(trace, tokens)
    if len(sets) > 1:
        return f"{len(sets)} task sets alternate"
    names = len(trace.group_names)
    if names < 2:
        return "one task set"
    group_T = np.repeat(np.asarray(trace.group_ids), np.diff(trace.offsets))
    small = sum(int((group_T == group).sum()) < tokens for group in range(names))
    if small:
        return f"one task set: {small} of {names} groups {'is' if small == 1 else 'are'} smaller than a micro-batch"
    without = int((np.asarray(trace.group_ids) < 0).sum())
    return f"one task set: {plural(without, 'sample')} {'has' if without == 1 else 'have'} no group"


def workload_in_words(workload: Workload) -> list[str]:
    """Return which step is planned, its sizes, how it was cut, and a warning where many ranks have no tokens."""
    demand, machine = workload.demand, workload.machine
    M, L, R, E = demand.tokens_MLRE.shape
    nodes = f"{plural(machine.num_nodes, 'node')} of {machine.ranks_per_node}, {machine.name}"
    sizes = ", ".join((plural(M, "micro-batch"), plural(L, "layer"), plural(E, "expert")))
    idle = float((demand.tokens_MLRE.sum(axis=(1, 3)) == 0).mean())
    warning = (
        f"{idle:.0%} of ranks have no tokens in a mean micro-batch: choose fewer --ranks or a larger "
        "--micro-batch-tokens for a step closer to real training"
    ) * (idle >= MANY_IDLE)
    lines = workload.recording.words, f"{sizes} on {plural(R, 'rank')} ({nodes})", workload.cut, warning
    return [line for line in lines if line]
