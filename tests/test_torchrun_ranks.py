"""The runtime benchmark under torchrun: on CPUs here, by the same code as on GPUs."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from relibra import ConfigError
from relibra.routing.demand import Demand

ROOT = Path(__file__).parent.parent
SMALL = {
    "layers": 2, "experts": 16, "top_k": 4, "hidden": 64, "width": 64, "samples": 2, "length": 64, "micro_batches": 2
}  # fmt: skip


def test_two_ranks_keep_the_routes_of_committed_rows():
    from benchmarks.runtime import steps

    sizes = steps.Sizes(**SMALL)
    for trace, digest in (
        (steps.skewed_routes(sizes, 1.5, 0), "3b89561b22a8fabc"),
        (steps.balanced_routes(sizes), "50bcb70c203accf2"),
    ):
        assert hashlib.sha256(np.asarray(trace.experts_TLK).tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_of_any_number_of_ranks_is_hot(ranks):
    from benchmarks.runtime import steps

    sizes = steps.Sizes(**SMALL | {"experts": 8 * ranks, "ranks": ranks, "length": 256})
    trace = steps.skewed_routes(sizes, 1.5, 0)
    experts_TLK = np.sort(np.asarray(trace.experts_TLK), axis=2)
    assert (np.diff(experts_TLK.astype(int), axis=2) > 0).all(), "a token chooses different experts"
    demand = Demand.from_trace(trace).with_schedule(*steps.schedule(sizes), ranks)
    load_MLR = demand.load_MLE.reshape(2, 2, ranks, -1).sum(axis=-1)
    assert (load_MLR.max(axis=-1) / load_MLR.mean(axis=-1)).mean() == pytest.approx(1.5, rel=0.03)
    even_E = np.bincount(np.asarray(steps.balanced_routes(sizes).experts_TLK).ravel())
    assert np.ptp(even_E) == 0


def test_processes_that_cannot_be_ranks_are_refused(monkeypatch):
    from benchmarks.runtime.torchrun_ranks import torchrun_ranks

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert torchrun_ranks("gloo") is None
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        torchrun_ranks("nccl")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="rank 3 would use GPU 3 of its node, where torch sees 2 CUDA devices"):
        torchrun_ranks("nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES="):
        torchrun_ranks("gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ranks = torchrun_ranks("gloo")
    assert (ranks.rank, ranks.num_ranks, ranks.local_rank, ranks.per_node, ranks.name) == (
        3,
        4,
        3,
        4,
        "4 ranks, gloo, CPU",
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="1 process"):
        torchrun_ranks("gloo")


def test_sizes_fit_the_ranks():
    from benchmarks.runtime.runtime import RECORDED, SYNTHETIC, sizes_of
    from benchmarks.runtime.torchrun_ranks import TorchrunRanks

    cpu = TorchrunRanks(backend="gloo", rank=0, num_ranks=8, local_rank=0, per_node=8)
    gpu = replace(cpu, backend="nccl")
    assert sizes_of(SYNTHETIC, None, quick=False) == SYNTHETIC
    found = sizes_of(SYNTHETIC, cpu, quick=False)
    assert (found.ranks, found.experts, found.dtype) == (8, 32, "float32")
    found = sizes_of(SYNTHETIC, gpu, quick=False)
    assert (found.ranks, found.experts, found.top_k, found.dtype) == (8, 128, 8, "bfloat16")
    assert found.expert_bytes == 3 * 2048 * 768 * 2
    assert sizes_of(RECORDED, gpu, quick=False).experts == 32


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_of_torchrun_measure_the_table(tmp_path, num_ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    program = ["-m", "benchmarks", "runtime", "--quick", "--json", "--data", "nowhere", "--output", str(tmp_path)]
    done = subprocess.run([*command, *program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    names = ["all_to_all", "eplb", "live", "relibra", "relibra, 2 resident slots", "relibra, homes stay"]
    even = ["balanced routes", "balanced routes, all_to_all"]
    assert [row["balancer"] for row in rows] == [*names, *even, *names, "canonical", *even, *names, *even]
    for row in rows:
        assert row["ep"] == num_ranks
        assert row["configuration"] == f"{num_ranks} ranks, gloo, CPU"
        assert row["sizes"]["ranks"] == num_ranks
        assert row["tokens_per_second"] > 0
    assert done.stderr.count("skipped: recorded routes") == 1, "rank 0 alone says what it skips"
    assert not list(tmp_path.iterdir()), "--quick writes no rows"


def test_cases_of_training_fit_their_micro_batches():
    from argparse import Namespace

    from benchmarks.runtime.training import cases

    given = Namespace(model=None, quick=False, layers=None, length=None, tokens=16384, prompt=32, group=2, settings=[])
    found = [(one.model, one.layers, one.length, one.tokens) for one in cases(given)]
    qwen, gpt_oss = ("qwen3-30b-a3b", 48), ("gpt-oss-20b", 24)
    lengths = ((qwen, 4096), (qwen, 16384), (gpt_oss, 8192), (gpt_oss, 16384))
    assert found == [(*model, length, 16384) for model, length in lengths]
    words = {"layers": 3, "model": "gpt-oss-20b", "length": [512], "settings": ["model.dtype=float32"]}
    [small] = cases(Namespace(**vars(given) | words))
    assert (small.model, small.layers, small.length) == ("gpt-oss-20b", 3, 512)
    assert small.settings == ("model.dtype=float32",)
    config = cases(given)[0].config()
    assert (config.num_experts, config.hidden_size, config.num_hidden_layers) == (128, 2048, 48)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_of_torchrun_train_random_weights(tmp_path, num_ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    program = ["-m", "benchmarks", "training", "--quick", "--json", "--output", str(tmp_path), "update.mini_batches=2"]
    done = subprocess.run([*command, *program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    host = "update.offload=moments, update.activations=host, "
    assert [row["case"] for row in rows] == [
        f"{model}, 128 tokens, {settings}update.mini_batches=2"
        for model in ("qwen3-30b-a3b", "gpt-oss-20b")
        for settings in ("", host)
    ]
    for row in rows:
        assert (row["ranks"], row["layers"], row["repetitions"]) == (num_ranks, 2, 1)
        assert 0 < row["tokens_per_second"] < row["update_tokens_per_second"]
        assert row["gib"] > 0
    assert not list(tmp_path.iterdir()), "--quick writes no rows"
