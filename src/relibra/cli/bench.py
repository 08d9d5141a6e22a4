"""`relibra bench`: measure this machine with the programs of the checkout's `benchmarks/` folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import relibra
from relibra.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="Measure on this machine, and hold results against each other; needs a checkout of relibra. Minutes are those "
    "of two cores, without --quick.",
)

Quick = Annotated[bool, typer.Option("--quick", help="Smaller cases, fewer repetitions; writes no rows.")]
Json = Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder with recorded routes; default: shared/data beside the checkout.")
]
Output = Annotated[Path | None, typer.Option(help="Folder for the rows; default: benchmarks/results of the checkout.")]
Tolerance = Annotated[
    float | None, typer.Option(min=0.0, help="Share by which figures may differ; default: a tenth (0.1).")
]
_MEASURE, _RESULTS = "Programs", "Results"


@app.command(rich_help_panel=_MEASURE)
def planner(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """What the planner reaches beside what it should reach; 3.5 min.

    Example: relibra bench planner --quick
    """
    _run("planner.py", _words(quick, as_json, data, output))


@app.command(rich_help_panel=_MEASURE)
def recordings(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """Skew of recorded routes under the static layout; 0.1 min.

    Example: relibra bench recordings --quick
    """
    _run("recordings.py", _words(quick, as_json, data, output))


@app.command(rich_help_panel=_MEASURE)
def balancers(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """Every balancer on recorded routes, side by side; 1.5 min.

    Example: relibra bench balancers --quick
    """
    _run("balancers.py", _words(quick, as_json, data, output))


@app.command(rich_help_panel=_MEASURE)
def routing(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """Speed of counting, checking, writing and reading routes; 0.2 min.

    Example: relibra bench routing --quick
    """
    _run("routing.py", _words(quick, as_json, None, output))


@app.command(rich_help_panel=_MEASURE)
def streaming(
    million_rows: Annotated[
        float | None, typer.Argument(help="Size of the trace, default 10; 384 MB of disk per million.")
    ] = None,
    quick: Quick = False,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """Write and read a trace larger than memory should be: speed and peak memory; 2 min.

    Example: relibra bench streaming --quick
    """
    size = [] if million_rows is None else [f"{million_rows:g}"]
    _run("streaming.py", [*size, *_words(quick, as_json, None, output)])


@app.command(rich_help_panel=_MEASURE)
def windows(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """A model of what windows buy in decoding; 0.1 min.

    Example: relibra bench windows --quick
    """
    _run("rollout_windows.py", _words(quick, as_json, None, output))


@app.command(rich_help_panel=_MEASURE)
def toy(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """PPO and T-PPO on a toy of two tables; 1 min.

    Example: relibra bench toy --quick
    """
    _run("tppo_toy.py", _words(quick, as_json, None, output))


@app.command(rich_help_panel=_MEASURE)
def ranks(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """What each rank of a plan computes, one after another: does an even load take even time? 3 min.

    Example: relibra bench ranks --quick
    """
    _run("emulated_ranks.py", _words(quick, as_json, data, output))


@app.command(rich_help_panel=_MEASURE)
def papers(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """What papers report beside what our balancers reach in the simulator; 4 min.

    Example: relibra bench papers --quick
    """
    _run("papers.py", _words(quick, as_json, data, output))


@app.command(rich_help_panel=_MEASURE)
def simulation(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """Speed and memory of the simulator, up to some thousand ranks; 1 min.

    Example: relibra bench simulation --quick
    """
    _run("simulation.py", _words(quick, as_json, None, output))


@app.command(rich_help_panel=_MEASURE)
def validation(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """The simulator against this machine: the runs of runtime, predicted and measured; 6 min, on a quiet machine.

    Example: relibra bench validation --quick
    """
    _run("validation.py", _words(quick, as_json, None, output))


@app.command(rich_help_panel=_MEASURE)
def runtime(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """Training by plans beside all_to_all and beside balanced routes, on two processes; 25 min.

    Example: relibra bench runtime --quick
    """
    _run("runtime.py", _words(quick, as_json, data, output))


@app.command(rich_help_panel=_MEASURE)
def rl(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """RL training with experts at their homes and by plans, on two processes; 4 min.

    Example: relibra bench rl --quick
    """
    _run("rl.py", _words(quick, as_json, None, output))


@app.command(rich_help_panel=_MEASURE)
def tppo(quick: Quick = False, as_json: Json = False, output: Output = None) -> None:
    """RL training with PPO and with T-PPO: decode steps and seconds to the same reward; 15 min.

    Example: relibra bench tppo --quick
    """
    _run("tppo.py", _words(quick, as_json, None, output))


@app.command(rich_help_panel=_MEASURE)
def demo(
    seeds: Annotated[list[int] | None, typer.Argument(help="Seeds, one run each; default: 0.")] = None,
    quick: Quick = False,
    as_json: Json = False,
    output: Output = None,
) -> None:
    """What make demo runs, timed; 10 min for three seeds.

    Example: relibra bench demo --quick
    """
    _run("demo.py", [*map(str, seeds or []), *_words(quick, as_json, None, output)])


@app.command(rich_help_panel=_MEASURE)
def gpu(quick: Quick = False, as_json: Json = False, data: Data = None, output: Output = None) -> None:
    """The same as ranks at real sizes on one CUDA GPU, and copies beside computing; 10 min, skips without a GPU.

    Example: relibra bench gpu --quick
    """
    _run("gpu.py", _words(quick, as_json, data, output))


@app.command("all", rich_help_panel=_RESULTS)
def everything(
    long: Annotated[bool, typer.Option("--long", help="Also the programs that take longer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what became of each program as JSON.")] = False,
    data: Data = None,
) -> None:
    """Run what fits into 15 min, or all; then write docs/results.md and the README.

    Example: relibra bench all
    """
    _run("all.py", ["--long"] * long + _words(False, as_json, data, None))


@app.command(rich_help_panel=_RESULTS)
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Result file.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The one to hold against it.")],
    tolerance: Tolerance = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Print every figure of two result files that differs; exit code 1 when one does.

    Example: relibra bench compare benchmarks/results/planner.json elsewhere/planner.json --tolerance 0.05
    """
    _run("compare.py", [str(before), str(after), *_tolerated(tolerance), *["--json"] * as_json])


@app.command(rich_help_panel=_RESULTS)
def rerun(
    name: Annotated[str, typer.Argument(metavar="NAME", help="File in benchmarks/results, such as planner.")],
    row: Annotated[int | None, typer.Option(min=0, metavar="K", help="Only this row, from 0; default: all.")] = None,
    tolerance: Tolerance = None,
    data: Data = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Run the command of committed rows again and compare; exit code 1 when a figure differs.

    Example: relibra bench rerun rollout_windows
    """
    words = [name, *([] if row is None else ["--row", str(row)]), *_tolerated(tolerance)]
    _run("rerun.py", [*words, *_words(False, as_json, data, None)])


@app.command(rich_help_panel=_RESULTS)
def render(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 when a page is stale.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the names of the pages as JSON.")] = False,
) -> None:
    """Write the tables and figures of docs/results.md and of the README from the result files.

    Example: relibra bench render --check
    """
    _run("render.py", ["--check"] * check + ["--json"] * as_json)


def _words(quick: bool, as_json: bool, data: Path | None, output: Path | None) -> list[str]:
    words = ["--quick"] * quick + ["--json"] * as_json
    words += [] if data is None else ["--data", str(data)]
    return words + ([] if output is None else ["--output", str(output)])


def _tolerated(tolerance: float | None) -> list[str]:
    return [] if tolerance is None else ["--tolerance", str(tolerance)]


def _run(name: str, words: list[str]) -> NoReturn:
    """Run a program of the checkout and leave with its exit code.

    raises   ConfigError where relibra is installed without its checkout
    """
    program = Path(relibra.__file__).parents[2] / "benchmarks" / name
    if not program.exists():
        raise ConfigError(
            f"{program} is not there: the benchmarks are not part of the installed package, run from a checkout of "
            "relibra (pip install -e .)"
        )
    # A process of its own: it fixes the number of threads before numpy starts, and its peak memory is its own.
    raise typer.Exit(subprocess.run([sys.executable, str(program), *words], check=False).returncode)
