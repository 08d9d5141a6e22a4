"""Pieces of work on threads: results in order, and an error ends what has not begun."""

import os
import threading

import pytest

from relibra import parallel_map


@pytest.fixture(params=[1, 2, 5])
def cores(request, monkeypatch):
    monkeypatch.setattr(parallel_map, "available_cores", lambda: request.param)
    parallel_map.work_threads.cache_clear()
    yield request.param
    parallel_map.work_threads.cache_clear()


def test_results_are_in_order_on_any_number_ofwork_threads(cores):
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


def test_pieces_may_have_pieces_of_their_own(cores):
    def work(number):
        return sum(parallel_map.parallel_map(lambda inner: number * inner, 50))

    assert parallel_map.parallel_map(work, 50) == [number * 1225 for number in range(50)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_haswork_threads_of_its_own(cores):
    parallel_map.parallel_map(str, 10)
    child = os.fork()
    if child == 0:
        os._exit(0 if parallel_map.parallel_map(str, 10) == [str(number) for number in range(10)] else 1)
    assert os.waitpid(child, 0)[1] == 0
