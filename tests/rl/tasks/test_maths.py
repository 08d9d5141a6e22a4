"""The judge of mathematical answers: what it takes for equal, and that nothing a policy writes holds it up."""

import doctest
import importlib.util
import os
import signal
import time

import pytest

from relibra.errors import ConfigError
from relibra.rl.tasks import maths, maths_text
from relibra.rl.tasks.maths import MathsJudge
from relibra.rl.tasks.rewards import make_reward
from relibra.rl.tasks.task import Prompt
from tests.rl.tasks.maths_cases import RIGHT, WRONG

installed = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="Math-Verify is not installed: the reward 'maths' is not tested",
)
MONSTER = r"So the answer is $\boxed{9^{9^{9^{9^{9}}}}}$."


@pytest.fixture(scope="module")
def judge():
    return MathsJudge()


@installed
@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "so it is 42"),
        ("42", r"first 7, then $\boxed{42}$."),
        ("1234", "The answer is 1,234."),
        ("1,234", r"\boxed{1234}"),
        ("She has 3 + 4 = 7 apples.\n#### 7", "She has 7 apples, so the answer is 7."),
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        ("1/2", r"$\frac{2}{4}$"),
        (r"$\frac{1}{2}$", r"\[ x = \boxed{\dfrac12} \]"),
        ("0.5", r"$\boxed{50\%}$"),
        ("-3", r"$x = -3$"),
        (r"\sqrt{8}", r"$\boxed{2\sqrt{2}}$"),
        ("(1,2)", r"$\boxed{(1, 2)}$"),
        (r"\boxed{\{1,2\}}", r"$\boxed{\{2,1\}}$"),
        ("x^2+2x+1", r"$\boxed{(x+1)^2}$"),
        ("12", "The total is $12."),
    ],
)
def test_answers_that_are_equal_are_right(judge, answer, response):
    assert judge(response, answer)


@installed
@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "so it is 41"),
        ("42", ""),
        ("42", "I do not know."),
        ("42", r"\boxed{42} is not it, it is \boxed{43}"),
        ("42", r"\boxed{4"),
        ("1/2", "0.51"),
        ("3", "-3"),
        ("(1,2)", r"$\boxed{(2,1)}$"),
        ("x+1", r"$\boxed{x+2}$"),
        ("7", "\x00\ud800 no answer"),
    ],
)
def test_answers_that_differ_are_wrong(judge, answer, response):
    assert not judge(response, answer)


@installed
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_answers_that_graders_are_reported_to_get_wrong(judge, every):
    assert len(RIGHT) + len(WRONG) > 400
    assert [case for case in RIGHT[::every] if not judge(case[1], case[0])] == []
    assert [case for case in WRONG[::every] if judge(case[1], case[0])] == []


def test_examples_of_docstrings_hold():
    tried = doctest.testmod(maths_text)
    assert tried.attempted > 0
    assert tried.failed == 0


@installed
def test_of_a_long_response_the_end_is_looked_at(judge):
    started = time.monotonic()
    assert judge("so $x = 1$ and then\n" * 5_000 + r"$\boxed{42}$", "42")
    assert not judge(r"$\boxed{42}$" + "\nso on and on" * 5_000, "42")
    assert judge("so on and on " * 5_000 + r"$\boxed{42}$" + "\n", "42"), "its last line is longer than what is read"
    assert time.monotonic() - started < 10


@installed
def test_what_cannot_be_computed_earns_nothing_in_bounded_time(monkeypatch, caplog):
    judge = MathsJudge()
    assert judge("42", "42")
    monkeypatch.setattr(maths, "ANSWER_SECONDS", 1.0)
    child, started = judge.child, time.monotonic()
    assert not judge(MONSTER, "42")
    assert time.monotonic() - started < 5
    monkeypatch.undo()
    if judge.child is None:  # it had to be ended
        assert child.poll() is not None
        assert "gets reward 0" in caplog.text
    assert judge("42", "42")


@installed
def test_dead_child_is_started_again_and_ends_with_its_judge():
    judge = MathsJudge()
    assert judge("42", "42")
    child = judge.child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not judge("42", "42")
    assert judge("42", "42")
    child = judge.child
    assert child.poll() is None
    del judge
    assert child.poll() is not None


@installed
def test_the_reward_takes_answers_from_the_row_and_names_it(judge):
    reward = make_reward("maths", "right")
    prompt = Prompt(text="?", row={"right": 42}, origin="rows.jsonl, line 7")
    assert reward(prompt, r"\boxed{42}") == 1.0
    assert reward(prompt, r"\boxed{43}") == 0.0
    unreadable = Prompt(text="?", row={"right": "$$"}, origin="rows.jsonl, line 7")
    with pytest.raises(
        ConfigError, match=r"^task\.reward 'maths' at rows\.jsonl, line 7, .*cannot parse the correct answer"
    ):
        reward(unreadable, "x")


def test_without_the_library_the_install_command_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"in the checkout, pip install -e '\.\[maths\]', or set task\.reward to"):
        make_reward("maths", "answer")
