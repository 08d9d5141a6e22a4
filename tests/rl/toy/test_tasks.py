"""The built-in tasks: what they ask, what they pay for, what their teachers write."""

import numpy as np
import pytest

from relibra.rl.tasks.task import Demonstrating, Task
from relibra.rl.toy.character_tokenizer import CharacterTokenizer
from relibra.rl.toy.tasks import STOP, Arithmetic, Strings, problem

PROMPT, RIGHT = problem([7, 5, 8]), "7+5=2,2+8=0"


def arithmetic(seed=0):
    return Arithmetic(seed=seed, max_terms=12, continue_probability=0.72)


def strings(seed=0):
    return Strings(seed=seed, max_letters=12, continue_probability=0.72)


both = pytest.mark.parametrize("make", [arithmetic, strings])


@both
def test_demonstrations_without_errors_are_right(make):
    task, rng = make(), np.random.default_rng(0)
    assert isinstance(task, Task)
    assert isinstance(task, Demonstrating)
    assert task.characters[-1] == STOP
    tokenizer = CharacterTokenizer(task.characters)
    for number in range(200):
        prompt = task.prompt(number)
        answer = task.demonstrate(prompt, rng, error_rate=0.0)
        assert task.reward(prompt, answer, stopped=True) == 1.0
        assert task.reward(prompt, answer, stopped=False) == 0.0, "it was cut"
        assert tokenizer.decode(tokenizer.encode(prompt.text + answer)) == prompt.text + answer


@both
def test_prompts_follow_from_seed_and_number_unless_held_out(make):
    numbers = [5, 0, 1 << 40, 5]
    assert [make().prompt(number) for number in numbers] == [make().prompt(number) for number in numbers]
    assert sum(make(seed=1).prompt(number) == make().prompt(number) for number in range(100)) < 10
    held = make().evaluation_prompts(50)
    assert held[:20] == make(seed=9).evaluation_prompts(20)
    assert sum(prompt == make().prompt(number) for number, prompt in enumerate(held)) < 5


@both
def test_lengths_have_a_long_tail(make):
    sizes = [make().prompt(number).row for number in range(4000)]
    lengths = np.array([len(row.get("terms") or row["word"]) for row in sizes], dtype=float)
    assert (lengths.min(), lengths.max()) == (2, 12)
    for shorter in range(2, 8):
        assert np.mean(lengths > shorter) == pytest.approx(0.72 ** (shorter - 1), abs=0.03)
    assert np.percentile(lengths, 95) > 2 * np.median(lengths)


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


def test_sampled_padding_earns_nothing():
    """The padding id is part of the vocabulary, so a policy may sample it: it must not vanish from what is judged."""
    task, tokenizer = arithmetic(), CharacterTokenizer(Arithmetic.characters)
    right = tokenizer.encode_response(RIGHT)
    assert task.reward(PROMPT, tokenizer.decode(right), stopped=True) == 1.0
    padded = [*right[:-1], tokenizer.pad_id, right[-1]]
    assert task.reward(PROMPT, tokenizer.decode(padded), stopped=True) == 0.0


@pytest.mark.parametrize(
    "response", ["7+5=2,2+8=1", "7+5=2,2+8=0.", "7+5=2,2+8=", "", "0", "=", "7+5=2,2+8=10"], ids=repr
)
def test_wrong_sums_earn_nothing(response):
    assert arithmetic().reward(PROMPT, response, stopped=True) == 0.0


def test_every_letter_counts():
    task = strings()
    prompt = task.prompt(0)
    right = task.demonstrate(prompt, np.random.default_rng(0), error_rate=0.0)
    assert prompt.text == right[::-1] + "="
    for place in range(len(right)):
        other = "a" if right[place] != "a" else "b"
        assert task.reward(prompt, right[:place] + other + right[place + 1 :], stopped=True) == 0.0
    for wrong in ("", right[:-1], right + right[-1]):
        assert task.reward(prompt, wrong, stopped=True) == 0.0


def test_the_share_of_errors_is_the_error_rate():
    rng = np.random.default_rng(0)
    chains = [arithmetic().demonstrate(PROMPT, rng, error_rate=1.0) for _ in range(2000)]
    rewards = [arithmetic().reward(PROMPT, chain, stopped=True) for chain in chains]
    assert np.mean(rewards) == pytest.approx(0.1, abs=0.03), "one digit in ten is right by chance"
    pairs = []
    for prompt in map(strings().prompt, range(1000)):
        right, written = (strings().demonstrate(prompt, rng, error_rate=rate) for rate in (0.0, 0.3))
        pairs += zip(right, written, strict=True)
    assert np.mean([a != b for a, b in pairs]) == pytest.approx(0.3, abs=0.03)
