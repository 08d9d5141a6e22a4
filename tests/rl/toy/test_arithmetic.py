"""The arithmetic task: what it asks, what it pays for, what its teacher writes."""

import numpy as np
import pytest

from relibra.rl.tasks.task import Demonstrating, Task
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import STOP, Arithmetic, problem, write_chain

TASK = Arithmetic(seed=0, max_terms=12, continue_probability=0.72)
TOKENIZER = CharacterTokenizer(TASK.characters)
PROMPT = problem([7, 5, 8])


def test_it_is_a_task_that_demonstrates():
    assert isinstance(TASK, Task)
    assert isinstance(TASK, Demonstrating)
    assert TASK.characters[-1] == STOP


def test_sampled_padding_earns_nothing():
    """The padding id is part of the vocabulary, so a policy may sample it: it must not vanish from what is judged."""
    right = TOKENIZER.encode_response("7+5=2,2+8=0")
    assert TASK.reward(PROMPT, TOKENIZER.decode(right), stopped=True) == 1.0
    padded = [*right[:-1], TOKENIZER.pad_id, right[-1]]
    assert TASK.reward(PROMPT, TOKENIZER.decode(padded), stopped=True) == 0.0


def test_faultless_demonstrations_are_right_and_can_be_encoded():
    rng = np.random.default_rng(0)
    for number in range(200):
        prompt = TASK.prompt(number)
        answer = TASK.demonstrate(prompt, rng, error_rate=0.0)
        assert TASK.reward(prompt, answer, stopped=True) == 1.0
        assert TOKENIZER.decode(TOKENIZER.encode(prompt.text + answer)) == prompt.text + answer


def test_errors_at_every_link_leave_one_answer_in_ten_right():
    rng = np.random.default_rng(0)
    rewards = [TASK.reward(PROMPT, write_chain((7, 5, 8), rng, error_rate=1.0), stopped=True) for _ in range(2000)]
    assert np.mean(rewards) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize(
    "response", ["7+5=2,2+8=1", "7+5=2,2+8=0.", "7+5=2,2+8=", "", "0", "=", "7+5=2,2+8=10"], ids=repr
)
def test_wrong_responses_earn_nothing(response):
    assert TASK.reward(PROMPT, response, stopped=True) == 0.0


def test_a_right_response_that_was_cut_earns_nothing():
    assert TASK.reward(PROMPT, "7+5=2,2+8=0", stopped=True) == 1.0
    assert TASK.reward(PROMPT, "7+5=2,2+8=0", stopped=False) == 0.0


def test_prompts_follow_from_seed_and_number_alone():
    again = Arithmetic(seed=0, max_terms=12, continue_probability=0.72)
    numbers = [5, 0, 1 << 40, 5]
    assert [again.prompt(number) for number in numbers] == [TASK.prompt(number) for number in numbers]
    other = Arithmetic(seed=1, max_terms=12, continue_probability=0.72)
    assert sum(other.prompt(number) == TASK.prompt(number) for number in range(100)) < 10


def test_evaluation_prompts_are_the_same_for_any_seed_and_number():
    held = TASK.evaluation_prompts(50)
    assert held[:20] == Arithmetic(seed=9, max_terms=12, continue_probability=0.72).evaluation_prompts(20)
    assert sum(prompt == TASK.prompt(number) for number, prompt in enumerate(held)) < 5


@pytest.mark.parametrize("exponent", [0.8, 1.2, 2.0])
def test_a_tail_exponent_makes_the_tail_a_power_law(exponent):
    task = Arithmetic(seed=0, max_terms=64, continue_probability=0.72, tail_exponent=exponent)
    lengths = np.array([len(task.prompt(number).row["terms"]) for number in range(4000)], dtype=float)
    assert lengths.min() == 2
    assert lengths.max() <= 64
    for terms in (2, 4, 8, 32):
        assert np.mean(lengths > terms) == pytest.approx((2 / (terms + 1)) ** exponent, abs=0.03)


@pytest.mark.parametrize("exponent", [5e-324, 1e-300, 0.001, 0.01, 0.05])
def test_however_heavy_the_tail_lengths_stay_within_the_longest(exponent):
    task = Arithmetic(seed=0, max_terms=64, continue_probability=0.72, tail_exponent=exponent)
    lengths = [len(task.prompt(number).row["terms"]) for number in range(2000)]
    assert np.mean(np.array(lengths) == 64) == pytest.approx((2 / 64) ** exponent, abs=0.04)
    assert max(lengths) == 64


def test_lengths_have_a_long_tail():
    lengths = np.array([len(TASK.prompt(number).row["terms"]) for number in range(4000)], dtype=float)
    assert lengths.min() == 2
    assert lengths.max() == 12
    for terms in range(2, 8):
        assert np.mean(lengths > terms) == pytest.approx(0.72 ** (terms - 1), abs=0.03)
    assert np.percentile(lengths, 95) > 2 * np.median(lengths)
