"""Pieces of planning on threads: results in order, and an error ends what has not begun."""

import threading

import pytest

from relibra.planning import parallel_map


@pytest.fixture(params=[1, 2, 5])
def cores(request, monkeypatch):
    monkeypatch.setattr(parallel_map, "available_cores", lambda: request.param)
    return request.param


def test_results_are_in_order_on_any_number_of_threads(cores):
    assert parallel_map.parallel_map(lambda number: number**2, 100) == [number**2 for number in range(100)]
    assert parallel_map.parallel_map(str, 0) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_no_other_piece_begins(cores, error):
    begun, failed = [], threading.Event()

    def work(number):
        begun.append(number)
        if number == 0:
            failed.set()
            raise error("first piece")
        failed.wait(5)

    with pytest.raises(error):
        parallel_map.parallel_map(work, 1000)
    assert len(begun) < 100
