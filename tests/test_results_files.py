"""Result files: refused without an origin, held against each other, measured again, and never written in part."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from relibra import ConfigError, EngineError

ROOT = Path(__file__).parent.parent
ORIGIN = {
    "commit": "0" * 40,
    "dirty": False,
    "machine": "m",
    "versions": {"torch": "2"},
    "command": "python benchmarks/routing.py",
}
ROW = {"case": "x", "label": "measured", "seed": 0, "repetitions": 3, "ranks": 8, "seconds": 2.0, **ORIGIN}


def load(name):
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def results():
    return load("harness.results_files")


def written(path, rows):
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("key", ["commit", "machine", "versions", "seed", "command", "label"])
def test_a_row_that_does_not_say_where_it_comes_from_is_refused(results, tmp_path, key):
    path = written(tmp_path / "a.json", [ROW, {name: value for name, value in ROW.items() if name != key}])
    with pytest.raises(ConfigError, match=rf"a.json, row 1 \(x\) lacks {key}: ") as raised:
        results.read_results(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "no list of result rows"),
        ("[]", "no list of result rows"),
        ("[1]", "no list of result rows"),
        (json.dumps([ROW | {"label": "guessed"}]), "label 'guessed': allowed are measured, model"),
    ],
)
def test_what_is_no_result_file_is_refused(results, tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        results.read_results(tmp_path / "a.json")
    with pytest.raises(ConfigError, match="is not there"):
        results.read_results(tmp_path / "b.json")


def test_committed_results_say_where_they_come_from(results):
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(paths) > 10
    for path in paths:
        rows = results.read_results(path)
        assert results.compare(rows, rows, 0.0) == []


@pytest.mark.parametrize(("after", "differs"), [(2.0, False), (2.19, False), (2.23, True), (1.81, False), (1.79, True)])
def test_a_figure_differs_beyond_the_tolerance_of_the_larger_one(results, after, differs):
    found = results.compare([ROW], [ROW | {"seconds": after}], 0.1)
    assert bool(found) == differs
    if differs:
        [one] = found
        assert (one.row, one.figure, one.before, one.after) == ("x, ranks 8", "seconds", 2.0, after)
        assert one.change == pytest.approx(after / 2 - 1)
        assert str(one).startswith("x, ranks 8: seconds 2 -> ")


def test_rows_are_matched_by_what_identifies_them_in_any_order(results):
    rows = [ROW | {"ranks": ranks, "seconds": float(ranks)} for ranks in (8, 16, 32)]
    assert results.compare(rows, rows[::-1], 0.0) == []
    found = results.compare(rows, [rows[0], rows[1] | {"ranks": 64}], 0.1)
    assert sorted(map(str, found)) == [
        "x, ranks 16: only in the first file",
        "x, ranks 32: only in the first file",
        "x, ranks 64: only in the second file",
    ]


def test_equal_rows_are_matched_in_their_order(results):
    rows = [ROW, ROW | {"seconds": 5.0}]
    assert results.compare(rows, rows, 0.0) == []
    [one] = results.compare(rows, [rows[0], rows[0]], 0.1)
    assert str(one) == "x, ranks 8 (number 2): seconds 5 -> 2 (-60.0%)"


def test_tables_are_compared_but_no_spreads(results):
    row = ROW | {"seconds_per_stage": {"plan": 1.0}, "rewards": [1, 2], "seconds low": 1.0, "ok": True, "note": "a"}
    changed = row | {"seconds_per_stage": {"plan": 2.0}, "rewards": [9], "seconds low": 9.0, "ok": False, "note": "b"}
    assert [one.figure for one in results.compare([row], [changed], 0.1)] == ["seconds_per_stage.plan", "ok"]


def test_missing_figures_and_numbers_that_are_none_differ(results):
    assert [one.figure for one in results.compare([ROW], [ROW | {"more": 1.0}], 0.1)] == ["more"]
    nan = ROW | {"seconds": float("nan")}
    assert results.compare([nan], [nan], 0.1) == []
    assert len(results.compare([nan], [ROW], 0.1)) == len(results.compare([ROW], [nan], 0.1)) == 1
    assert results.compare([ROW | {"seconds": 1e-13}], [ROW | {"seconds": 3e-13}], 0.1) == []


def test_comparing_says_so_by_its_exit_code(monkeypatch, tmp_path, capsys):
    program = load("compare")
    one = written(tmp_path / "a.json", [ROW])
    other = written(tmp_path / "b.json", [ROW | {"seconds": 3.0}])

    def code(*words):
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, words)])
        return program.main()

    assert code(one, one) == 0
    assert capsys.readouterr().out == "nothing differs beyond 10%, 1 rows\n"
    assert code(one, other) == 1
    assert "x, ranks 8: seconds 2 -> 3 (+50.0%)\n1 difference beyond 10%" in capsys.readouterr().out
    assert code(one, other, "--tolerance", "0.5") == 0
    capsys.readouterr()
    assert code(one, other, "--json") == 1
    assert json.loads(capsys.readouterr().out)[0]["change"] == 0.5


def test_files_without_a_common_row_are_no_list_of_differences(results, monkeypatch, tmp_path, capsys):
    program = load("compare")
    one = written(tmp_path / "a.json", [ROW, ROW | {"case": "y"}])
    other = written(tmp_path / "b.json", [ROW | {"case": "z"}])
    for words in ([one, other], [one, other, "--json"]):
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, words)])
        with pytest.raises(
            ConfigError, match=r"a\.json and .*b\.json share no case with the same settings: the first has 2 rows"
        ) as raised:
            program.main()
        assert "such as 'x, ranks 8', the second 1 such as 'z, ranks 8'" in str(raised.value)
        assert "\n" not in str(raised.value)
    assert capsys.readouterr().out == ""
    results.refuse_strangers([ROW, ROW | {"case": "y"}], [ROW | {"case": "y"}], ("a", "b"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python benchmarks/routing.py 3", ["routing", "3"]),
        ("python benchmarks/balancers.py FOLDER", ["balancers"]),
        ("relibra bench streaming 10 --repetitions 3", ["streaming", "10", "--repetitions", "3"]),
        ("make bench-gpu", ["gpu"]),
    ],
)
def test_commands_of_rows_are_run_with_another_place_for_rows(tmp_path, command, words):
    rerun = load("rerun")
    row = ROW | {"command": command}
    program = [sys.executable, str(ROOT / "benchmarks"), *words]
    assert rerun.command_of([row], rerun.DATA, tmp_path) == [*program, "--output", str(tmp_path)]
    assert rerun.command_of([row], Path("d"), tmp_path)[-4:-2] == ["--data", "d"]


def test_every_committed_command_can_be_run_again(results, tmp_path):
    rerun, programs = load("rerun"), load("programs")
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        for row in results.read_results(path):
            assert programs.BY_NAME[rerun.command_of([row], rerun.DATA, tmp_path)[2]].path.exists()


@pytest.mark.parametrize(
    "command",
    [
        "relibra bench nothing",
        "rm -rf build",
        "python -c print(1)",
        "python benchmarks/../setup.py",
        "python",
        "relibra train",
    ],
)
def test_only_benchmarks_are_run_again(tmp_path, command):
    rerun = load("rerun")
    with pytest.raises(ConfigError, match="which is no benchmark"):
        rerun.command_of([ROW | {"command": command}], rerun.DATA, tmp_path)
    with pytest.raises(ConfigError, match="choose a row with --row"):
        rerun.command_of([ROW, ROW | {"command": command}], rerun.DATA, tmp_path)


def test_a_model_measured_again_is_the_same(monkeypatch, capsys):
    program = load("rerun")
    monkeypatch.setattr(sys, "argv", ["rerun.py", "rollout_windows", "--row", "2", "--tolerance", "1e-9"])
    assert program.main() == 0
    assert "1 rows" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="rows 0 to 5"):
        program.rerun("rollout_windows", 6, program.DATA)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run a made-up program as `relibra bench all` does."""
    everything = load("all")
    (tmp_path / "results").mkdir()
    program = [sys.executable, str(tmp_path / "made_up.py")]
    monkeypatch.setattr(everything, "command", lambda _, *arguments: [*program, *arguments])

    def run(text):
        lines = f"import json, pathlib, sys\nROW = {ROW!r}\nfolder = pathlib.Path(sys.argv[-1])\n{text}\n"
        (tmp_path / "made_up.py").write_text(lines)
        return everything.run(everything.Program(name="made_up", minutes=1), Path("data"), tmp_path / "results")

    return run


WRITE = "(folder / 'made_up.json').write_text(json.dumps([ROW]))\n"


def test_rows_of_a_program_that_ends_well_are_taken_over(bench, tmp_path):
    outcome = bench(WRITE)
    assert (outcome.outcome, outcome.files) == ("measured", ("made_up.json",))
    assert json.loads((tmp_path / "results" / "made_up.json").read_text()) == [ROW]


@pytest.mark.parametrize(
    ("text", "outcome", "reason"),
    [
        (WRITE + "sys.exit(3)", "failed", "exit code 3"),
        (WRITE + "(folder / 'b.json').write_text('[{}]')", "failed", "no list of result rows"),
        ("", "failed", "wrote no rows"),
        (WRITE + "print('skipped: half of it, no GPU', file=sys.stderr)", "skipped", "half of it, no GPU; the comm"),
    ],
)
def test_of_a_program_that_fails_or_skips_nothing_is_taken_over(bench, tmp_path, text, outcome, reason):
    (tmp_path / "results" / "made_up.json").write_text("committed")
    found = bench(text)
    assert found.outcome == outcome
    assert reason in found.reason
    assert reason in str(found)
    assert (tmp_path / "results" / "made_up.json").read_text() == "committed"
    assert len(list((tmp_path / "results").iterdir())) == 1


@pytest.mark.parametrize(("outcomes", "code"), [(["measured", "skipped", "kept"], 0), (["failed", "measured"], 1)])
def test_one_failure_stops_no_other_and_sets_the_exit_code(monkeypatch, capsys, outcomes, code):
    everything = load("all")
    made = [everything.Outcome(program=f"p{n}", outcome=what) for n, what in enumerate(outcomes)]
    monkeypatch.setattr(everything, "outcomes", lambda **_: iter(made))
    monkeypatch.setattr(everything.render, "write_pages", lambda: ["page"])
    monkeypatch.setattr(sys, "argv", ["all.py", "--json"])
    assert everything.main() == code
    out, err = capsys.readouterr()
    assert [one["outcome"] for one in json.loads(out)] == outcomes
    assert err.count("\n") == len(outcomes) + 1, "and how far off the simulator is"


def test_what_takes_long_is_kept_and_said_aloud(monkeypatch, tmp_path):
    everything = load("all")
    monkeypatch.setattr(
        everything, "run", lambda program, *_: everything.Outcome(program=program.name, outcome="measured")
    )
    found = list(everything.outcomes(long=False, data=tmp_path, results=tmp_path))
    kept = {one.program: one.reason for one in found if one.outcome == "kept"}
    assert list(kept) == [program.name for program in everything.PROGRAMS if program.long]
    assert kept["runtime"] == "takes about 25 min: make bench-all measures it"
    assert {one.outcome for one in everything.outcomes(long=True, data=tmp_path, results=tmp_path)} == {"measured"}


def test_short_programs_fit_into_a_quarter_of_an_hour():
    everything, render = load("all"), load("render")
    assert sum(program.minutes for program in everything.PROGRAMS if not program.long) <= everything.MOST_MINUTES
    made, tables = set(), {table.partition("/")[0] for table in render.COLUMNS}  # a file may have many tables
    for program in everything.PROGRAMS:
        text = program.path.read_text()
        assert "measurement_options(__doc__" in text
        assert ("data=True" in text) == program.takes_data, program.name
        made |= {found for found in tables if re.search(rf'"{found}"', text)}
    assert made == tables


def test_a_program_without_rows_is_an_error_for_rerun(monkeypatch):
    program = load("rerun")
    monkeypatch.setattr(program, "command_of", lambda *_: [sys.executable, "-c", ""])
    with pytest.raises(EngineError, match="made no rows of rollout_windows"):
        program.rerun("rollout_windows", None, program.DATA)
    monkeypatch.setattr(program, "command_of", lambda *_: [sys.executable, "-c", "raise SystemExit(4)"])
    with pytest.raises(EngineError, match="failed with code 4"):
        program.rerun("rollout_windows", None, program.DATA)


def test_the_error_of_the_simulator_is_always_told(tmp_path):
    everything = load("all")
    told = everything.validation_in_words(everything.RESULTS)
    error = float(re.search(r"by ([0-9.]+)% in the median \(goal: at most 10%\)", told)[1])
    assert 0 < error <= 10
    assert "is not known" in everything.validation_in_words(tmp_path)
