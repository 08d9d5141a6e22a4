"""Prompts that are too long are left out with a count, on all ranks alike."""

import json
import logging

import pytest

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.rollout.prompt_lengths import encode_held_out, encode_prompt, fit_prompts
from relibra.rl.tasks.make import make_task
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import Arithmetic

pytestmark = pytest.mark.usefixtures("group")

TOKENIZER = CharacterTokenizer(Arithmetic.characters)
LENGTHS = (2, 9, 4, 8, 3)


def settings_of(limit):
    return load_config(None, [f"rollout.max_prompt={limit}"]).rollout


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * n, "answer": "1"}) + "\n" for n in LENGTHS))
    overrides = ("task.name=prompts", f"task.file={file}", "task.reward=exact", "model.path=mine")
    return make_task(load_config(None, overrides).task, 0, 0)


def lengths(task, settings):
    return sorted(len(encode_prompt(number, task, TOKENIZER, settings)) for number in range(task.num_training))


def test_long_prompts_are_left_out_with_a_count(task, caplog):
    settings = settings_of(4)
    with caplog.at_level(logging.WARNING):
        fitting, longest = fit_prompts(task, TOKENIZER, settings)
    assert longest == 4
    assert lengths(fitting, settings) == [2, 3, 4]
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("2 of 5 prompts have more tokens than rollout.max_prompt 4 and are left out")
    assert "rows.jsonl, line 2" in said
    for epoch in range(3):
        texts = sorted(fitting.prompt(3 * epoch + number).text for number in range(3))
        assert texts == ["11", "111", "1111"]


def test_where_all_prompts_are_too_long_none_is_left(task):
    with pytest.raises(ConfigError, match=r"5 of 5 prompts have more tokens .*, and none is left"):
        fit_prompts(task, TOKENIZER, settings_of(1))


def test_prompts_that_fit_stay_and_so_does_a_task_without_a_file(task, caplog):
    assert fit_prompts(task, TOKENIZER, settings_of(10)) == (task, 9)
    arithmetic = make_task(load_config(None, []).task, 0, 0)
    assert fit_prompts(arithmetic, TOKENIZER, settings_of(10)) == (arithmetic, 0)
    assert not caplog.records


def test_held_out_prompts_have_the_same_limit(tmp_path):
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1" * n, "answer": "1"}) + "\n" for n in LENGTHS))
    files = (f"task.file={file}", f"task.evaluation_file={file}")
    task = make_task(load_config(None, ("task.name=prompts", *files, "task.reward=exact", "model.path=m")).task, 0, 5)
    prompts = task.evaluation_prompts(5)
    assert len(prompts) == 5

    def held_out(limit):
        return [len(ids) for _, ids in encode_held_out(task, TOKENIZER, settings_of(limit), 5)]

    given = [len(TOKENIZER.encode(prompt.text)) for prompt in prompts]
    assert held_out(9) == given
    assert held_out(4) == [n for n in given if n <= 4]
    with pytest.raises(ConfigError, match=r"evaluation have more tokens than rollout.max_prompt 1"):
        held_out(1)
