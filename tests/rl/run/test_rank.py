"""The process of a rank: its device (its GPU, the CPU, or a refusal; never the CPU by accident), its last message."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch

from relibra.environment import LaunchedRank
from relibra.errors import ConfigError, LostPeerError
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run import rank
from relibra.rl.run.rank import choose_device, run_rank
from relibra.rl.run.run_failure import Exit


@pytest.mark.parametrize(("gpus", "ranks", "found"), [(0, 4, "cpu"), (4, 4, "cuda:1"), (8, 4, "cuda:1")])
def test_a_rank_gets_its_gpu_or_the_cpu(gpus, ranks, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert str(choose_device(1, ranks)) == found


def test_fewer_gpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"4 ranks .* 2 GPUs: .*parallel.ranks.*CUDA_VISIBLE_DEVICES"):
        choose_device(1, 4)


class _Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def failed(monkeypatch, tmp_path):
    """Return a function that runs a rank in which something raises; it returns the exit code and the error file."""

    def end(code):
        raise _Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(rank, "LATER_SECONDS", 0.0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(logging, "lastResort", None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def run(error, **options):
        def fail(*_):
            raise error

        monkeypatch.setattr(rank, "choose_device", fail)
        with pytest.raises(_Ended) as ended:
            run_rank(RunConfig(), LaunchedRank(1, 1, 2, 2), fail, **{"prints": False, **options})
        file = tmp_path / "error.json"
        return ended.value.args[0], json.loads(file.read_text())["message"] if file.exists() else None

    return run


def test_expected_error_is_a_sentence_even_with_half_a_surrogate(failed, capfd):
    code, told = failed(OSError("half \ud800 \x1b[2J"))
    assert code == Exit.FAILED
    assert told["message"] == told["extraInfo"]["py_callstack"] == "half \\ud800 \\x1b[2J"
    assert capfd.readouterr().err == ""


def test_unexpected_error_is_recorded_and_printed_with_traceback(failed, capfd):
    code, told = failed(ZeroDivisionError("no idea"), prints=True)
    assert code == Exit.CRASHED
    assert told["message"].startswith("Traceback")
    assert "ZeroDivisionError: no idea" in capfd.readouterr().err


def test_a_lost_peer_is_told_apart(failed):
    assert failed(LostPeerError("rank 0 ended"))[0] == Exit.LOST_PEER


def test_an_error_is_printed_where_nobody_records_it(failed, monkeypatch, capfd):
    assert failed(OSError("no idea"), prints=True)[0] == Exit.FAILED
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    failed(OSError("no idea"))
    assert capfd.readouterr().err == 2 * "rank 1: no idea\n"


def test_a_reward_that_calls_sys_exit_completes_nothing(failed):
    assert failed(SystemExit(0)) == (Exit.CRASHED, None)
    assert failed(SystemExit(2))[0] == Exit.CRASHED


LEAVE = """
import multiprocessing, threading, time
from relibra.rl.run import rank

rank.LEAVE_SECONDS = 0.2
threading.Thread(target=time.sleep, args=(1e5,)).start()
multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e5,)).start()
rank.leave()
"""


def test_threads_and_processes_of_a_reward_do_not_keep_a_rank():
    assert subprocess.run([sys.executable, "-c", LEAVE], timeout=60).returncode == 0
