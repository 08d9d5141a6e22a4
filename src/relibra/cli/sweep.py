"""`relibra sweep`: one step simulated for many machines and settings, in one table."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from relibra.cli.inputs import options
from relibra.cli.inputs.models import model_in_words, other_model_in_words
from relibra.cli.inputs.recordings import Recording, find_recording
from relibra.cli.inputs.requests import SimulationRequest, takes
from relibra.cli.inputs.workload import Workload, budget_for, describe_budget, open_workload
from relibra.cli.outputs.files import check_outputs, input_files, named, writing
from relibra.cli.outputs.simulated_step import SimulatedPlan, moves_in_words, simulate_balancer
from relibra.cli.outputs.terminal import new_table, print_note, print_wrapped, progress, stdout_console
from relibra.errors import ConfigError, RelibraError
from relibra.planning.budget import MOST_SLOTS
from relibra.printable import plural

SETTINGS = ("ranks", "ranks_per_node", "slots", "micro_batch_tokens", "pipeline_stages", "balancer")
"""Fields of a simulation that a sweep varies."""
MAX_POINTS = 500
STOPPED = "stopped by Ctrl-C"
MIN_RELOCATION_SHARE = 0.005
"""The table has a column for relocation if its share of some step is at least this."""
GAIN = 1.0005
"""Throughput / that of the static layout from which a gain is told."""
MAX_SENTENCES = 4
"""Sentences printed about the best point, at most: the overlap ratio, and the largest parts of its step."""


def _list(metavar: str, words: str) -> Any:
    return typer.Option(metavar=metavar, help=f"{words}; one, or a comma-separated list.")


_RanksPerNode = Annotated[str | None, _list("G,...", "Ranks on one node; default: those of the cluster")]
_Slots = Annotated[str | None, _list("B,...", "Most spare expert slots per rank; default: as many as pay")]
_Tokens = Annotated[
    str | None, _list("T,...", "Most tokens per rank in a micro-batch; default: those of the run, else 2048")
]


@dataclass(frozen=True, kw_only=True)
class SweepRequest(SimulationRequest):
    """Options of `relibra sweep`: lists of settings, and the settings that all points share."""

    ranks: Annotated[str, _list("R,...", "Ranks of the expert-parallel group")]  # type: ignore[assignment]
    ranks_per_node: _RanksPerNode = None  # type: ignore[assignment]
    slots: _Slots = None  # type: ignore[assignment]
    micro_batch_tokens: _Tokens = None  # type: ignore[assignment]
    pipeline_stages: Annotated[str, _list("N,...", "Pipeline stages")] = "1"  # type: ignore[assignment]
    balancer: Annotated[str, _list("NAME,...", "Balancers that relibra compare lists")] = "relibra"
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also plot it: .png (matplotlib) or .html (plotly).")
    ] = None
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
            _items("--balancer", self.balancer),
        )
        common = {f.name: getattr(self, f.name) for f in fields(SimulationRequest) if f.name not in SETTINGS}
        settings: list[dict[str, Any]] = [dict(zip(SETTINGS, one, strict=True)) for one in itertools.product(*lists)]
        points = [SimulationRequest(**common, **one) for one in settings]
        if len(points) > MAX_POINTS:
            raise ConfigError(f"the lists make {len(points)} combinations: at most {MAX_POINTS}, shorten one")
        return points


@takes(SweepRequest)
def sweep(request: SweepRequest) -> None:
    """Simulate a step for every combination of settings, each beside the static layout of the same machine.

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
    if request.as_json:
        facts = {**_best(found).simulated.limits(), "rows": [one.row for one in found], "left_out": left_out}
        typer.echo(json.dumps(facts))
    else:
        _print(found, left_out, varied, request.steps)
    if any(point["why"] == STOPPED for point in left_out):
        raise typer.Exit(130)


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A simulated point: its row of the table, and the step it comes from."""

    row: dict[str, Any]
    request: SimulationRequest
    workload: Workload
    simulated: SimulatedPlan


def _items(option: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if "" in items:
        example = "relibra,eplb" if option == "--balancer" else "8,16"
        raise ConfigError(f"{option} {text!r} has an empty item: write it like {example}")
    return list(dict.fromkeys(items))


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
    """Raise a ConfigError where the highest ranks of a given schedule have no samples at all.

    A sweep compares machines: one whose ranks are partly idle would only seem slower.
    """
    rank_S, ranks = workload.demand.rank_S[workload.demand.micro_batch_S >= 0], workload.machine.num_ranks
    used = int(rank_S.max(initial=-1)) + 1
    if workload.schedule is not None and used < ranks:
        raise ConfigError(
            f"the schedule is for {plural(used, 'rank')}: of {plural(ranks, 'rank')}, {ranks - used} would have no "
            f"samples; sweep --ranks {used}, or leave out --schedule"
        )


class Simulations:
    """Simulates points of a sweep; workloads and static layouts that points share are computed once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._workloads: dict[tuple[Any, ...], Workload] = {}
        self._statics: dict[tuple[Any, ...], SimulatedPlan] = {}

    def simulate(self, point: SimulationRequest) -> Point:
        """Simulate a point and the static layout beside it; raises what makes the point impossible."""
        key = (point.ranks, point.ranks_per_node, point.micro_batch_tokens)
        if key not in self._workloads:
            self._workloads[key] = open_workload(self._recording, point)
        workload = self._workloads[key]
        _refuse_schedule_of_fewer_ranks(workload)
        place = (*key, point.pipeline_stages)  # the static layout leaves slots empty, so their number does not matter
        if place not in self._statics:
            self._statics[place] = simulate_balancer(replace(point, balancer="static"), workload)
        static = self._statics[place]
        one = static if point.balancer == "static" else simulate_balancer(point, workload)
        return Point(row=_row(point, workload, one, static), request=point, workload=workload, simulated=one)


def _simulate(points: list[SimulationRequest], recording: Recording) -> tuple[list[Point], list[dict[str, Any]]]:
    """Simulate all points.

    returns   simulated points; and the settings of the impossible ones, each with the reason as "why"
    raises    the reason of the first point, when all are impossible
    """
    simulations = Simulations(recording)
    found, left_out = [], []
    first: RelibraError | None = None
    for number, point in enumerate(points):
        with progress(f"simulating {number + 1} of {len(points)} (the first run compiles kernels)"):
            try:
                found.append(simulations.simulate(point))
            except RelibraError as error:
                first = first or error
                left_out.append({**_settings(point), "why": str(error)})
            except KeyboardInterrupt:
                if not found:
                    raise
                left_out += [{**_settings(rest), "why": STOPPED} for rest in points[number:]]  # print what is done
                break
    if not found and first is not None:
        raise first
    return found, left_out


def _settings(point: SimulationRequest) -> dict[str, Any]:
    return {name: getattr(point, name) for name in SETTINGS}


def _row(point: SimulationRequest, workload: Workload, one: SimulatedPlan, static: SimulatedPlan) -> dict[str, Any]:
    step = one.step
    return {
        **_settings(point),
        **one.figures(static),
        "micro_batch_tokens": workload.rank_tokens,
        "ranks": point.ranks,
        "ranks_per_node": min(workload.machine.ranks_per_node, workload.machine.num_ranks),
        "all_ranks": step.layout.num_ranks,
        "relocation_share": step.terms["relocation"] / step.seconds,
        "exchange_share": (step.terms["exchange"] + step.terms["gates"]) / step.seconds,
        "straggler_share": step.straggler_seconds() / step.seconds,
        "copies_share": step.terms["copies"] / step.seconds,
    }


def _in_words(row: dict[str, Any], names: list[str]) -> str:
    from relibra.reporting.data.sweep_lines import balancer_text, fell_back

    told = {**row, "balancer": balancer_text(row)}
    words = ", ".join(f"{name.replace('_', ' ')} {told[name]}" for name in names)
    return words if "balancer" in names or not fell_back(row) else f"{words}, {told['balancer']}"


def _best(found: list[Point]) -> Point:
    """Return the point with the most tokens per second and rank."""
    return max(found, key=lambda one: one.row["tokens_per_second_per_rank"])


def _plot(path: Path, found: list[Point], varied: list[str], title: str) -> None:
    from relibra.reporting.pages.sweep_page import draw_sweep

    constant = [name for name in SETTINGS if name not in varied]
    with writing(path):
        draw_sweep(path, [one.row for one in found], varied, constant, title)
    print_note(f"plot: {path}")


def _print(found: list[Point], left_out: list[dict[str, Any]], varied: list[str], steps: int) -> None:
    """Print what limits the best point, the table of all points, and the impossible ones with the reason."""
    best, told = _best(found), varied or ["ranks", "balancer"]
    sentences, model, routed = best.simulated.advice, best.workload.model, best.simulated.model
    memory = [sentence for sentence in sentences[MAX_SENTENCES:] if sentence.startswith("Memory: ")]
    gain = max(found, key=lambda one: one.row["ratio_to_static"]).row
    if gain["ratio_to_static"] >= GAIN and gain is not best.row:
        times = f"{gain['ratio_to_static']:.3f} times its throughput"
        print_wrapped(f"largest gain over the static layout: {_in_words(gain, told)}, {times}")
    print_wrapped(f"most tokens per second and rank: {_in_words(best.row, told)}. What limits that step:")
    print_wrapped(*sentences[:MAX_SENTENCES], *memory)
    typer.echo()
    print_wrapped(
        best.workload.recording.label,
        f"there, on {plural(best.request.ranks, 'rank')}: {best.workload.cut}.",
        f"allowed: {describe_budget(budget_for(best.request, best.workload))}",
        f"{model_in_words(model, routed)}; {best.simulated.rows_from}; label: simulated, on "
        f"{best.workload.machine.name}",
        other_model_in_words(model, routed),
    )
    _print_table([point.row for point in found], told, steps)
    for why in dict.fromkeys(point["why"] for point in left_out):
        same = [point for point in left_out if point["why"] == why]
        more = f" and {len(same) - 1} more" * (len(same) > 1)
        print_wrapped(f"left out: {_in_words(same[0], varied)}{more}: {why}")


def _print_table(rows: list[dict[str, Any]], settings: list[str], steps: int) -> None:
    from relibra.reporting.data.sweep_lines import balancer_text, fell_back

    table = new_table(space=1)
    short = {
        "ranks": "ranks", "ranks_per_node": "per\nnode", "slots": "slots", "micro_batch_tokens": "tokens\n/ rank",
        "pipeline_stages": "stages", "balancer": "balancer",
    }  # fmt: skip
    for name in settings:
        table.add_column(short[name], justify="left" if name == "balancer" else "right", overflow="fold")
    staged = any(row["all_ranks"] != row["ranks"] for row in rows)
    moved = any(row["relocation_share"] >= MIN_RELOCATION_SHARE for row in rows)
    shares = ("exchange_share", "straggler_share", "copies_share") + ("relocation_share",) * moved
    titles = ("seconds", "/ static", "tokens/s\nper rank", "exch\n%", "strag\n%", "copy\n%", *(["move\n%"] * moved))
    for title in ("all\nranks",) * staged + (*titles, "skew", "GB"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(balancer_text(row) if name == "balancer" else str(row[name]) for name in settings),
            *([str(row["all_ranks"])] * staged),
            f"{row['seconds']:.4g}",
            f"{row['ratio_to_static']:.3f}{'=' if fell_back(row) else ''}",
            f"{row['tokens_per_second_per_rank']:,.0f}",
            *(f"{100 * row[name]:.0f}" for name in shares),
            f"{row['skew']:.3f}",
            f"{row['memory_bytes'] / 1e9:.3g}{'!' if row['memory_warning'] else ''}",
        )
    stdout_console().print(table)
    legend = (
        "all ranks: expert-parallel ranks x pipeline stages" * staged,
        "/ static: throughput relative to the static layout of the same machine and micro-batches",
        moves_in_words(steps),
        f"exch, strag, copy{', move' * moved}: shares of the step for exchanging rows, for experts on the busiest "
        f"ranks only, for copies that are not hidden{', for its part of the moves' * moved}",
        "skew: token-slots of the busiest / mean ranks",
        "GB: memory of the fullest rank, ! where it does not fit",
    )
    print_wrapped("; ".join(filter(None, legend)))
    if kept := sum(map(fell_back, rows)):
        print_wrapped(
            f"=: the balancer kept the static layout, in {kept} of {len(rows)} rows; relibra simulate says why"
        )
