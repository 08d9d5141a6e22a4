"""`relibra bench`: programs of the checkout, started with the options they take."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = {"planner": "planner.py", "runtime": "runtime.py", "ranks": "emulated_ranks.py", "gpu": "gpu.py"}
WITHOUT_DATA = {"rl": "rl.py", "tppo": "tppo.py"}
"""Programs that make up their own routes: no recording is read."""
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def started(monkeypatch):
    """Take the commands instead of starting them; each ends with code 3."""
    commands = []

    def fake(command, check):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", fake)
    return commands


def test_help_names_every_program(run):
    code, out, _ = run("bench", "--help")
    assert code == 0
    assert all(f" {verb} " in out for verb in (*PROGRAMS, *WITHOUT_DATA))
    assert "Measure on this machine" in out


@pytest.mark.parametrize("verb", [*PROGRAMS, *WITHOUT_DATA])
def test_help_has_an_example(run, verb):
    code, out, _ = run("bench", verb, "--help")
    assert code == 0
    assert f"Example: relibra bench {verb} --quick" in " ".join(out.split())


@pytest.mark.parametrize("verb", PROGRAMS)
def test_options_reach_the_program_of_the_checkout(run, started, verb):
    json = [] if verb == "planner" else ["--json"]
    assert run("bench", verb, "--quick", *json, "--data", "d", "--output", "o")[0] == 3
    assert run("bench", verb)[0] == 3
    program = BENCHMARKS / PROGRAMS[verb]
    assert program.exists()
    assert started[0] == [sys.executable, str(program), "--quick", *json, "--data", "d", "--output", "o"]
    assert started[1] == [sys.executable, str(program)]


@pytest.mark.parametrize("verb", PROGRAMS)
def test_programs_take_the_options_that_reach_them(verb):
    text = (BENCHMARKS / PROGRAMS[verb]).read_text()
    for option in ("--quick", "--data", "--output", *["--json"] * (verb != "planner")):
        assert f'add_argument("{option}"' in text


@pytest.mark.parametrize("verb", WITHOUT_DATA)
def test_whole_runs_take_no_recordings(run, started, verb):
    assert run("bench", verb, "--quick", "--json", "--output", "o")[0] == 3
    program = BENCHMARKS / WITHOUT_DATA[verb]
    assert started == [[sys.executable, str(program), "--quick", "--json", "--output", "o"]]
    text = program.read_text()
    assert all(f'add_argument("{option}"' in text for option in ("--quick", "--json", "--output"))
    code, _, err = run("bench", verb, "--data", "d")
    assert (code, len(started)) == (2, 1)
    assert "--data" in err


def test_planner_prints_no_json(run, started):
    code, _, err = run("bench", "planner", "--json")
    assert (code, started) == (2, [])
    assert "--json" in err


def test_without_a_checkout_it_says_so(run, started, monkeypatch, tmp_path):
    monkeypatch.setattr("relibra.__file__", str(tmp_path / "lib" / "relibra" / "__init__.py"))
    code, _, err = run("bench", "runtime")
    assert (code, started) == (1, [])
    assert "run from a checkout" in err
