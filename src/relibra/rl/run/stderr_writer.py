"""Stderr of a run: a pipe that is closed, or that nobody reads, costs lines of progress and not the run."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

MAX_TEXTS = 10_000
"""Texts that wait for a reader; later ones are lost."""
FLUSH_SECONDS = 2.0
"""Longest wait for a reader; after it no flush waits, until all that was written before has been read."""


class StderrWriter:
    """Writes to a stream in a thread of its own, and leaves out what the stream does not take.

    `SimpleQueue` may be used in a signal handler, which prints that the run stops.
    """

    def __init__(self, stream: Any) -> None:
        """Start the thread; stream: such as sys.stderr."""
        self._stream = stream
        self._texts: SimpleQueue[str | list[bool]] = SimpleQueue()
        self._unread: list[bool] | None = None
        threading.Thread(target=self._run, daemon=True, name="stderr").start()

    def write(self, text: str) -> int:
        """Write a text, at once or later."""
        if self._texts.qsize() < MAX_TEXTS:
            self._texts.put(text)
        return len(text)

    def flush(self) -> None:
        """Wait until everything is written, or until it seems that nobody reads."""
        if self._unread == []:
            return
        written: list[bool] = []  # the thread appends to it
        self._texts.put(written)
        deadline = time.monotonic() + FLUSH_SECONDS
        while not written:
            if time.monotonic() > deadline:
                self._unread = written
                return
            time.sleep(0.001)

    def __getattr__(self, name: str) -> Any:
        """Return what else the stream has, such as its encoding."""
        return getattr(self._stream, name)

    def _run(self) -> None:
        while True:
            text = self._texts.get()
            if isinstance(text, list):
                text.append(True)
                continue
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # closed
                pass


@contextmanager
def lenient_stderr() -> Iterator[None]:
    """Print to stderr through a `StderrWriter` inside; processes that are forked inside print to stderr itself."""
    before = sys.stderr
    if before is None:  # closed before this process started
        yield
        return
    writer = StderrWriter(before)
    sys.stderr = writer

    def restore() -> None:
        if sys.stderr is writer:
            sys.stderr = before

    os.register_at_fork(after_in_child=restore)
    try:
        yield
    finally:
        writer.flush()
        restore()
