"""Stderr that is closed, or that nobody reads: lines of progress are lost, nobody waits."""

import os
import sys
import time
from contextlib import suppress

import pytest

from relibra.rl.run import stderr_writer
from relibra.rl.run.stderr_writer import StderrWriter, lenient_stderr


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    return reader, os.fdopen(writer, "w")


def test_what_is_read_is_there_after_a_flush(pipe, monkeypatch):
    reader, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    with lenient_stderr():
        print("step 1", file=sys.stderr, flush=True)
        assert os.read(reader, 100) == b"step 1\n"
        assert not sys.stderr.isatty()
        print("step 2", file=sys.stderr)
    assert os.read(reader, 100) == b"step 2\n"
    assert sys.stderr is stream


def test_a_closed_pipe_costs_lines_only(pipe):
    reader, stream = pipe
    os.close(reader)
    writer = StderrWriter(stream)
    for _ in range(3):
        print("step", file=writer, flush=True)


def test_a_pipe_that_nobody_reads_is_waited_for_once(pipe, monkeypatch):
    monkeypatch.setattr(stderr_writer, "FLUSH_SECONDS", 0.1)
    monkeypatch.setattr(stderr_writer, "MAX_TEXTS", 50)
    reader, stream = pipe
    writer = StderrWriter(stream)
    started = time.monotonic()
    for _ in range(300):
        print("x" * 1000, file=writer, flush=True)
    assert time.monotonic() - started < 2
    os.set_blocking(reader, False)
    found = b""
    while b"there again" not in found:  # the thread catches up
        print("there again", file=writer)
        time.sleep(0.01)
        with suppress(BlockingIOError):
            found = os.read(reader, 1 << 20)
        assert time.monotonic() - started < 20
