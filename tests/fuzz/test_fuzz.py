"""Damaged inputs end in a value or in a sentence: never in another error, more memory or more time."""

import json
import subprocess
import sys

import pytest

from relibra.errors import LONGEST_MESSAGE, TraceError
from relibra.routing.import_choices import Format
from tests.fuzz import recordings
from tests.fuzz.worker import READ, READERS, REFUSED, run_case

QUICK, THOROUGH = 130, 10_000


def run_cases(first, count, *readers):
    """Run cases in a process of their own; return what was found, and the lines of the readers that ended."""
    command = [sys.executable, "-m", "tests.fuzz.worker", str(first), str(count), *readers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"the process ended with {done.returncode}: {lines[-1:]} {done.stderr[-2000:]}"
    return [line for line in lines if "problem" in line], {line["reader"]: line for line in lines if "cases" in line}


@pytest.fixture(scope="module")
def quick():
    return run_cases(0, QUICK)


@pytest.mark.parametrize("reader", sorted(READERS))
def test_some_damaged_inputs_of_each_reader(quick, reader):
    found, ended = quick
    assert [one for one in found if one["reader"] == reader] == []
    assert ended[reader]["cases"] == QUICK
    assert ended[reader].get("read", 0) + ended[reader].get(REFUSED, 0) == QUICK


@pytest.mark.slow
@pytest.mark.parametrize("reader", sorted(READERS))
def test_many_damaged_inputs_of_each_reader(reader):
    found, ended = run_cases(QUICK, THOROUGH, reader)
    assert found == []
    assert ended[reader]["cases"] == THOROUGH


def test_damage_follows_from_the_seed(tmp_path, monkeypatch):
    outcomes = [[run_case("npz_trace", seed, tmp_path) for seed in range(20)] for _ in range(2)]
    assert outcomes[0] == outcomes[1]

    def fail(_, __):
        raise KeyError("a bug")

    monkeypatch.setitem(READERS, "npz_trace", fail)
    assert "KeyError: 'a bug'" in run_case("npz_trace", 0, tmp_path)


def test_every_format_is_damaged(tmp_path, monkeypatch):
    seen = set()
    monkeypatch.setattr(recordings, "import_samples", lambda _, format, __: seen.add(format) or iter(()))
    for reader in recordings.RECORDINGS:
        (tmp_path / reader).mkdir()
        for seed in range(20):
            assert run_case(reader, seed, tmp_path / reader) in (READ, REFUSED)
    assert seen == set(Format)


def test_a_long_message_keeps_beginning_and_end():
    text = str(TraceError("begin" + "x" * 10_000 + "end"))
    assert len(text) <= LONGEST_MESSAGE
    assert text.startswith("begin")
    assert text.endswith("end")
