"""`relibra bench`: programs of the checkout, started with the options they take."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

WITH_DATA = {
    "planner": "planner.py",
    "recordings": "recordings.py",
    "balancers": "balancers.py",
    "papers": "papers.py",
    "ranks": "emulated_ranks.py",
    "runtime": "runtime.py",
    "gpu": "gpu.py",
}
WITHOUT_DATA = {
    "routing": "routing.py",
    "simulation": "simulation.py",
    "validation": "validation.py",
    "streaming": "streaming.py",
    "windows": "rollout_windows.py",
    "toy": "tppo_toy.py",
    "rl": "rl.py",
    "tppo": "tppo.py",
    "demo": "demo.py",
}
"""Programs that make up their own routes: no recording is read."""
PROGRAMS = WITH_DATA | WITHOUT_DATA
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


def test_help_says_every_program_and_its_minutes(run, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    everything = importlib.import_module("all")
    minutes = {f"{name}.py": minutes for name, _, minutes in (*everything.PROGRAMS, *everything.LONG)}
    assert set(minutes) == set(PROGRAMS.values())
    code, out, _ = run("bench", "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    assert "Measure on this machine" in words
    for verb, program in PROGRAMS.items():
        said = re.search(rf" {verb} .*? ([\d.]+) min", words)
        assert said is not None, verb
        assert float(said[1]) == minutes[program], verb
    assert all(f" {verb} " in words for verb in ("all", "compare", "rerun", "render"))


@pytest.mark.parametrize("verb", PROGRAMS)
def test_help_has_an_example(run, verb):
    code, out, _ = run("bench", verb, "--help")
    assert code == 0
    assert f"Example: relibra bench {verb} --quick" in " ".join(out.split())


@pytest.mark.parametrize("verb", PROGRAMS)
def test_options_reach_the_program_of_the_checkout(run, started, verb):
    data = ["--data", "d"] * (verb in WITH_DATA)
    assert run("bench", verb, "--quick", "--json", *data, "--output", "o")[0] == 3
    assert run("bench", verb)[0] == 3
    program = BENCHMARKS / PROGRAMS[verb]
    assert program.exists()
    assert started[0] == [sys.executable, str(program), "--quick", "--json", *data, "--output", "o"]
    assert started[1] == [sys.executable, str(program)]
    if not data:
        code, _, err = run("bench", verb, "--data", "d")
        assert (code, len(started)) == (2, 2)
        assert "--data" in err


@pytest.mark.parametrize("verb", PROGRAMS)
def test_programs_take_the_options_that_reach_them(verb):
    text = (BENCHMARKS / PROGRAMS[verb]).read_text()
    for option in ("--quick", "--json", "--output", *["--data"] * (verb in WITH_DATA)):
        assert f'add_argument("{option}"' in text


def test_sizes_and_seeds_reach_their_programs(run, started):
    run("bench", "streaming", "2.5", "--quick")
    run("bench", "demo", "0", "2", "--json")
    assert [command[2:] for command in started] == [["2.5", "--quick"], ["0", "2", "--json"]]


@pytest.mark.parametrize(
    ("words", "program", "passed"),
    [
        (["compare", "a.json", "b.json"], "compare.py", ["a.json", "b.json"]),
        (
            ["compare", "a", "b", "--tolerance", "0.5", "--json"],
            "compare.py",
            ["a", "b", "--tolerance", "0.5", "--json"],
        ),
        (["rerun", "planner"], "rerun.py", ["planner"]),
        (
            ["rerun", "rl", "--row", "2", "--data", "d", "--json"],
            "rerun.py",
            ["rl", "--row", "2", "--json", "--data", "d"],
        ),
        (["render", "--check", "--json"], "render.py", ["--check", "--json"]),
        (["all", "--long", "--json"], "all.py", ["--long", "--json"]),
    ],
)
def test_verbs_on_results_start_their_programs(run, started, words, program, passed):
    assert run("bench", *words)[0] == 3
    assert started == [[sys.executable, str(BENCHMARKS / program), *passed]]
    text = (BENCHMARKS / program).read_text()
    assert all(f'add_argument("{word}"' in text for word in passed if word.startswith("--"))


def test_without_a_checkout_it_says_so(run, started, monkeypatch, tmp_path):
    monkeypatch.setattr("relibra.__file__", str(tmp_path / "lib" / "relibra" / "__init__.py"))
    code, _, err = run("bench", "runtime")
    assert (code, started) == (1, [])
    assert "run from a checkout" in err
