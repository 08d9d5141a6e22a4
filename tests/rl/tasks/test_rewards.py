"""Rewards: what is equal text, how users' functions are found, and what is said of those that fail."""

import importlib
import re
import sys
from fractions import Fraction

import numpy as np
import pytest

from relibra.errors import ConfigError
from relibra.rl.tasks.rewards import check_reward, make_reward
from relibra.rl.tasks.task import Prompt

PROMPT = Prompt(text="?", row={"answer": "4 2", "level": 3}, origin="rows.jsonl, line 7")


@pytest.mark.parametrize(
    ("response", "answer", "same"),
    [
        ("42", "42", True),
        ("  a\tb\n", "a b", True),
        ("ab", "a b", False),
        ("A", "a", False),
        ("42.", "42", False),
        ("", "42", False),
    ],
)
def test_exact_looks_past_white_space_only(response, answer, same):
    reward = make_reward("exact", "right")
    assert reward(Prompt(text="?", row={"right": answer}), response) == float(same)


def test_exact_compares_numbers_as_they_are_written():
    reward = make_reward("exact", "answer")
    assert reward(Prompt(text="?", row={"answer": 42}), "42") == 1.0
    assert reward(Prompt(text="?", row={"answer": 0.5}), "0.5") == 1.0


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return a function that makes a reward of Python code in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("my_own_reward", None)

    def reward(body, name="score"):
        (tmp_path / "my_own_reward.py").write_text(body)
        return make_reward(f"my_own_reward:{name}", "answer")

    yield reward
    sys.modules.pop("my_own_reward", None)


def test_a_function_of_the_current_folder_sees_response_and_row(mine):
    reward = mine("def score(response, row):\n    return len(response) / row['level']\n")
    assert reward(PROMPT, "sixsix") == 2.0


@pytest.mark.parametrize(
    "value",
    [
        "True",
        "1",
        "1.0",
        "__import__('fractions').Fraction(1)",
        "__import__('numpy').True_",
        "__import__('torch').tensor(1.0)",
    ],
)
def test_whatever_is_a_number_is_a_reward(mine, value):
    got = mine(f"def score(response, row):\n    return {value}\n")(PROMPT, "x")
    assert type(got) is float
    assert got == Fraction(1) == np.float32(1)


ODD = """
class Odd(Exception):
    def __str__(self): raise KeyError("no text")
    __repr__ = __str__

    @property
    def number(self): return type("N", (float,), {"__float__": lambda _: fail(self)})(1.0)

def fail(error): raise error

"""


def test_ctrl_c_in_a_reward_is_no_failed_reward(mine):
    with pytest.raises(KeyboardInterrupt):
        mine("def score(response, row): raise KeyboardInterrupt\n")(PROMPT, "x")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("None", "returned None"),
        ("float('nan')", "returned nan"),
        ("float('-inf')", "returned -inf"),
        ("'1.0'", "returned '1.0'"),
        ("[1.0]", r"returned \[1.0\]"),
        ("1j", "returned 1j"),
        ("10 ** 400", "returned 1000"),
        ("-2e9", "returned -2000000000.0"),
        ("1 // 0", "raised ZeroDivisionError: .*zero"),
        ("row['grade']", "raised KeyError: 'grade'"),
        ("int('two\\nlines')", r"raised ValueError: invalid literal .* 'two\\nlines'"),
        ("__import__('sys').exit('two\\nlines')", "raised SystemExit: two lines"),
        ("fail(__import__('asyncio').CancelledError())", "raised CancelledError: "),
        ("fail(Odd())", r"raised Odd: its message cannot be read \(KeyError\)"),
        ("Odd()", "returned a Odd"),
        ("Odd().number", "raised Odd: "),
    ],
)
def test_reward_without_finite_number_is_named_with_its_row(mine, value, says):
    reward = mine(f"{ODD}def score(response, row):\n    return {value}\n")
    where = r"task\.reward 'my_own_reward:score' at rows\.jsonl, line 7, response 'so'"
    with pytest.raises(ConfigError, match=f"^{where}: {says}.*; a reward (is a number|returns a number)"):
        reward(PROMPT, "so")


def test_names_that_lead_nowhere_are_told_apart(mine):
    body = "score = 3\n"
    with pytest.raises(ConfigError, match=r"my_own_reward\.py has 3 there, which cannot be called; check the name"):
        mine(body)
    with pytest.raises(ConfigError, match=r"my_own_reward\.py has no such function; check the name"):
        mine(body, name="scoer")
    with pytest.raises(
        ConfigError, match=r"importing 'nowhere_to_be_found' raised ModuleNotFoundError: No module named"
    ):
        make_reward("nowhere_to_be_found:score", "answer")
    for name in ("math", "", "my_own_reward:", ":score"):
        with pytest.raises(
            ConfigError, match=r"allowed are 'exact', 'maths', or a function of yours as 'module:functi"
        ):
            make_reward(name, "answer")


def test_a_module_that_fails_to_import_is_quoted(mine):
    with pytest.raises(ConfigError, match=r"importing 'my_own_reward' raised NameError: name 'wrong' is not defined"):
        mine("wrong\n")


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("no_such_module_at_all:score", "", "there is no module 'no_such_module_at_all'"),
        ("a_reward_refused:score", "def score(:\n", "SyntaxError"),
        ("a_reward_refused", "", "as 'module:function'"),
    ],
)
def test_reward_that_cannot_exist_is_refused_without_running_it(tmp_path, monkeypatch, name, body, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    (tmp_path / "a_reward_refused.py").write_text(body)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_reward(name)


ASYNC = (
    "async def score(response, row): return 1\n",
    "import functools\nasync def one(response, row): return 1\nscore = functools.partial(one)\n",
    "class C:\n    async def __call__(self, response, row): return 1\nscore = C()\n",
)


@pytest.mark.parametrize("body", ASYNC)
def test_async_functions_are_refused(mine, body):
    with pytest.raises(ConfigError, match=r"task\.reward is 'my_own_reward:score': it is an async function"):
        mine(body)


@pytest.mark.parametrize("takes", ["", "response", "prompt, response, row", "response, *, row", "**columns"])
def test_signatures_that_no_call_fits_are_refused(mine, takes):
    with pytest.raises(ConfigError, match=r"it is called as score\(response, row\), which it does not take"):
        mine(f"def score({takes}): return 1\n")


@pytest.mark.parametrize("takes", ["response, row", "a, b", "a, b, c=1", "*both", "a, b=None, **more"])
def test_signatures_that_the_call_fits_are_taken(mine, takes):
    assert mine(f"def score({takes}): return 1\n")(PROMPT, "x") == 1.0
