"""The process of a rank: its device (its GPU, the CPU, or a refusal; never the CPU by accident), its last message."""

import logging
import os
import sys

import pytest
import torch

from relibra.environment import LaunchedRank
from relibra.errors import ConfigError
from relibra.rl.config.run_config import RunConfig
from relibra.rl.run.worker import Exit, choose_device, run_worker


@pytest.mark.parametrize(
    ("gpus", "ranks", "wanted", "found"),
    [
        (0, 4, "auto", "cpu"),
        (4, 4, "auto", "cuda:1"),
        (8, 4, "auto", "cuda:1"),
        (8, 4, "cpu", "cpu"),
        (2, 4, "cpu", "cpu"),
    ],
)
def test_a_rank_gets_its_gpu_or_the_cpu(gpus, ranks, wanted, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert str(choose_device(1, ranks, wanted)) == found


def test_fewer_gpus_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"4 ranks on a machine with 2 GPUs: .*parallel.ranks.*parallel.device=cpu"):
        choose_device(1, 4, "auto")


class _Ended(BaseException):
    """Stands for the end of the process."""


def test_the_message_of_a_rank_may_hold_half_of_a_surrogate_pair(monkeypatch):
    """It once ended the handler that was to report it."""
    sent = []

    def end(code):
        raise _Ended(code)

    def fail(*_):
        raise OSError("half \ud800 \x1b[2J")

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("relibra.rl.run.worker._exit_with_parent", lambda: None)
    monkeypatch.setattr("relibra.rl.run.worker._print_to_stderr", lambda: None)
    monkeypatch.setattr("relibra.rl.run.worker.set_rendezvous", lambda *_: None)
    monkeypatch.setattr("relibra.rl.run.worker.choose_device", fail)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(logging, "lastResort", None)
    pipe = type("Pipe", (), {"send_bytes": lambda _, data: sent.append(data)})()
    with pytest.raises(_Ended, match=str(int(Exit.FAILED))):
        run_worker(LaunchedRank(0, 0, 2, 2), RunConfig().model_dump_json(), "run", ("127.0.0.1", 1), None, pipe)
    [message] = sent
    assert message == b"half \\ud800 \\x1b[2J"
