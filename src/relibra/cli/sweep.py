"""`relibra sweep`: one step simulated for many machines and settings, in one table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.recordings import RecordedStep, find_recording
from relibra.cli.inputs.requests import SimulationRequest, takes
from relibra.cli.inputs.workload import Workload, open_workload
from relibra.cli.outputs.files import check_outputs, input_files, named, writing
from relibra.cli.outputs.simulated_step import SimulatedPlan, simulate_balancer
from relibra.cli.outputs.terminal import print_note, print_result, progress
from relibra.errors import ConfigError, RelibraError
from relibra.planning.budget import MOST_SLOTS

SETTINGS = (
    *("ranks", "ranks_per_node", "slots", "micro_batch_tokens", "pipeline_stages", "stage_cut", "pipeline"),
    "balancer",
)
"""Fields of a simulation that a sweep varies."""
MAX_POINTS = 500
STOPPED = "stopped by Ctrl-C"
SHARES = ("exchange_share", "straggler_share", "copies_share", "relocation_share")
COLUMNS = (
    *("seconds", "ratio_to_static", "tokens_per_second_per_rank", *SHARES, "skew", "memory_bytes", "fits_memory"),
    *("all_ranks", "kept_static"),
)
"""Figures of a row that the table has; --json has all."""


@dataclass(frozen=True, kw_only=True)
class SweepRequest(SimulationRequest):
    """Options of `relibra sweep`: lists of settings, and the settings that all points share.

    ranks R,...  Ranks of the expert-parallel group; one, or a comma-separated list.
    ranks_per_node G,...  Ranks on one node; default: those of the cluster; one, or a comma-separated list.
    slots B,...  Most spare expert slots per rank; default: as many as pay; one, or a comma-separated list.
    micro_batch_tokens T,...  Most tokens per rank in a micro-batch; default: those of the run, else 2048; one, or a
        comma-separated list.
    pipeline_stages N,...  Pipeline stages; one, or a comma-separated list.
    stage_cut CUT,...  even: stages of even numbers of expert layers; best: those that end first; one, or both.
    pipeline KIND,...  1f1b: ranks keep a stage; round: parts of the layers go to groups of ranks in turn; one, or both.
    balancer NAME,...  Balancers that relibra compare lists; one, or a comma-separated list.
    plot FILE  Also plot it: .png (matplotlib) or .html (plotly).
    """

    ranks: str  # type: ignore[assignment]
    ranks_per_node: str | None = None  # type: ignore[assignment]
    slots: str | None = None  # type: ignore[assignment]
    micro_batch_tokens: str | None = None  # type: ignore[assignment]
    pipeline_stages: str = "1"  # type: ignore[assignment]
    stage_cut: str = "even"  # type: ignore[assignment]
    pipeline: str = "1f1b"  # type: ignore[assignment]
    balancer: str = "relibra"
    plot: Path | None = None
    as_json: options.Json = False

    def points(self) -> list[SimulationRequest]:
        """Return a request for every combination of the lists.

        raises    ConfigError for an item that is no number, or too many combinations
        """
        lists = (
            _numbers("--ranks", self.ranks, 1, 1 << 15),
            _numbers("--ranks-per-node", self.ranks_per_node, 1, 1 << 15),
            _numbers("--slots", self.slots, 0, MOST_SLOTS),
            _numbers("--micro-batch-tokens", self.micro_batch_tokens, 1, 1 << 40),
            _numbers("--pipeline-stages", self.pipeline_stages, 1, 1 << 15),
            _choices("--stage-cut", self.stage_cut, ("even", "best")),
            _choices("--pipeline", self.pipeline, ("1f1b", "round")),
            _items("--balancer", self.balancer),
        )
        common = {f.name: getattr(self, f.name) for f in fields(SimulationRequest) if f.name not in SETTINGS}
        settings: list[dict[str, Any]] = [dict(zip(SETTINGS, item, strict=True)) for item in itertools.product(*lists)]
        points = [SimulationRequest(**common, **setting) for setting in settings]
        if len(points) > MAX_POINTS:
            raise ConfigError(f"the lists make {len(points)} combinations: at most {MAX_POINTS}, shorten one")
        return points


@takes(SweepRequest)
def sweep(request: SweepRequest) -> None:
    """Simulate a step for every combination of settings, each beside the static layout of the same machine.

    Best is the point with most tokens per second and rank; the limits are those of its step. Shares are of a step's
    seconds: exchanging rows, only the busiest ranks computing experts, copies not hidden, and its part of the moves.
    Combinations that are not possible are listed below the table.

    Example: relibra sweep runs/demo --ranks 2,4,8 --balancer relibra,eplb
    """
    from relibra.planning.registry import find_balancer

    points = request.points()
    for point in points:
        find_balancer(point.balancer)
    recording = find_recording(request.source)
    check_outputs(named("--plot", request.plot), input_files(recording.trace, request.cluster, request.schedule))
    if request.plot is not None:
        from relibra.reporting.pages.sweep_page import check_plot

        check_plot(request.plot)
    found, left_out = _simulate(points, recording)
    varied = [name for name in SETTINGS if len({getattr(point, name) for point in points}) > 1]
    if request.plot is not None:
        workload = found[0].workload
        _plot(request.plot, found, varied, f"{workload.model.name} on {workload.machine.name}, simulated")
    best = max(found, key=lambda point: point.row["tokens_per_second_per_rank"])
    names = varied or ["ranks", "balancer"]
    facts = {
        "best": {name: best.row[name] for name in names},
        **best.simulated.limits(),
        **best.workload.facts(),
        "rows": [point.row for point in found],
        "left_out": left_out,
    }
    best.workload.note_problems(*dict.fromkeys(point.balancer for point in points))
    if warning := best.row["memory_warning"]:
        print_note(f"the best point does not fit: {warning}")
    print_result(facts, as_json=request.as_json, columns={"rows": (*names, *COLUMNS)})
    if any(point["why"] == STOPPED for point in left_out):
        raise typer.Exit(130)


@dataclass(frozen=True, kw_only=True, eq=False)
class SweepPoint:
    """A simulated combination of settings: its row of the table, and the step it comes from."""

    row: dict[str, Any]
    workload: Workload
    simulated: SimulatedPlan


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        examples = {"--balancer": "relibra,eplb", "--stage-cut": "even,best", "--pipeline": "1f1b,round"}
        example = examples.get(option, "8,16")
        raise ConfigError(f"{option} {text!r} has an empty item: write it like {example}")
    return list(dict.fromkeys(items))


def _choices(option: str, text: str, names: tuple[str, ...]) -> list[str]:
    for item in _items(option, text):
        if item not in names:
            raise ConfigError(f"{option} {text!r} has {item!r}: choose from {', '.join(names)}")
    return _items(option, text)


def _numbers(option: str, text: str | None, least: int, most: int) -> list[int | None]:
    if text is None:
        return [None]
    numbers: list[int | None] = []
    for item in _items(option, text):
        number = int(item) if item.isascii() and item.isdigit() and len(item) < 16 else -1
        if not least <= number <= most:
            raise ConfigError(f"{option} {text!r} has {item!r}: expected whole numbers from {least} to {most:,}")
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def _refuse_schedule_of_fewer_ranks(workload: Workload) -> None:
    """Raise a ConfigError where a given schedule has no samples for the highest ranks of the machine.

    A sweep compares machines: one whose ranks are partly idle would only seem slower.
    """
    rank_S, ranks = workload.demand.rank_S[workload.demand.micro_batch_S >= 0], workload.machine.num_ranks
    used = int(rank_S.max(initial=-1)) + 1
    if workload.schedule is not None and used < ranks:
        raise ConfigError(
            f"the schedule is for {used} ranks, so {ranks - used} of {ranks} would have no samples: sweep --ranks "
            f"{used}, or leave out --schedule"
        )


class Simulations:
    """Simulates points of a sweep; workloads and static layouts that points share are computed once."""

    def __init__(self, recording: RecordedStep) -> None:
        self._recording = recording
        self._workloads: dict[tuple[Any, ...], Workload] = {}
        self._statics: dict[tuple[Any, ...], SimulatedPlan] = {}

    def simulate(self, point: SimulationRequest) -> SweepPoint:
        """Simulate a point and the static layout beside it; raises what makes the point impossible."""
        key = (point.ranks, point.ranks_per_node, point.micro_batch_tokens)
        if key not in self._workloads:
            self._workloads[key] = open_workload(self._recording, point)
        workload = self._workloads[key]
        _refuse_schedule_of_fewer_ranks(workload)
        # the static layout leaves slots empty, so their number does not matter
        static_key = (*key, point.pipeline_stages, point.stage_cut, point.pipeline)
        if static_key not in self._statics:
            self._statics[static_key] = simulate_balancer(replace(point, balancer="static"), workload)
        static = self._statics[static_key]
        simulated = static if point.balancer == "static" else simulate_balancer(point, workload)
        return SweepPoint(row=_row(point, workload, simulated, static), workload=workload, simulated=simulated)


def _simulate(
    points: list[SimulationRequest], recording: RecordedStep
) -> tuple[list[SweepPoint], list[dict[str, Any]]]:
    """Simulate all points.

    returns   simulated points; and the settings of the impossible ones, each with the reason as "why"
    raises    the error of the first point, when all are impossible
    """
    simulations = Simulations(recording)
    found, left_out = [], []
    first_error: RelibraError | None = None
    for number, point in enumerate(points):
        with progress(f"simulating {number + 1} of {len(points)} (the first run compiles kernels)"):
            try:
                found.append(simulations.simulate(point))
            except RelibraError as error:
                first_error = first_error or error
                left_out.append({**_settings(point), "why": str(error)})
            except KeyboardInterrupt:
                if not found:
                    raise
                left_out += [{**_settings(rest), "why": STOPPED} for rest in points[number:]]  # print what is done
                break
    if not found and first_error is not None:
        raise first_error
    return found, left_out


def _settings(point: SimulationRequest) -> dict[str, Any]:
    return {name: getattr(point, name) for name in SETTINGS}


def _row(
    point: SimulationRequest, workload: Workload, simulated: SimulatedPlan, static: SimulatedPlan
) -> dict[str, Any]:
    step = simulated.step
    return {
        **_settings(point),
        **simulated.figures(static),
        "micro_batch_tokens": workload.rank_tokens,
        "ranks": point.ranks,  # of the expert-parallel group; `figures` has those of all stages
        "ranks_per_node": min(workload.machine.ranks_per_node, workload.machine.num_ranks),
        "all_ranks": step.layout.num_ranks,
        "fits_memory": not simulated.memory.warning,
        "relocation_share": step.terms["relocation"] / step.seconds,
        "exchange_share": (step.terms["exchange"] + step.terms["gates"]) / step.seconds,
        "straggler_share": step.straggler_seconds() / step.seconds,
        "copies_share": step.terms["copies"] / step.seconds,
    }


def _plot(path: Path, found: list[SweepPoint], varied: list[str], title: str) -> None:
    from relibra.reporting.pages.sweep_page import draw_sweep

    constant = [name for name in SETTINGS if name not in varied]
    with writing(path):
        draw_sweep(path, [point.row for point in found], varied, constant, title)
    print_note(f"plot: {path}")
