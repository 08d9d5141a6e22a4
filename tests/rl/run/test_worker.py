"""The device of a rank: its GPU, the CPU, or a refusal; never the CPU by accident."""

import pytest
import torch

from relibra.errors import ConfigError
from relibra.rl.run.worker import choose_device


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
