"""What others wrote reaches a terminal with its escape sequences shown, wherever it is printed."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.cli.main import main
from relibra.cli.outputs.terminal import print_note, print_result, print_text
from relibra.files import write_text
from relibra.printable import printable, printable_lines
from relibra.rl.run.display import TrainingDisplay

NASTY = "\x1b[2J\x1b]0;title\x07 \x9b31m \u202e right to left \ud800 half [/bold]"


def assert_harmless(text):
    text.encode()
    assert not any(not c.isprintable() and c != "\n" for c in text), ascii(text)


@given(st.text(st.characters()) | st.text("\x1b[\x9b\ud800\u2028\r\n"))
def test_any_text_becomes_printable(text):
    assert_harmless(printable(text))
    assert "\n" not in printable(text)
    assert printable_lines(text).count("\n") == text.count("\n")
    if text.isprintable():
        assert printable(text) == text


def test_printers_show_escapes(capsys):
    print_note(NASTY)
    print_text(NASTY)
    print_result({"line": NASTY, "table": [{"cell": NASTY}]}, as_json=False)
    captured = capsys.readouterr()
    assert captured.out.count("\\ud800") == 3
    assert captured.err.count("\\x1b[2J") == 1
    assert_harmless(captured.out)
    assert_harmless(captured.err)


def test_an_alarm_with_markup_is_shown_as_it_is(capsys):
    with TrainingDisplay(warmup_steps=0, rl_steps=1, enabled=True) as display:
        names = (
            *("reward", "response_length", "response_length_max", "rank_skew", "k3_kl", "explained_variance"),
            *("loss", "entropy", "equal_groups"),
        )
        metrics = dict.fromkeys(names) | {"step": 0, "seconds": {"x": 1.0}, "alarms": [NASTY], "evaluation": None}
        metrics["tokens"] = 1
        display.rl_step({**metrics, "unfinished_share": 0.0, "response_length": 1.0})
    said = capsys.readouterr().err
    assert "\\x1b[2J" in said
    assert "[/bold]" in said
    assert_harmless(said)


def test_the_error_of_a_command_shows_escapes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["relibra", "explain", str(tmp_path / NASTY.replace("\ud800", ""))])
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert_harmless(said)


def test_an_uncaught_error_shows_escapes():
    program = f"from relibra.printable import *; escape_logs_and_tracebacks(); raise RuntimeError({NASTY!a})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"RuntimeError: \\x1b[2J" in done.stderr
    assert_harmless(done.stderr.decode())


def test_warnings_of_a_process_show_escapes():
    program = (
        "import logging; from relibra.printable import *; escape_logs_and_tracebacks(); "
        f"logging.getLogger('x').warning({NASTY!a})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert_harmless(done.stderr.decode())


def test_a_text_file_may_hold_half_of_a_surrogate_pair(tmp_path):
    write_text(tmp_path / "x", "a\ud800b")
    assert (tmp_path / "x").read_text() == "a\\ud800b"


def test_case_names_of_a_comparison_show_escapes(tmp_path):
    row = {"case": NASTY, "label": "model", "x": 1, **dict.fromkeys(("commit", "machine", "versions"), "")}
    row |= {"seed": 0, "command": ""}
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps([{**row, "x": value}]))
    run = [sys.executable, "benchmarks", "compare", str(tmp_path / "a.json")]
    done = subprocess.run([*run, str(tmp_path / "b.json")], capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    assert b"x 1 -> 2" in done.stdout
    assert_harmless(done.stdout.decode())
    done = subprocess.run([*run, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == f"error: {tmp_path} cannot be read (Is a directory): name a result file\n"
