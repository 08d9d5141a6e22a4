"""The reward "maths": Math-Verify in a child process with limited time and memory.

A response such as `9^{9^{9^9}}` can take a computer algebra system hours or gigabytes, and the library's own time limit
is an exception raised by a signal handler, which other code may catch. A child that does not answer in time is killed,
and the response gets reward 0.
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
"""Seconds for one response: above the library's own limits, so that these apply first."""
START_SECONDS = 120.0
"""Seconds for the child to import the library, which takes 1 to 2 seconds on an idle machine."""
TAIL_CHARACTERS = 8000
"""Characters at the end of a response that are read: the answer is there, and parsing takes superlinear time."""

_log = logging.getLogger(__name__)


class MathsJudge:
    """Compares answers; starts its child process at the first one, and again after it was killed."""

    def __init__(self) -> None:
        """Check that the library is installed; raises ConfigError if not."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "task.reward 'maths' needs Math-Verify, which is not installed: in the checkout, pip install -e "
                "'.[maths]', or set task.reward to 'exact' or to a function of yours"
            )
        self.child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def __call__(self, response: str, answer: str) -> bool:
        """Return whether the last mathematical expression of a response equals the correct answer.

        answer    LaTeX or plain text; with `####` (GSM8K), the part after it
        raises    ConfigError if the library cannot parse the correct answer; EngineError if it does not start
        """
        gold = answer.rpartition("####")[2].strip()
        reply = self._ask(json.dumps({"answer": gold, "response": _tail(response)}).encode() + b"\n")
        if reply == b"?":
            raise ConfigError(
                f"Math-Verify cannot parse the correct answer {gold!r}: correct it, or use reward 'exact'"
            )
        if reply not in (b"0", b"1"):
            _log.warning("maths: a response ending in %r could not be compared and gets reward 0", response[-60:])
        return reply == b"1"

    def _ask(self, question: bytes) -> bytes:
        """Return the child's reply; empty if it did not reply and was killed."""
        child = self.child or self._start()
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
        """Start a child process that ends with this judge or this process."""
        self.child = child = subprocess.Popen(
            [sys.executable, "-P", "-m", "relibra.rl.tasks.maths_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the run handles Ctrl-C
        )
        self._end = weakref.finalize(self, _end, child)
        if _reply(child, START_SECONDS) != b"r":
            self._stop()
            raise EngineError(
                f"Math-Verify ended, or took {START_SECONDS:.0f} s to start: {sys.executable} -c 'import math_verify'"
            )
        return child

    def _stop(self) -> None:
        assert self._end is not None, "a child was started"
        self._end()
        self.child = None


def _reply(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return the one-byte answer of a child; empty if it ended or was too slow."""
    assert child.stdout is not None, "the child answers"
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return os.read(child.stdout.fileno(), 1) if selector.select(seconds) else b""


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()  # waits, and closes the pipes


def _tail(response: str) -> str:
    """Return the end of a response from the start of a line, so that no pair of delimiters in a line is cut."""
    if len(response) <= TAIL_CHARACTERS:
        return response
    tail = response[-TAIL_CHARACTERS:]
    _, _, rest = tail.partition("\n")
    return rest if rest.strip() else tail  # the last line may be longer
