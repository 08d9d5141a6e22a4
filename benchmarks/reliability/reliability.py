"""What becomes of runs that are killed, stopped or out of disk, of damaged inputs, and of a server under attack.

Run: relibra bench reliability [PART ...] [--count N] [--seed N] [--quick] [--json] [--output FOLDER]
Rows go to results/reliability.json. Without a part all of them; with one, the file keeps the rows of the others. Three
quarters of an hour on two cores; --quick tries a handful of each and writes no rows. Exit code 1 when one run or input
ends in another way than promised.

signals   50 random moments of `relibra train` on two processes at which processes get SIGKILL, SIGTERM or SIGSTOP
disks     30 runs whose disk fills up at a random step; needs the right to mount a small file system in memory
damage    10,000 damaged inputs for each reader (tests/fuzz)
attack    `relibra serve` under hostile bodies of 7.8 MiB, with a stopped worker, and the stop beside them
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import RESULTS, ROOT, write_results
from benchmarks.harness.results_files import Row, read_results
from benchmarks.reliability import attacked_server, full_disks, signalled_runs
from relibra.errors import ConfigError, EngineError
from relibra.files import write_text

COUNTS = {"signals": 50, "disks": 30, "damage": 10_000, "attack": 8_000}
QUICK_COUNTS = {"signals": 3, "disks": 2, "damage": 20, "attack": 500}


def signal_rows(seed: int, count: int) -> list[dict]:
    """Signal runs, and say what is neither."""
    ended = []
    with tempfile.TemporaryDirectory() as text:
        home = Path(text) / "task"
        settings = signalled_runs.task_settings(home)
        whole, pace = signalled_runs.undisturbed(settings, home)
        _say(f"undisturbed: {pace.start:.1f} s to the first step, {pace.step:.2f} s a step, {pace.end:.1f} s to end")
        for point in signalled_runs.choose_points(count, seed):
            one = signalled_runs.signal_run(point, settings, home, pace, whole)
            ended.append(one)
            state = ", ".join(name for name in ("equal", "anew", "named", "neither") if getattr(one, name))
            told = "" if one.told is None else f", told after {one.told:.1f} s"
            _say(f"{point.number}: {point.signal} to {point.target} after {point.step} steps{told}: {state}")
            if not one.equal or one.lost_unnamed:
                _say(one.said)
    return signalled_runs.rows_of(ended, seed)


def disk_rows(seed: int, count: int) -> list[dict]:
    """Fill disks, and say what is neither; no rows where no file system can be mounted."""
    survived = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with full_disks.small_disk(folder / "disk") as refused:
            if refused:
                _say(f"skipped: full disks, no file system in memory can be mounted ({refused})")
                return []
            settings = full_disks.task_settings(folder / "task")
            whole = full_disks.undisturbed(settings, folder / "task")
            for disk in full_disks.choose_disks(count, seed):
                one = full_disks.fill_during_run(disk, settings, folder / "disk", folder / "task", whole)
                survived.append(one)
                facts = ("warned", "stopped", "anew", "equal", "neither")
                state = ", ".join(name for name in facts if getattr(one, name))
                _say(f"{disk.number}: {disk.pages} pages free after {disk.step} steps, {one.torn} torn logs: {state}")
                if one.stopped or one.neither:
                    _say(one.said if one.neither else one.said.splitlines()[-1])
    return [full_disks.row_of(survived, seed)]


def damage_rows(seed: int, count: int) -> list[dict]:
    """Read damaged inputs in a process with capped memory, and say what was found."""
    command = [sys.executable, "-m", "tests.fuzz.worker", str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the process that reads damaged inputs ended with {done.returncode}: {done.stdout[-300:]}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        if "problem" in line:
            _say(f"{line['reader']}, seed {line['seed']}: {line['problem']}")
    return [
        {
            "case": line["reader"],
            "table": "damage",
            "label": "measured",
            "unit": "damaged inputs; refused: in a sentence; read: as a value; found: any other error, more memory or "
            "more time than a case may take",
            "seed": seed,
            "repetitions": line["cases"],
            "cases": line["cases"],
            "refused": line.get("refused", 0),
            "read": line.get("read", 0),
            "found": line.get("found", 0),
            "ms": 1e3 * line["seconds"] / line["cases"],
            "configuration": "1,536 MiB and 5 s a case at most",
        }
        for line in lines
        if "cases" in line
    ]


def attack_rows(_seed: int, count: int) -> list[dict]:
    """Attack a server, with bodies of `count` KiB, and say what is noticed."""
    found, size = list[dict](), count << 10
    with tempfile.TemporaryDirectory() as text:
        home = Path(text)
        with attacked_server.attacked_server(home, "--experts", "2") as server:
            tokens = max(8, count // 160)
            for row in attacked_server.hostile_rows(server, size, tokens):
                found.append(row)
                _say(str(row))
            for row in attacked_server.stopped_rows(server):
                found.append(row)
                _say(str(row))
        for stopped in (False, True):
            found.append(attacked_server.stop_row(home, size, stopped=stopped))
            _say(str(found[-1]))
    return attacked_server.rows_of(found, size)


PARTS: dict[str, Callable[[int, int], list[dict]]] = {
    "signals": signal_rows, "disks": disk_rows, "damage": damage_rows, "attack": attack_rows
}  # fmt: skip


def kept_rows(folder: Path, parts: set[str]) -> list[Row]:
    """Return the rows of other parts that a result file has."""
    try:
        rows = read_results(folder / "reliability.json")
    except ConfigError:
        rows = read_results(RESULTS / "reliability.json") if (RESULTS / "reliability.json").exists() else []
    return [row for row in rows if row["table"] not in parts]


def main() -> int:
    parser = measurement_options(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--count", type=int, help="signals, disks, inputs per reader, KiB of a body; default: 50, 30, 10,000, 8,000"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    parts = options.parts or list(PARTS)
    counts = QUICK_COUNTS if options.quick else COUNTS
    rows = [row for part in parts for row in PARTS[part](options.seed, options.count or counts[part])]
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print_tables(rows)
    if rows and not options.quick:
        seed = [f"--seed {options.seed}"] * bool(options.seed)
        count = [f"--count {options.count}"] * bool(options.count)
        words = " ".join(["relibra bench reliability", *options.parts, *count, *seed])
        kept = kept_rows(options.output, {row["table"] for row in rows})
        path = write_results("reliability", rows, words, options.output)
        together = [*json.loads(path.read_text()), *kept]
        order = list(PARTS)
        together.sort(key=lambda row: order.index(row["table"]))
        write_text(path, json.dumps(together, indent=1) + "\n")
        _say(str(path))
    return int(any(row.get("neither") or row.get("found") for row in rows))


def _print_tables(rows: list[dict]) -> None:
    for part in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == part]
        hidden = ("table", "label", "unit", "seed", "repetitions", "configuration")
        columns = [key for key in own[0] if key not in hidden]
        table = Table(title=part, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        for column in columns:
            table.add_column(column, justify="left" if column == "case" else "right")
        for row in own:
            table.add_row(*(f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for key in columns))
        Console().print(table)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
