"""`python benchmarks NAME [ARGUMENTS]`: run a program of this folder; without a name, list all."""

import importlib
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # the checkout, so that programs import each other as benchmarks.NAME

from benchmarks.programs import BY_NAME, PROGRAMS, VERBS  # noqa: E402
from relibra.errors import RelibraError  # noqa: E402
from relibra.printable import escape_logs_and_tracebacks, printable  # noqa: E402

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def print_programs() -> None:
    """Print every program with its minutes and what it does."""
    print("relibra bench NAME [ARGUMENTS]; each NAME takes --help. Minutes are those of two cores, without --quick.")
    for program in PROGRAMS:
        print(f"  {program.name:<16}{program.minutes:>5g} min  {program.summary}")
    for program in VERBS:
        print(f"  {program.name:<26}{program.summary}")


def run(name: str, arguments: list[str]) -> int:
    """Run a program in this process and return its exit code."""
    program = BY_NAME[name]
    if program.threads is not None:
        os.environ.update(dict.fromkeys(THREADS, str(program.threads)))  # before numpy starts its threads
    sys.argv = [f"relibra bench {name}", *arguments]
    escape_logs_and_tracebacks()
    try:
        return importlib.import_module(program.module).main() or 0
    except RecursionError:
        print("error: an input is nested too deeply", file=sys.stderr)
        return 1
    except RelibraError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1


def main() -> int:
    """Run the named program, or list all."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("list", [])
    if name in ("list", "--help"):
        print_programs()
        return 0
    if name not in BY_NAME:
        print(f"error: there is no program {name!r}: choose from {', '.join(BY_NAME)}", file=sys.stderr)
        return 2
    return run(name, arguments)


if __name__ == "__main__":
    sys.exit(main())
