"""The programs of this folder: where they are, how long they take, how many threads they may use."""

from __future__ import annotations

import ast
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program.

    name          NAME.py in the folder
    minutes       on two cores; None for programs that only read result files
    arguments     of `relibra bench all`
    takes_data    has an option --data
    long          run by `make bench-all` only
    threads       threads of numpy, BLAS and numba; None: theirs
    """

    name: str
    folder: str = ""
    minutes: float | None = None
    arguments: tuple[str, ...] = ()
    takes_data: bool = False
    long: bool = False
    threads: int | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return FOLDER / self.folder / f"{self.name}.py"

    @property
    def module(self) -> str:
        """The name to import it by."""
        return ".".join(("benchmarks", *((self.folder,) if self.folder else ()), self.name))

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        text = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        return text.splitlines()[0].partition(". ")[0].removesuffix(".")


PROGRAMS = (
    Program(name="recordings", folder="routes", minutes=0.1, takes_data=True),
    Program(name="picked_together", folder="routes", minutes=3, takes_data=True, long=True),
    Program(name="routing", folder="routes", minutes=0.2),
    Program(name="route_path", folder="routes", minutes=0.5, threads=1),
    Program(name="route_import", folder="routes", minutes=2, long=True),
    Program(name="route_memory", folder="routes", minutes=4, long=True, threads=1),
    Program(name="deployment", folder="deployment", minutes=0.1, threads=1),
    Program(name="rollout_windows", folder="simulation", minutes=0.1),
    Program(name="iteration", folder="simulation", minutes=10, long=True, threads=1),
    Program(name="planner", folder="planner", minutes=3.5, takes_data=True, threads=2),
    Program(name="balancers", folder="planner", minutes=1.5, takes_data=True),
    Program(name="trainer_schedules", folder="planner", minutes=1, takes_data=True, long=True),
    Program(name="whole_step", folder="planner", minutes=5, long=True, threads=2),
    Program(name="step", folder="planner", minutes=60, takes_data=True, long=True, threads=1),
    Program(name="lasting", folder="planner", minutes=6, takes_data=True, long=True, threads=1),
    Program(name="tppo_toy", folder="rl", minutes=1),
    Program(name="emulated_ranks", folder="runtime", minutes=3, takes_data=True),
    Program(name="preparation", folder="runtime", minutes=3, long=True, threads=1),
    Program(name="dispatch", folder="runtime", minutes=3, long=True, threads=1),
    Program(name="memory", folder="runtime", minutes=4, long=True, threads=1),
    Program(name="papers", folder="papers", minutes=4, takes_data=True, threads=1),
    Program(name="simulation", folder="simulation", minutes=1, threads=1),
    Program(name="streaming", folder="routes", minutes=2, arguments=("10", "--repetitions", "3"), long=True),
    Program(
        name="validation", folder="simulation", minutes=6, arguments=("--repetitions", "3"), long=True, threads=1
    ),
    Program(name="serving", folder="serving", minutes=6, long=True, threads=1),
    Program(name="acceptance", folder="serving", minutes=15, long=True, threads=1),
    Program(name="sizing", folder="serving", minutes=8, long=True, threads=1),
    Program(name="beside_vllm", folder="serving", minutes=5, arguments=(".venv-vllm/bin/python",), long=True),
    Program(name="shared_prompts", folder="rl", minutes=6, long=True, threads=1),
    Program(name="ahead", folder="rl", minutes=10, long=True),
    Program(name="trl", folder="rl", minutes=15, long=True, threads=1),
    Program(name="rl", folder="rl", minutes=30, long=True),
    Program(name="reliability", folder="reliability", minutes=45, long=True),
    Program(name="demo", folder="rl", minutes=10, arguments=("0", "1", "2"), long=True),
    Program(name="tppo", folder="rl", minutes=30, long=True),
    Program(
        name="runtime", folder="runtime", minutes=25, arguments=("--repetitions", "9"), takes_data=True, long=True,
        threads=1,
    ),
    Program(name="gpu", folder="runtime", minutes=10, takes_data=True, long=True),
    Program(name="training", folder="runtime", minutes=5, long=True),
)  # fmt: skip
"""Programs that measure, in the order in which `relibra bench all` runs them."""

VERBS = tuple(Program(name=name) for name in ("all", "rerun", "compare", "render"))
"""Programs on result files."""

BY_NAME = {program.name: program for program in (*PROGRAMS, *VERBS)}


def command(name: str, *arguments: str) -> list[str]:
    """Return the command line that runs a program in a process of its own."""
    return [sys.executable, str(FOLDER), name, *arguments]


def recorded_program(text: str) -> tuple[str, list[str]]:
    """Return name and arguments of the program that a row's command ran; an empty name for another command.

    >>> recorded_program("python benchmarks/runtime.py --repetitions 9")
    ('runtime', ['--repetitions', '9'])
    """
    words = [word for word in shlex.split(text) if word != "FOLDER"]  # older rows name a folder for recordings
    if words == ["make", "bench-gpu"]:
        return "gpu", []
    if words[:2] == ["relibra", "bench"] and len(words) > 2:
        return words[2], words[3:]
    path = Path(words[1]) if words[:1] == ["python"] and len(words) > 1 else Path()
    if path.suffix == ".py" and path.parts[0] == "benchmarks" and ".." not in path.parts:
        return path.stem, words[2:]  # rows from before relibra bench NAME was written into them
    return "", []
