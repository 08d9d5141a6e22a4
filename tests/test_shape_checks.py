"""Nested functions are checked at every call, each with what it closes over, by a checker that is built once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Float, TypeCheckError

from tests.shape_checks import ALWAYS, EVERY, build_once

built = []


def counting(function):
    built.append(function.__name__)
    return beartype(function)


def make(factor):
    @build_once(typechecker=counting)
    def scaled(x_N: Float[np.ndarray, "N"], y_N: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
        if factor < 0:
            return x_N.sum()  # a scalar: the return value is checked too
        return make(factor - 1)(x_N, y_N) if factor > 2 else factor * x_N + y_N

    return scaled


def test_every_closure_runs_with_its_own_values_and_one_checker():
    x_N = np.ones(3)
    functions = [make(factor) for factor in (1, 2, 5)]
    once = list(built)
    assert [function(x_N, x_N).tolist() for function in functions] == [[2.0] * 3, [3.0] * 3, [3.0] * 3]
    assert built == once
    assert set(once) == {"scaled"}


def test_wrong_shapes_and_results_are_refused_at_every_call():
    for factor in (1, 2):
        for _ in range(2):
            with pytest.raises(TypeCheckError):
                make(factor)(np.ones(3), np.ones(4))
    with pytest.raises(TypeCheckError):
        make(-1)(np.ones(3), np.ones(3))
    assert make(1)(np.ones(3), np.ones(3)).tolist() == [2.0] * 3, "a refused call leaves nothing behind"


def test_threads_do_not_take_the_calls_of_one_another():
    def add(factor):
        return make(factor % 2 + 1)(np.ones(4), np.zeros(4))[0]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(add, range(200))) == [factor % 2 + 1.0 for factor in range(200)]


@build_once(typechecker=beartype)
def length(x_N: Float[np.ndarray, "N"]) -> int:
    return x_N.size


def test_later_calls_of_a_function_are_checked_now_and_then():
    for _ in range(ALWAYS + 1):
        length(np.ones(2))
    refused = 0
    for _ in range(2 * EVERY):
        try:
            length(np.ones((2, 2)))
        except TypeCheckError:
            refused += 1
    assert refused == 2
