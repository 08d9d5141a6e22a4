"""A program that starts another one and ends it when the standard input ends, for servers that do not do so themselves.

python -m relibra.rl.rollout.started.guard WORD...
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from relibra.environment import server_environment

POLL_SECONDS = 0.5
ENDING_SECONDS = 30.0
"""How long the program may take to end after SIGTERM."""


def run_guarded(command: Sequence[str]) -> int:
    """Run a program in a session of its own until it ends, or the standard input does; return its exit code.

    The process that watches is a child of this one: when an actor dies, Ray kills the processes that it started, but
    not what those started. Whatever is left of the program's session is killed: engines of a server that crashed keep
    their memory.
    """
    watching = os.fork()
    if watching == 0:
        os._exit(_watch(command))
    return os.waitstatus_to_exitcode(os.waitpid(watching, 0)[1])


def _watch(command: Sequence[str]) -> int:
    os.setsid()
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, env=server_environment(), start_new_session=True
        )
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    while process.poll() is None and not _has_ended(sys.stdin.fileno()):
        pass
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return 128 - code if code < 0 else code


def _has_ended(file: int) -> bool:
    """Return whether a file is at its end; wait a moment for that."""
    ready, _, _ = select.select([file], [], [], POLL_SECONDS)
    return bool(ready) and not os.read(file, 1 << 10)


if __name__ == "__main__":
    sys.exit(run_guarded(sys.argv[1:]))
