"""Which rank is awaited, which one is lost or hangs, and where the stacks of all are."""

import json
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from relibra.rl.run import heartbeat
from relibra.rl.run.heartbeat import Heartbeat, heartbeats
from relibra.rl.run.ranks import joined_ranks, wait_for_ranks
from tests.rl.joined import CPU, free_port, rendezvous

BEAT = 0.05


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def rank_0(server, tmp_path):
    """Return the watch of the store of two ranks, and what it says when the other one is lost."""
    said = []
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    beat = Heartbeat(client, 0, 2, tmp_path / "stacks", said.append, 0.5, 1.0, beat_seconds=BEAT, note_seconds=0.3)
    yield beat, said
    beat.stop()


def tell(store, number, **beat):
    """Tell a beat of rank 1."""
    about = {"number": number, "stage": "reward of step 3", "seconds": 75.0, "waiting": False, "failed": None, **beat}
    store.set("beat/1", json.dumps(about))


def wait_until(true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(BEAT / 2)


def test_rank_without_sign_of_life_is_named_and_stacks_written(server, rank_0, tmp_path):
    beat, said = rank_0
    tell(server, 1)
    beat.start()
    for number in range(2, 16):
        tell(server, number)
        time.sleep(BEAT)
    assert not said, "a rank that lives is not lost"
    wait_until(lambda: said)
    assert said[0].startswith("no sign of life of rank 1 (reward of step 3, for 75 s) for 0.5 s")
    assert str(tmp_path / "stacks") in said[0]
    assert "test_heartbeat.py" in (tmp_path / "stacks" / "rank-00000.txt").read_text(), "the main thread is there"


def test_rank_that_stops_before_its_first_sign_of_life_is_named(rank_0):
    beat, said = rank_0
    beat.start()
    wait_until(lambda: said)
    assert said[0].startswith("no sign of life of rank 1 (start, for 0 s) for 1 s (parallel.timeout_seconds)")


class SilentStore:
    """The store of a process that was stopped: requests go out, and no answer comes."""

    def __init__(self):
        self.end = threading.Event()

    def set_timeout(self, _):
        pass

    def set(self, _, __):
        pass

    def compare_set(self, _, __, ___):
        pass

    def multi_get(self, _):
        self.end.wait()
        raise RuntimeError("closed")


def test_a_store_that_never_answers_is_named(tmp_path):
    said, store = [], SilentStore()
    beat = Heartbeat(store, 1, 2, tmp_path / "stacks", said.append, 0.5, 1.0, beat_seconds=BEAT)
    beat.start()
    wait_until(lambda: said)
    store.end.set()
    beat.stop()
    assert said[0].startswith(
        "no sign of life of the process that has the store of the group (the launcher, or rank 0) for 0.5 s"
    )
    assert "test_heartbeat.py" in (tmp_path / "stacks" / "rank-00001.txt").read_text()


def test_nothing_is_left_of_ranks_that_live(server, rank_0, tmp_path):
    beat, said = rank_0
    tell(server, 1)
    beat.start()
    time.sleep(3 * BEAT)
    beat.stop()
    assert not said
    assert not (tmp_path / "stacks").exists()


def test_a_wait_is_told_with_whom_it_is_for(server, rank_0, monkeypatch, caplog):
    beat, _ = rank_0
    monkeypatch.setattr(heartbeat, "present_work", lambda: ("rollout of step 3", time.monotonic() - start, True))
    tell(server, 1)
    start = time.monotonic()
    beat.start()
    number = 2
    while time.monotonic() - start < 1.0:
        tell(server, number)
        number += 1
        time.sleep(BEAT)
    notes = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
    assert notes[0] == "waiting 0 s for rank 1 (reward of step 3, for 75 s)"
    assert len(notes) == 2, "at 0.3 s, and at twice as long"


def test_ranks_of_which_none_waits_are_told_after_long(server, rank_0, monkeypatch, caplog):
    beat, _ = rank_0
    beat.note_seconds = 20.0
    started = time.monotonic() - 150.0
    monkeypatch.setattr(heartbeat, "present_work", lambda: ("reward of step 3", time.monotonic() - started, False))
    tell(server, 1)
    beat.start()
    for number in range(2, 10):
        tell(server, number)
        time.sleep(BEAT)
    assert [record.getMessage() for record in caplog.records] == [
        "all ranks are at work, longest rank 0 (reward of step 3, for 150 s)"
    ]


@pytest.mark.parametrize(
    ("failed", "named"), [(None, "rank 1 (reward of step 3, for 75 s) did not come"), ("closed", "all ranks")]
)
def test_a_collective_that_timed_out_names_the_rank_that_hangs(failed, named, server, rank_0, tmp_path):
    beat, _ = rank_0
    tell(server, 1, failed=failed)
    beat.start()
    try:
        raise RuntimeError("Timed out waiting 5000ms for recv operation to complete")
    except RuntimeError as error:
        found = beat.find_hanging(error, 5.0)
    assert found.startswith(named)
    assert "waited 5 s" in found
    assert "Timed out waiting" in (tmp_path / "stacks" / "rank-00000.txt").read_text()
    assert server.check(["dump"]), "the other rank is asked for its stacks"


def test_a_rank_that_hangs_writes_its_stacks_when_asked(server, rank_0, tmp_path):
    beat, _ = rank_0
    tell(server, 1)
    beat.start()
    server.set("dump", "1")
    file = tmp_path / "stacks" / "rank-00000.txt"
    wait_until(lambda: file.stat().st_size)
    assert "in wait_until" in file.read_text()


def test_a_peer_that_ended_does_not_hang(server, rank_0):
    beat, _ = rank_0
    tell(server, 1)
    beat.start()
    assert beat.find_hanging(RuntimeError("Connection closed by peer"), 5.0) is None


def _differ(rank, port):
    """Join with a deadline of 2 s, and let rank 1 work for 4 s before a wait."""
    with joined_ranks(2.0, CPU, rendezvous(rank, 2, port)):
        time.sleep(4.0 * rank)
        start = time.monotonic()
        wait_for_ranks()
        assert time.monotonic() - start > 3 or rank == 1, "rank 0 waited beyond the deadline of collectives"


@pytest.mark.slow
def test_ranks_wait_for_uneven_work_beyond_collective_deadline():
    mp.spawn(_differ, args=(free_port(),), nprocs=2)


def _stop(rank, port, folder, moment):
    """Join; rank 1 is stopped at a moment, and rank 0 writes for whom it waits."""

    def on_lost(sentence):
        (folder / "said.txt").write_text(sentence)
        os._exit(0)

    met = rendezvous(rank, 2, port)
    with heartbeats(folder, met, 60.0, 2.0, on_lost=on_lost):
        if rank == 1 and moment == "before it joins":
            os.kill(os.getpid(), signal.SIGSTOP)
        with joined_ranks(60.0, CPU, met):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before it joins", "after its last work"])
def test_a_rank_that_is_stopped_is_named(moment, tmp_path):
    port = free_port()
    ranks = [mp.get_context("spawn").Process(target=_stop, args=(rank, port, tmp_path, moment)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(60)
    assert ranks[0].exitcode == 0
    ranks[1].kill()
    ranks[1].join(10)
    assert (tmp_path / "said.txt").read_text().startswith("no sign of life of rank 1 ")
