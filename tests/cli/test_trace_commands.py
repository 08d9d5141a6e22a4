import json
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from typer.main import get_command

from relibra import Demand, read_trace, write_trace
from relibra.cli.main import app
from relibra.routing.statistics import rank_skew
from relibra.routing.synthetic import TraceShape, domain_trace
from tests.routing.traces import balanced_trace


@pytest.fixture
def skewed(tmp_path):
    shape = TraceShape(rows_per_sample=[100] * 40, num_layers=2, num_experts=32, top_k=4)
    write_trace(domain_trace(shape, np.random.default_rng(0), sigma=1.2), tmp_path / "t", shard_rows=1500)
    return tmp_path / "t"


def test_help_reads_well(run):
    code, out, _ = run("--help")
    assert code == 0
    for word in ("train", "trace", "report", "Exit codes"):
        assert word in out


def options_of(command, words=()):
    """Yield the words of each command under this one, with its options."""
    for name, under in getattr(command, "commands", {}).items():
        yield from options_of(under, (*words, name))
    if words and words != ("bench",):  # which passes its words on
        yield words, [part for part in command.params if not getattr(part, "hidden", False)]


def test_every_option_has_a_help_text():
    assert not [(words, part.name) for words, shown in options_of(get_command(app)) for part in shown if not part.help]


def test_names_of_options_are_whole_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    seen = 0
    for words, shown in options_of(get_command(app)):
        names = [option for part in shown for option in (*part.opts, *part.secondary_opts)]
        code, out, _ = run(*words, "--help")
        assert code == 0
        assert not shown or any(line.startswith("  Example: relibra ") for line in out.splitlines()), words
        listed = {word.rstrip(",") for word in out.split()}
        assert {name for name in names if name.startswith("--")} <= listed, words
        seen += "--ranks-per-node" in names
    assert seen == 4, "plan, compare, simulate, sweep"


def test_version(run):
    assert run("--version")[1].startswith("relibra 0.")


def test_inspect(run, skewed):
    code, out, _ = run("trace", "inspect", skewed)
    assert code == 0
    assert "4,000" in out
    assert "0-1" in out
    facts = json.loads(run("trace", "inspect", skewed, "--json")[1])
    assert (facts["rows"], facts["experts"], facts["layer_ids"], facts["shards"]) == (4000, 32, [0, 1], 3)


def test_validate(run, skewed):
    assert run("trace", "validate", skewed)[0] == 0
    facts = {"valid": True, "samples": 40, "rows": 4000, "rows_without_route": 0}
    assert json.loads(run("trace", "validate", skewed, "--json")[1]) == facts


def test_stats(run, skewed):
    code, out, _ = run("trace", "stats", skewed, "--ranks", "4,8", "--rows-per-micro-batch", "500")
    assert code == 0
    assert "micro batch tokens  500" in out
    result = json.loads(run("trace", "stats", skewed, "--ranks", "4,8", "--rows-per-micro-batch", "4000", "--json")[1])
    assert [row["ranks"] for row in result["layouts"]] == [4, 8]
    load_LE = Demand.from_trace(read_trace(skewed)).counts_SLE.sum(axis=0)
    assert result["layouts"][1]["skew_mean"] == pytest.approx(rank_skew(load_LE, 8).mean())


def test_stats_show_rows_never_without_loads(run, skewed):
    code, out, _ = run("trace", "stats", skewed, "--ranks", "4,8", "--rows-per-micro-batch", "500", "--json")
    assert code == 0
    rows = json.loads(out)["homes"]
    names = ["by number", "balance only", "picked together"]
    assert [(row["ranks"], row["homes"]) for row in rows] == [(ranks, name) for ranks in (4, 8) for name in names]
    for row in rows:
        assert 1 <= row["rows_per_token"] <= 4
        assert 1 <= row["busiest_rank"] <= row["busiest_in_micro_batch"]
    for number, _, together in (rows[:3], rows[3:]):
        assert together["rows_per_token"] < number["rows_per_token"]


def test_stats_of_one_sample_compare_no_homes(run, tmp_path):
    assert json.loads(run("trace", "stats", _write_even(tmp_path / "t", 8), "--json")[1])["homes"] == []


def _write_even(folder, num_experts, **changes):
    shape = TraceShape(rows_per_sample=[64], num_layers=1, num_experts=num_experts, top_k=1)
    write_trace(replace(balanced_trace(shape), **changes), folder)
    return folder


@pytest.mark.parametrize(
    ("num_experts", "shown", "said"),
    [
        (32, [8, 16, 32], ""),
        (16, [8, 16], "not possible with 16 experts: 32 ranks; choose with --ranks"),
        (8, [8], "not possible with 8 experts: 16, 32 ranks; choose with --ranks"),
        (4, [2, 4], "not possible with 4 experts: 8, 16, 32 ranks; shown instead: 2, 4; choose with --ranks"),
        (7, [7], "not possible with 7 experts: 8, 16, 32 ranks; shown instead: 7; choose with --ranks"),
    ],
)
def test_default_ranks_fit_every_model(run, tmp_path, num_experts, shown, said):
    trace = _write_even(tmp_path / "t", num_experts)
    code, out, err = run("trace", "stats", trace, "--json")
    assert code == 0
    assert [row["ranks"] for row in json.loads(out)["layouts"]] == shown
    assert err.strip() == said


def test_stats_of_a_trace_without_a_token_are_refused(run, tmp_path):
    trace = _write_even(tmp_path / "t", 8, valid_T=np.zeros(64, dtype=bool))
    for command in (("trace", "stats"), ("report",)):
        code, out, err = run(*command, trace)
        assert (code, out) == (1, "")
        assert err.splitlines()[-1].startswith("error: no token was routed")


def test_validate_tells_machines_too_that_a_trace_is_bad(run, skewed, tmp_path):
    shard = min(skewed.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for path, words in ((skewed, "shard "), (tmp_path / "nowhere", "does not exist")):
        code, out, _ = run("trace", "validate", path, "--json")
        answer = json.loads(out)
        assert (code, answer["valid"]) == (1, False)
        assert words in answer["error"]


@pytest.mark.parametrize("verb", ["inspect", "validate", "stats"])
def test_another_number_of_experts_than_recorded_is_refused(run, skewed, verb):
    assert run("trace", verb, skewed, "--num-experts", "32")[0] == 0
    code, _, err = run("trace", verb, skewed, "--num-experts", "64")
    assert code == 1
    assert "was recorded with 32 experts: leave out --num-experts 64" in err


@pytest.mark.parametrize("verb", ["validate", "stats"])
def test_ctrl_c_is_said_and_has_a_code_of_its_own(run, skewed, monkeypatch, verb):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("relibra.routing.readers.iterate_routes", stopped)
    code, out, err = run("trace", verb, skewed)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "stopped"


@pytest.mark.parametrize("arguments", [["trace", "inspect", "x" * 300], ["report", "x" * 300]])
def test_what_the_file_system_refuses_gets_a_sentence(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: xxx")
    assert err.endswith("File name too long\n")


def test_control_characters_in_names_are_shown_and_not_obeyed(run, tmp_path):
    trace = _write_even(tmp_path / "t", 8, source="a\x1b[2J\ud800", group_names=("b\x1b[31m",))
    code, out, _ = run("trace", "inspect", trace)
    assert code == 0
    assert "\x1b" not in out
    assert "a\\x1b[2J\\ud800" in out
    assert "b\\x1b[31m" in out
    _, _, err = run("trace", "stats", trace, "--group", "c")
    assert "\x1b" not in err
    _, _, err = run("trace", "validate", tmp_path / "[/bold]\x1b[31m")
    assert "\x1b" not in err
    assert "does not exist" in err


def test_stats_of_a_group(run, tmp_path):
    shape = TraceShape(rows_per_sample=[10] * 20, num_layers=1, num_experts=8, top_k=2)
    trace = replace(domain_trace(shape, np.random.default_rng(0), num_domains=2), group_names=("law", "chat"))
    write_trace(trace, tmp_path / "t", shard_rows=30)
    rows = [
        json.loads(run("trace", "stats", tmp_path / "t", "--ranks", "2", "--group", name, "--json")[1])["rows"]
        for name in trace.group_names
    ]
    assert rows == [10 * int((trace.group_ids == group).sum()) for group in (0, 1)]
    code, _, err = run("trace", "stats", tmp_path / "t", "--group", "poems")
    assert code == 1
    assert "has no group 'poems'" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["trace", "stats", "TRACE", "--ranks", "5"], 1, "32 experts cannot be divided evenly among 5 ranks"),
        (["trace", "stats", "TRACE", "--ranks", "a"], 2, "not a list of numbers of ranks"),
        (["trace", "stats", "TRACE", "--ranks", "0"], 2, "not a list of numbers of ranks"),
        (["trace", "stats", "TRACE", "--ranks", "²"], 2, "not a list of numbers of ranks"),
        (["trace", "stats", "TRACE", "--ranks", "9" * 5000], 2, "not a list of numbers of ranks"),
        (["trace", "stats", "TRACE", "--ranks", "8,"], 2, "not a list of numbers of ranks"),
        (["trace", "stats", "TRACE", "--rows-per-micro-batch", "0"], 2, "--rows-per-micro-batch"),
        (["trace", "stats", "TRACE", "--rows-per-micro-batch", "9" * 30], 2, "--rows-per-micro-batch"),
        (["trace", "stats", "nowhere"], 1, "nowhere does not exist"),
        (["trace", "validate", "."], 1, "not a finished trace"),
        (["report", "nowhere"], 1, "nowhere does not exist"),
        (["train", "nowhere.toml"], 1, "nowhere.toml cannot be read"),
        (["train", "run.stepz=1"], 1, "run.stepz is not a setting"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_mistakes_get_a_sentence_and_a_code(run, skewed, arguments, code, message):
    got, out, err = run(*[skewed if word == "TRACE" else word for word in arguments])
    assert got == code
    assert message in " ".join(err.replace("│", " ").split())
    assert out == ""
    assert "Traceback" not in err


def test_the_resolved_configuration_can_be_printed(run):
    code, out, _ = run("train", "--show-config", "--json", "run.steps=3")
    assert code == 0
    assert json.loads(out)["run"]["steps"] == 3
    code, out, _ = run("train", "--show-config", "run.steps=3")
    assert code == 0
    assert re.search(r"^# .*\nmax_response = \d+$", out, flags=re.MULTILINE), "a setting with its comment"
    from relibra.rl.config.run_config import RunConfig

    assert RunConfig.model_validate(tomllib.loads(out)).run.steps == 3


def test_assumed_experts_and_missing_lengths_are_told(run, tmp_path):
    ids = np.random.default_rng(0).random((40, 2, 12)).argsort(-1)[..., :2]
    np.savez(tmp_path / "x.npz", ids=ids, seqlen=[10] * 4)
    np.save(tmp_path / "x.npy", ids)
    assert "--num-experts" in run("trace", "inspect", tmp_path / "x.npz")[2]
    assert json.loads(run("trace", "inspect", tmp_path / "x.npz", "--json")[1])["experts_assumed"] is True
    assert "--num-experts" not in run("trace", "inspect", tmp_path / "x.npz", "--num-experts", "12")[2]
    assert "save an .npz with seqlen" in run("trace", "inspect", tmp_path / "x.npy")[2]
    assert json.loads(run("trace", "validate", tmp_path / "x.npy", "--json")[1])["samples"] == 1
    cut = ("plan", tmp_path / "x.npz", "--ranks", "2", "--ranks-per-node", "2", "--slots", "0", "-o", tmp_path / "p")
    assert json.loads(run(*cut, "--json")[1])["experts_assumed"]
    assert not json.loads(run(*cut, "--num-experts", "12", "--json")[1])["experts_assumed"]
