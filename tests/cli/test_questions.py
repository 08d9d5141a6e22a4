"""Each command of docs/questions.md prints the lines that the page shows."""

import re
import shlex
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "questions.md").read_text()
QUESTIONS = re.findall(
    r"^## (.*?)\n.*?```console\nrelibra (.*?)\n```\n\n```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(program, "questions.md", "exec"), {})
    return folder


@pytest.mark.parametrize(("command", "lines"), [pytest.param(*rest, id=title) for title, *rest in QUESTIONS])
def test_a_question_is_answered_by_what_its_command_prints(run, folder, monkeypatch, command, lines):
    monkeypatch.chdir(folder)
    code, out, err = run(*shlex.split(command))
    assert code == 0, err
    printed = [" ".join(line.split()) for line in out.splitlines()]
    for line in lines.splitlines():  # a narrow terminal leaves out the last columns of a table
        assert any(one.startswith(" ".join(line.split())) for one in printed), out


def test_every_question_has_a_command():
    assert len(QUESTIONS) == PAGE.count("\n## ") == 5
