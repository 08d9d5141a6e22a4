"""Pieces of planning on threads: results in order, and an error ends what has not begun."""

import threading

import pytest

from relibra.planning.parallel_map import parallel_map


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_are_in_order_whoever_makes_them(threads):
    assert parallel_map(lambda number: number**2, 100, threads) == [number**2 for number in range(100)]
    assert parallel_map(str, 0, threads) == []


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_no_other_piece_begins(threads, error):
    begun, failed = [], threading.Event()

    def work(number):
        begun.append(number)
        if number == 0:
            failed.set()
            raise error("first piece")
        failed.wait(5)

    with pytest.raises(error):
        parallel_map(work, 1000, threads)
    assert len(begun) < 100
