"""Run the benchmarks of this checkout one after another, and write docs/results.md and the README from their rows.

Run: python benchmarks/all.py [--long] [--json] [--data FOLDER]   (or: make bench, make bench-all, relibra bench all)
Without --long only what fits into a quarter of an hour on two cores; the others keep their committed rows. A program
that fails, or skips a part, leaves its committed rows as they are; the others go on. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import render
from provenance import DATA, RESULTS, ROOT
from results_files import read_results

from relibra.errors import ConfigError
from relibra.files import write_text

Program = tuple[str, tuple[str, ...], float]
"""Name of a file in benchmarks/, its arguments, and the minutes it takes on two cores."""

PROGRAMS: tuple[Program, ...] = (
    ("recordings", (), 0.1),
    ("routing", (), 0.2),
    ("rollout_windows", (), 0.1),
    ("planner", (), 3.5),
    ("balancers", (), 1.5),
    ("tppo_toy", (), 1),
    ("emulated_ranks", (), 3),
    ("papers", (), 4),
    ("simulation", (), 1),
)
"""What `make bench` runs; together at most MOST_MINUTES."""

LONG: tuple[Program, ...] = (
    ("streaming", ("10", "--repetitions", "3"), 2),
    ("validation", ("--repetitions", "3"), 6),
    ("rl", (), 4),
    ("demo", ("0", "1", "2"), 10),
    ("tppo", (), 15),
    ("runtime", ("--repetitions", "9"), 25),
    ("gpu", (), 10),
)
"""What `make bench-all` runs besides."""

MOST_MINUTES = 15
TAKES_DATA = {"recordings", "planner", "balancers", "emulated_ranks", "papers", "runtime", "gpu"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a program: measured, skipped, failed or kept; and why, where it is not the first."""

    program: str
    outcome: str
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        """One line for a person."""
        spent = f" in {self.seconds:.0f} s" if self.seconds else ""
        files = f": {', '.join(self.files)}" if self.files else ""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.program}: {self.outcome}{spent}{files}{reason}"


def run(program: Program, data: Path, results: Path) -> Outcome:
    """Run a program and take over its rows, if it ends well and has skipped nothing."""
    name, arguments, _ = program
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = [*arguments, *(["--data", str(data)] if name in TAKES_DATA else []), "--output", folder]
        command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words]
        code, skipped = _watched(command, folder)
        seconds = time.perf_counter() - start
        if code:
            reason = f"exit code {code}, its message stands above; the committed rows stay"
            return Outcome(program=name, outcome="failed", seconds=seconds, reason=reason)
        if skipped:
            reason = f"{skipped}; the committed rows stay"
            return Outcome(program=name, outcome="skipped", seconds=seconds, reason=reason)
        try:
            files = _taken_over(Path(folder), results)
        except ConfigError as error:
            return Outcome(program=name, outcome="failed", seconds=seconds, reason=str(error))
    return Outcome(program=name, outcome="measured", seconds=seconds, files=files)


def _watched(command: list[str], folder: str) -> tuple[int, str]:
    """Run a command, pass on what it says on stderr, and return its exit code and what it says it skipped.

    folder    where its rows go for now: lines that only name files there are not passed on
    """
    skipped: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None, "stderr is a pipe"
        try:
            for line in process.stderr:
                if not line.startswith(folder):
                    print(f"  {line}", end="", file=sys.stderr, flush=True)
                skipped += [line.removeprefix("skipped:").strip()] * line.startswith("skipped:")
        except BaseException:
            process.kill()
            raise
    return process.returncode, "; ".join(skipped)


def _taken_over(folder: Path, results: Path) -> tuple[str, ...]:
    """Copy whole, valid result files; none of them when one is not.

    raises    ConfigError when a file is not valid, or there is none
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError("it ended well, but wrote no rows")
    for path in paths:
        read_results(path)
    for path in paths:
        write_text(results / path.name, path.read_text())
    return tuple(path.name for path in paths)


def outcomes(*, long: bool, data: Path, results: Path) -> Iterator[Outcome]:
    """Run what is to be run, and say of the rest why it is not."""
    for program in (*PROGRAMS, *(LONG if long else ())):
        print(f"{program[0]} (about {program[2]:g} min) ...", file=sys.stderr, flush=True)
        yield run(program, data, results)
    for name, _, minutes in () if long else LONG:
        yield Outcome(program=name, outcome="kept", reason=f"takes about {minutes:g} min: make bench-all measures it")


def validation_in_words(results: Path) -> str:
    """Say by how much the simulator is off from what was measured, and when that was: no run goes by without it."""
    try:
        row = read_results(results / "validation.json")[0]
    except ConfigError as error:
        return f"how far the simulator is from the machine is not known: {error}"
    return (
        f"simulated step times are off from measured ones by {row['median_error']:.1%} in the median (goal: at most "
        f"{row['goal']:.0%}), at commit {row['commit'][:12]}; again: relibra bench validation"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    if shutil.which("git") is None:
        sys.exit("error: git is not there, and without a commit no row can say where it comes from")
    start, found = time.perf_counter(), []
    for outcome in outcomes(long=options.long, data=options.data, results=RESULTS):
        print(outcome, file=sys.stderr, flush=True)
        found.append(outcome)
    pages = render.write_pages()
    print(validation_in_words(RESULTS), file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        print(f"{(time.perf_counter() - start) / 60:.1f} minutes in all; written: {', '.join(pages)}")
    return int(any(one.outcome == "failed" for one in found))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(
            "stopped; rows of finished programs are written, the pages are not: relibra bench render", file=sys.stderr
        )
        sys.exit(130)
