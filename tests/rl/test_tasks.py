"""The arithmetic task and its tokenizer."""

import numpy as np
import pytest

from relibra.errors import ConfigError
from relibra.rl.tasks.arithmetic import CHARACTERS, STOP, Problem, demonstrate, draw_problem, reward
from relibra.rl.tokenizer import CharacterTokenizer

TOKENIZER = CharacterTokenizer(CHARACTERS, STOP)
PROBLEM = Problem("7+5+8=", (7, 5, 8))


def test_tokenizer_gives_every_character_an_id_of_its_own_and_back():
    ids = TOKENIZER.encode(CHARACTERS)
    assert sorted(ids) == list(range(1, TOKENIZER.vocab_size))
    assert TOKENIZER.decode(ids) == CHARACTERS
    assert TOKENIZER.encode(STOP) == [TOKENIZER.stop_id]
    assert TOKENIZER.pad_id not in ids


def test_tokenizer_names_the_character_it_does_not_know():
    with pytest.raises(ConfigError, match=r"no token for \['x'\] in '1x2': known characters are "):
        TOKENIZER.encode("1x2")


def test_sampled_padding_earns_nothing():
    """The padding id is part of the vocabulary, so a policy may sample it: it must not vanish from what is judged."""
    right = TOKENIZER.encode("7+5=2,2+8=0.")
    assert reward(PROBLEM, TOKENIZER.decode(right)) == 1.0
    for place in (len(right) - 1, len(right)):
        padded = [*right[:place], TOKENIZER.pad_id, *right[place:]]
        assert reward(PROBLEM, TOKENIZER.decode(padded)) == 0.0


def test_demonstrations_without_slips_are_right_and_can_be_encoded():
    rng = np.random.default_rng(0)
    for _ in range(200):
        problem = draw_problem(rng, max_terms=12, continue_probability=0.8)
        answer = demonstrate(problem, rng)
        assert reward(problem, answer) == 1.0
        assert TOKENIZER.decode(TOKENIZER.encode(problem.prompt + answer)) == problem.prompt + answer


def test_a_slip_at_every_link_leaves_one_answer_in_ten_right():
    rng = np.random.default_rng(0)
    rewards = [reward(PROBLEM, demonstrate(PROBLEM, rng, slip=1.0)) for _ in range(2000)]
    assert np.mean(rewards) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize(
    "response",
    ["7+5=2,2+8=1.", "7+5=2,2+8=0", "7+5=2,2+8=0..", "7.5=2,2+8=0.", "", ".", "0.", "=.", "7+5=2,2+8=10."],
    ids=repr,
)
def test_wrong_or_badly_stopped_responses_earn_nothing(response):
    assert reward(PROBLEM, response) == 0.0


def test_lengths_have_a_long_tail():
    rng = np.random.default_rng(0)
    lengths = np.array(
        [len(draw_problem(rng, max_terms=12, continue_probability=0.72).terms) for _ in range(4000)], dtype=float
    )
    assert lengths.min() == 2
    assert lengths.max() == 12
    for terms in range(2, 8):
        assert np.mean(lengths > terms) == pytest.approx(0.72 ** (terms - 1), abs=0.03)
    assert np.percentile(lengths, 95) > 2 * np.median(lengths)
