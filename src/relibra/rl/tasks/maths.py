"""The judge behind the reward "maths": Math-Verify, in a process of its own that cannot hold up the run.

What a policy writes can send a computer algebra system into hours or gigabytes (`9^{9^{9^9}}`), and the library's own
time limit is an exception raised by a signal, which code in between may swallow. So the library works in a child
process with limited memory; one that does not answer in time is ended, and the response earns nothing.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import selectors
import subprocess
import sys
import weakref
from contextlib import suppress

from relibra.errors import ConfigError, EngineError

ANSWER_SECONDS = 12.0
"""Limit for one response: above the library's own limits, so that those get their chance first."""
START_SECONDS = 120.0
"""Limit for the child to import the library; a second or two on a quiet machine."""
TAIL_CHARACTERS = 8000
"""Of a response are looked at: the answer stands at its end, and patterns take more than linear time."""

_log = logging.getLogger(__name__)


class MathsJudge:
    """Compares answers; starts its child process with the first one, and again after one that had to be ended."""

    def __init__(self) -> None:
        """Look for the library; raises ConfigError when it is not installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "task.reward 'maths' needs Math-Verify, which is not installed: pip install 'relibra[maths]', or set "
                "task.reward to 'exact' or to a function of yours"
            )
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def __call__(self, response: str, answer: str) -> bool:
        """Say whether the last mathematical expression of a response equals the right answer.

        answer    LaTeX or plain; of the form of GSM8K, what follows `####`
        raises    ConfigError where the right answer has no meaning for the library; EngineError when it does not start
        """
        gold = answer.rpartition("####")[2].strip()
        reply = self._asked(json.dumps({"answer": gold, "response": _tail(response)}).encode() + b"\n")
        if reply == b"?":
            raise ConfigError(
                f"Math-Verify reads nothing in the right answer {gold!r}: correct it, or use reward 'exact'"
            )
        if reply not in (b"0", b"1"):
            _log.warning("maths: a response ending in %r could not be judged and earns 0", response[-60:])
        return reply == b"1"

    def _asked(self, question: bytes) -> bytes:
        """Return the child's reply; empty when it gave none, and has been ended."""
        child = self._child or self._start()
        assert child.stdin is not None, "the child listens"
        reply = b""
        with suppress(BrokenPipeError):
            child.stdin.write(question)
            child.stdin.flush()
            reply = _reply(child, ANSWER_SECONDS)
        if not reply:
            self._stop()
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a child that ends with this judge, or with this process however that ends."""
        self._child = child = subprocess.Popen(
            [sys.executable, "-P", "-m", "relibra.rl.tasks.maths_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the run's to handle
        )
        self._end = weakref.finalize(self, _end, child)
        if _reply(child, START_SECONDS) != b"r":
            self._stop()
            raise EngineError(
                f"Math-Verify did not start in {START_SECONDS:.0f} s: try {sys.executable} -c 'import math_verify'"
            )
        return child

    def _stop(self) -> None:
        assert self._end is not None, "a child was started"
        self._end()
        self._child = None


def _reply(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the one byte that a child answers with; empty when it ended or was too slow."""
    assert child.stdout is not None, "the child answers"
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return os.read(child.stdout.fileno(), 1) if selector.select(seconds) else b""


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()  # waits, and closes the pipes


def _tail(response: str) -> str:
    """Return the end of a response, from the start of a line: formulas inside a line are found by pairs of signs."""
    if len(response) <= TAIL_CHARACTERS:
        return response
    tail = response[-TAIL_CHARACTERS:]
    _, line_end, rest = tail.partition("\n")
    return rest if line_end else tail
