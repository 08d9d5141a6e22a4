"""Runs on a small file system that fills up at a random step to a random page: they go on, or stop and resume."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.chinese_task import write_task
from benchmarks.reliability.started_run import RUN, StartedRun, Trained, go_on, read_trained, run_to_end

STEPS = 8
DISK_BYTES = 64 << 20
PAGE_BYTES = 4096
SMALL_PAGES, MANY_PAGES = 12, 160
"""Free pages after the disk filled up: up to the one where logs fail, up to the other where checkpoints do."""
SETTINGS = (
    f"run.steps={STEPS}", "rollout.prompts_per_step=6", "rollout.responses_per_prompt=3", "rollout.max_response=60",
    "update.mini_batches=2", "algorithm.preset=grpo", "plan.balancer=static", "checkpoint.every=3",
    "parallel.ranks=2", f"run.name={RUN}",
)  # fmt: skip
WARNINGS = ("cannot write the routes", "for TensorBoard")


@dataclass(frozen=True, kw_only=True)
class FullDisk:
    """When a disk fills up.

    step     after so many finished steps; 0: before the run begins
    pages    of 4 KiB that stay free
    traces   value of trace.keep
    """

    number: int
    step: int
    pages: int
    traces: int


@dataclass(frozen=True, kw_only=True)
class Survived:
    """What became of a run on a full disk.

    stopped     it ended early
    sentence    it said so in a last line that is an error message, and no traceback
    warned      it went on, or ended, with a warning
    torn        logs whose last line was cut
    equal       in the end its results are those of an undisturbed run
    """

    disk: FullDisk
    stopped: bool
    sentence: bool
    warned: bool
    torn: int
    anew: bool
    equal: bool
    said: str

    @property
    def neither(self) -> bool:
        """It stopped without a sentence, or its results differ."""
        return not self.equal or (self.stopped and not self.sentence)


def choose_disks(count: int, seed: int) -> list[FullDisk]:
    """Return random moments and sizes."""
    rng, found = random.Random(seed), list[FullDisk]()
    for number in range(count):
        pages = rng.randrange(SMALL_PAGES if number % 2 else MANY_PAGES)
        found.append(
            FullDisk(number=number, step=rng.randrange(STEPS), pages=pages, traces=2 if number % 3 == 0 else 0)
        )
    return found


@contextmanager
def small_disk(folder: Path) -> Iterator[str | None]:
    """Mount a file system of DISK_BYTES in memory at a new folder; unmount it. Yield why that cannot be, or None."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        yield str(error)
        return
    if done.returncode:
        yield (done.stderr.strip() or "mount failed").splitlines()[0]
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, pages: int) -> None:
    """Write a file that leaves so many pages of the disk free, while others write too."""
    filler = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY)
    try:
        size = 0
        while True:
            free = os.statvfs(folder).f_bavail
            if free <= pages:
                return
            with suppress(OSError):  # a run under way was faster
                os.posix_fallocate(filler, size, (free - pages) * PAGE_BYTES)
                size += (free - pages) * PAGE_BYTES
    finally:
        os.close(filler)


def task_settings(folder: Path) -> tuple[str, ...]:
    """Write the task; return all settings of a run."""
    folder.mkdir()
    return (*write_task(folder), *SETTINGS)


def undisturbed(settings: Sequence[str], home: Path) -> Trained:
    """Make a run that has room."""
    code, said = run_to_end([*settings, f"run.folder={home}"], home, "stderr.txt")
    assert code == 0, f"the undisturbed run ended with {code}: {said}"
    trained = read_trained(home / RUN)
    assert trained is not None, "the undisturbed run left no results"
    return trained


def fill_during_run(disk: FullDisk, settings: Sequence[str], mount: Path, home: Path, whole: Trained) -> Survived:
    """Fill the disk during a run, make room after its end, and resume it if it stopped.

    mount    the small file system
    home     folder of the task
    """
    shutil.rmtree(mount / "runs", ignore_errors=True)
    words = [*settings, f"run.folder={mount / 'runs'}", f"trace.keep={disk.traces}"]
    if disk.step == 0:
        fill(mount, disk.pages)
    with StartedRun(words, home, "stderr.txt") as run:
        if disk.step and run.wait_for(f"({disk.step}/"):
            fill(mount, disk.pages)
        code, said = run.wait(), run.stderr
    (mount / "filler").unlink(missing_ok=True)
    torn = sum(_is_torn(mount / "runs" / RUN / name) for name in ("metrics.jsonl", "samples.jsonl"))
    anew, resumed = False, ""
    if code != 0:
        anew, code_again, resumed = go_on(words, home, mount / "runs" / RUN)
        code = None if code is None else code_again
    lines = said.splitlines() or [""]
    stopped = bool(resumed)
    equal = code == 0 and read_trained(mount / "runs" / RUN) == whole
    return Survived(
        disk=disk,
        stopped=stopped,
        sentence=lines[-1].startswith("error: ") and "Traceback" not in said,
        warned=any(warning in said for warning in WARNINGS),
        torn=torn,
        anew=anew,
        equal=equal,
        said=said if equal else f"{said}\n--- resumed:\n{resumed}",
    )


def _is_torn(log: Path) -> bool:
    return log.exists() and not (log.read_bytes() or b"\n").endswith(b"\n")


def row_of(survived: Sequence[Survived], seed: int) -> dict:
    """Return the row of all disks."""
    stopped = [one for one in survived if one.stopped]
    return {
        "case": "full disk, Chinese samples",
        "table": "disks",
        "label": "measured",
        "unit": "disks: file systems that filled up at a random step to a random number of free pages; went on: the "
        "run reached its end, warned: with a warning; stopped: with a sentence, and resumed after room was made; "
        "anew: had no checkpoint yet and was started again; torn: logs whose last line was cut; equal: metrics, "
        "samples and policy are those of an undisturbed run; failed: another end",
        "seed": seed,
        "repetitions": len(survived),
        "disks": len(survived),
        "went on": len(survived) - len(stopped),
        "warned": sum(one.warned and not one.stopped for one in survived),
        "stopped": len(stopped),
        "sentence": sum(one.sentence for one in stopped),
        "anew": sum(one.anew for one in survived),
        "torn": sum(one.torn for one in survived),
        "equal": sum(one.equal for one in survived),
        "neither": sum(one.neither for one in survived),
        "configuration": f"2 processes, {STEPS} steps of 18 responses, checkpoint every 3, tmpfs of "
        f"{DISK_BYTES >> 20} MiB filled to 0 to {MANY_PAGES - 1} free pages of 4 KiB",
    }
