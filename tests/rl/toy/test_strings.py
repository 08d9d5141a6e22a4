"""The strings task: what it asks, what it pays for, what its teacher writes."""

import numpy as np
import pytest

from relibra.rl.tasks.task import Demonstrating, Task
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import STOP, Strings


def strings(seed=0):
    return Strings(seed=seed, max_letters=12, continue_probability=0.72)


def test_it_is_a_task_that_demonstrates():
    assert isinstance(strings(), Task)
    assert isinstance(strings(), Demonstrating)
    assert strings().characters[-1] == STOP


def test_demonstrations_without_errors_are_right():
    task, rng = strings(), np.random.default_rng(0)
    tokenizer = CharacterTokenizer(task.characters)
    for number in range(200):
        prompt = task.prompt(number)
        answer = task.demonstrate(prompt, rng, error_rate=0.0)
        assert prompt.text == answer[::-1] + "="
        assert task.reward(prompt, answer, stopped=True) == 1.0
        assert task.reward(prompt, answer, stopped=False) == 0.0
        assert tokenizer.decode(tokenizer.encode(prompt.text + answer)) == prompt.text + answer


def test_every_letter_counts():
    task = strings()
    prompt = task.prompt(0)
    right = task.demonstrate(prompt, np.random.default_rng(0), error_rate=0.0)
    for place in range(len(right)):
        other = "a" if right[place] != "a" else "b"
        assert task.reward(prompt, right[:place] + other + right[place + 1 :], stopped=True) == 0.0
    for wrong in ("", right[:-1], right + right[-1]):
        assert task.reward(prompt, wrong, stopped=True) == 0.0


def test_the_share_of_wrong_letters_is_the_error_rate():
    task, rng = strings(), np.random.default_rng(0)
    wrong = letters = 0
    for number in range(1000):
        prompt = task.prompt(number)
        right, written = (task.demonstrate(prompt, rng, error_rate=rate) for rate in (0.0, 0.3))
        assert len(right) == len(written)
        wrong += sum(a != b for a, b in zip(right, written, strict=True))
        letters += len(right)
    assert wrong / letters == pytest.approx(0.3, abs=0.03)


def test_responses_grow_with_the_word_and_have_a_long_tail():
    task, rng = strings(), np.random.default_rng(0)
    prompts = [task.prompt(number) for number in range(4000)]
    lengths = np.array([len(task.demonstrate(prompt, rng, error_rate=0.0)) for prompt in prompts], dtype=float)
    words = np.array([len(prompt.row["word"]) for prompt in prompts], dtype=float)
    assert np.corrcoef(lengths, words)[0, 1] > 0.95
    assert (words.min(), words.max()) == (2, 12)
    for letters in range(2, 8):
        assert np.mean(words > letters) == pytest.approx(0.72 ** (letters - 1), abs=0.03)
    assert np.percentile(lengths, 95) > 2 * np.median(lengths)


def test_prompts_follow_from_seed_and_number_unless_held_out():
    assert strings().prompt(7) == strings().prompt(7)
    assert strings(seed=1).prompt(7) != strings().prompt(7)
    assert strings(seed=1).evaluation_prompts(9) == strings().evaluation_prompts(20)[:9]
