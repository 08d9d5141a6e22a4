"""Run the benchmarks of this checkout one after another and write the pages from their rows.

Run: relibra bench all [--long] [--json] [--data FOLDER]   (or: make bench, make bench-all)
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

from benchmarks import render
from benchmarks.harness.provenance import DATA, RESULTS, ROOT
from benchmarks.harness.results_files import read_results
from benchmarks.programs import PROGRAMS, Program, command
from relibra.errors import ConfigError
from relibra.files import write_text

MOST_MINUTES = 15
"""What the programs of `make bench` take together, at most."""


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
    name, start = program.name, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        where = ["--data", str(data)] if program.takes_data else []
        code, skipped = _watched(command(name, *program.arguments, *where, "--output", folder), folder)
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


def _watched(words: list[str], folder: str) -> tuple[int, str]:
    """Run a command, pass on what it says on stderr, and return its exit code and what it says it skipped.

    folder    where its rows go for now: lines that only name files there are not passed on
    """
    skipped: list[str] = []
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
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
    """Run the programs in their order; of the long ones say why they are not run."""
    for program in PROGRAMS:
        if program.long and not long:
            reason = f"takes about {program.minutes:g} min: make bench-all measures it"
            yield Outcome(program=program.name, outcome="kept", reason=reason)
            continue
        print(f"{program.name} (about {program.minutes:g} min) ...", file=sys.stderr, flush=True)
        yield run(program, data, results)


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
        raise ConfigError("git is missing: every row of results names the commit that it was measured at")
    start, found = time.perf_counter(), []
    try:
        for outcome in outcomes(long=options.long, data=options.data, results=RESULTS):
            print(outcome, file=sys.stderr, flush=True)
            found.append(outcome)
    except KeyboardInterrupt:
        print("stopped; finished programs have written their rows, the pages are unchanged: relibra bench render",
              file=sys.stderr)  # fmt: skip
        return 130
    pages = render.write_pages()
    print(validation_in_words(RESULTS), file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        print(f"{(time.perf_counter() - start) / 60:.1f} minutes in all; written: {', '.join(pages)}")
    return int(any(one.outcome == "failed" for one in found))
