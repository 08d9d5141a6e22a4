"""Prompts of your own: order, held-out rows, and what is said of rows that cannot be used."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import ConfigError
from relibra.rl.config.settings import TaskSettings
from relibra.rl.tasks.make import make_task
from relibra.rl.tasks.prompts import check_same_rows, rows_state
from relibra.rl.tasks.task import Demonstrating, Task


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(count):
    return [{"prompt": f"question {i}", "answer": i} for i in range(count)]


def make(path, *, seed=0, evaluation_prompts=0, **settings):
    settings = {"reward": "exact", **settings}
    return make_task(TaskSettings(name="prompts", file=path, **settings), seed, evaluation_prompts)


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_task_of_prompts_needs_a_model_and_demonstrates_nothing(tmp_path):
    task = make(write(tmp_path / "rows.jsonl", numbered(3)))
    assert isinstance(task, Task)
    assert not isinstance(task, Demonstrating)
    assert task.characters is None


@given(rows=st.integers(1, 30), asked=st.integers(0, 40), seed=st.integers(0, 3))
def test_epoch_has_each_training_row_once_and_no_held_out_row(tmp_path_factory, rows, asked, seed):
    path = write(tmp_path_factory.mktemp("p") / "rows.jsonl", numbered(rows))
    if asked and rows == 1:
        with pytest.raises(ConfigError, match=r"holds one row, .*set task\.evaluation_file, or evaluation\.every=0"):
            make(path, seed=seed, evaluation_prompts=asked)
        return
    task = make(path, seed=seed, evaluation_prompts=asked)
    held = texts(task.evaluation_prompts(asked))
    assert len(held) == min(asked, rows // 2)
    training = [f"question {i}" for i in range(rows - len(held))]
    assert held == [f"question {i}" for i in range(rows - len(held), rows)]
    for epoch in range(3):
        numbers = range(epoch * len(training), (epoch + 1) * len(training))
        assert sorted(texts(map(task.prompt, numbers))) == sorted(training)


def test_the_order_follows_from_seed_and_epoch(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(50))
    first, again, other = make(path), make(path), make(path, seed=1)
    epochs = [texts(map(first.prompt, range(start, start + 50))) for start in (0, 50)]
    assert epochs[0] == texts(map(again.prompt, range(50)))
    assert epochs[0] != epochs[1]
    assert epochs[0] != texts(map(other.prompt, range(50)))


def test_other_rows_than_those_of_the_checkpoint_are_refused(tmp_path):
    rows = numbered(9)
    path = write(tmp_path / "rows.jsonl", rows)
    state = rows_state(make(path))
    path.write_text("\n" + path.read_text().replace("\n", "\r\n"))
    check_same_rows(make(path), state)
    check_same_rows(make(path), {})
    check_same_rows(make_task(TaskSettings(), 0, 0), state)
    for other in (rows[::-1], rows[:-1], [*rows, rows[0]], [*rows[:-1], {**rows[-1], "answer": 7}]):
        with pytest.raises(ConfigError, match=rf"^task\.file '{path}' holds other rows, .*: put the old file back, or"):
            check_same_rows(make(write(path, other)), state)


def test_a_file_for_evaluation_leaves_all_rows_to_training(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(4))
    held = write(tmp_path / "held.jsonl", [{"prompt": f"held {i}", "answer": "x"} for i in range(3)])
    task = make(path, evaluation_prompts=2, evaluation_file=held)
    assert texts(task.evaluation_prompts(2)) == ["held 0", "held 1"]
    assert texts(task.evaluation_prompts(9)) == ["held 0", "held 1", "held 2"]
    assert {task.prompt(number).text for number in range(4)} == {f"question {i}" for i in range(4)}
    assert task.evaluation_prompts(1)[0].origin == f"{held}, line 1"


def test_equal_rows_are_fine(tmp_path):
    task = make(write(tmp_path / "rows.jsonl", numbered(1) * 4), evaluation_prompts=1)
    assert {task.prompt(number).text for number in range(9)} == {"question 0"}


def test_chat_messages_come_through_and_the_reward_sees_the_row(tmp_path):
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+1?"}]
    task = make(
        write(tmp_path / "rows.jsonl", [{"q": messages, "a": 2, "level": 3}]), prompt_column="q", answer_column="a"
    )
    prompt = task.prompt(0)
    assert prompt.text == messages
    assert prompt.row == {"q": messages, "a": 2, "level": 3}
    assert task.reward(prompt, " 2\n", stopped=True) == 1.0
    assert task.reward(prompt, "3", stopped=True) == 0.0


def test_a_last_message_of_the_assistant_needs_to_be_continued(tmp_path):
    begun = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
    path = write(tmp_path / "rows.jsonl", [*numbered(1), {"prompt": begun, "answer": 2}])
    with pytest.raises(ConfigError, match=rf"^{path}, line 2: .*ends with .*'It is': set task.continue_final_message="):
        make(path)
    task = make(path, continue_final_message=True)
    assert begun in [task.prompt(number).text for number in range(2)]
    begun[-1]["content"] = ""
    with pytest.raises(ConfigError, match="it is not empty"):
        make(write(path, [{"prompt": begun, "answer": 2}]), continue_final_message=True)


def test_messages_that_are_stored_as_json_text_are_messages(tmp_path):
    messages = [{"role": "user", "content": "1+1?"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": f" {json.dumps(messages, indent=1)}", "answer": 2}])
    assert make(path).prompt(0).text == messages
    assert isinstance(make(path, prompt_format="text").prompt(0).text, str)
    for text in ("[1, 2] sorted?", '[{"a": 1}] as a table?', '{"role": "user"}', "[{ role and content"):
        assert make(write(path, [{"prompt": text, "answer": 2}])).prompt(0).text == text
    for text in (str(messages), '[{"role": "user", "content": "1+'):
        with pytest.raises(ConfigError, match=r"line 1: column 'prompt' holds .*, which is no JSON"):
            make(write(path, [{"prompt": text, "answer": 2}]))


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("stored", [lambda value: value, json.dumps])
def test_tools_and_variables_of_a_row_go_to_the_template(tmp_path, stored):
    row = {"prompt": "x", "answer": 1, "tools": stored([TOOL]), "chat_template_kwargs": stored({"short": True})}
    empty = {"prompt": "y", "answer": 1, "tools": stored([]), "chat_template_kwargs": None}
    task = make(write(tmp_path / "rows.jsonl", [row, empty]))
    given = {prompt.text: prompt.template for prompt in map(task.prompt, range(2))}
    assert given == {"x": {"tools": [TOOL], "short": True}, "y": {}}
    for column, value in (("tools", TOOL), ("tools", ["add"]), ("chat_template_kwargs", [1]), ("tools", "add")):
        with pytest.raises(ConfigError, match=f"line 1: column '{column}'"):
            make(write(tmp_path / "bad.jsonl", [{"prompt": "x", "answer": 1, column: stored(value)}]))


def test_columns_that_no_setting_reads_are_known(tmp_path):
    path = write(
        tmp_path / "rows.jsonl", [{"prompt": "x", "answer": 1, "level": 2}, {"prompt": "x", "answer": 1, "tool": 3}]
    )
    held = write(tmp_path / "held.jsonl", [{"prompt": "x", "answer": 1, "tools": [TOOL], "level": 2, "source": 1}])
    assert make(path).other_columns == ("level", "tool")
    assert make(path, evaluation_file=held).other_columns == ("level", "tool", "source")
    assert make(path, reward="math:fmod").other_columns == ("answer", "level", "tool")


def test_fields_that_parquet_adds_to_tools_are_left_out(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Parquet files are not tested")
    from pyarrow import parquet

    tools = [{"name": "a", "strict": True}, {"name": "b"}]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([{"prompt": "x", "answer": "1", "tools": tools}]), path)
    assert make(path).prompt(0).template == {"tools": tools}


def test_parquet_leaves_absent_fields_of_messages_open(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Parquet files are not tested")
    from pyarrow import parquet

    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "n"}], "answer": "x"},
        {"prompt": [{"role": "user", "content": "b"}], "answer": "y"},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    task = make(path)
    assert sorted((task.prompt(number).text for number in range(2)), key=str) == sorted(
        (row["prompt"] for row in rows), key=str
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"question": "x", "answer": 1},
            r"no column 'prompt'; its columns are 'question', 'answer': set task\.prompt_c",
        ),
        (
            {"prompt": 7, "answer": 1},
            r"column 'prompt' is 7; a prompt is a text, or a list of chat messages, not empty",
        ),
        ({"prompt": "", "answer": 1}, r"column 'prompt' is ''; a prompt is a text"),
        ({"prompt": [], "answer": 1}, r"column 'prompt' is \[\]; a prompt is a text"),
        ({"prompt": None, "answer": 1}, r"column 'prompt' is None; a prompt is a text"),
        ({"prompt": ["x"], "answer": 1}, r"has the message 'x'; a chat message is an object of texts"),
        ({"prompt": [{"role": "user"}], "answer": 1}, r"has the message \{'role': 'user'\}; a chat message"),
        ({"prompt": [{"role": "user", "content": ["x"]}], "answer": 1}, r"a chat message is an object of texts"),
        ({"prompt": "x"}, r"no column 'answer'; its columns are 'prompt': set task\.answer_column, or a task\.reward"),
        (
            {"prompt": "x", "answer": None},
            r"column 'answer' is None; a right answer is a text or number, not empty, and finite",
        ),
        ({"prompt": "x", "answer": " "}, r"column 'answer' is ' '; a right answer"),
        ({"prompt": "x", "answer": float("nan")}, r"column 'answer' is nan; a right answer"),
        ({"prompt": "x", "answer": float("-inf")}, r"column 'answer' is -inf; a right answer"),
        ({"prompt": "x", "answer": True}, r"column 'answer' is True; a right answer"),
    ],
)
def test_unusable_row_stops_the_run_before_it_starts(tmp_path, row, says):
    path = write(tmp_path / "rows.jsonl", [*numbered(2), row])
    with pytest.raises(ConfigError, match=rf"^{path}, line 3: .*{says}"):
        make(path)
    with pytest.raises(ConfigError, match=rf"^{path}, line 3: "):
        make(write(tmp_path / "good.jsonl", numbered(2)), evaluation_file=path)
