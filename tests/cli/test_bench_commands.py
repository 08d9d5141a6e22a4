"""`relibra bench`: programs of the checkout by name, and no such verb in an installed package."""

import subprocess
import sys

import pytest

import relibra
from benchmarks import programs
from relibra.cli import bench


@pytest.fixture
def started(monkeypatch):
    """Take the commands instead of starting them; each ends with code 3."""
    commands = []

    def fake(command, check):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", fake)
    return commands


def benchmarks(*arguments):
    command = [sys.executable, str(bench.BENCHMARKS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "a.json", "b.json", "--tolerance", "0.5"],
        ["planner", "--help"],
        [],
    ],
)
def test_arguments_reach_the_programs_of_the_checkout(run, started, arguments):
    assert run("bench", *arguments)[0] == 3
    assert started == [[sys.executable, str(bench.BENCHMARKS), *arguments]]


def test_the_list_has_every_program_with_its_minutes():
    lines = {line.split()[0]: line.split() for line in benchmarks().stdout.splitlines()}
    assert lines.keys() - {"relibra"} == programs.BY_NAME.keys()
    assert [float(lines[program.name][1]) for program in programs.PROGRAMS] == [p.minutes for p in programs.PROGRAMS]
    assert benchmarks("list").stdout == benchmarks().stdout


def test_an_unknown_program_gets_the_names():
    done = benchmarks("magic")
    assert done.returncode == 2
    assert "'magic'" in done.stderr
    assert "planner" in done.stderr


@pytest.mark.parametrize("name", ["routing", "rerun", "compare", "all", "render"])
def test_programs_say_what_they_take(name):
    done = benchmarks(name, "--help")
    assert done.returncode == 0
    assert f"relibra bench {name}" in done.stdout


def test_errors_of_programs_are_one_line():
    done = benchmarks("rerun", "nothing")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_an_installed_package_has_no_such_verb(tmp_path):
    """Import the package from a place without benchmarks beside it, as from site-packages."""
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    package = tmp_path / "lib" / "site-packages" / "relibra"
    package.symlink_to(relibra.__path__[0], target_is_directory=True)
    program = f"import sys; sys.path.insert(0, {str(package.parent)!r}); from relibra.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert " train " in done.stdout
    assert " bench " not in done.stdout
