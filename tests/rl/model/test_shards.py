"""Weights in shards against the same weights in one piece."""

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.model.sharding import check_shards, load_sharded
from tests.replay.model_zoo import tiny_causal_model
from tests.spawned_ranks import run_spawned


def work(rank, folder, family):
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/r", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    whole = tiny_causal_model(family)
    if rank == 0:
        whole.save_pretrained(folder / "model")
    dist.barrier()
    settings = load_config(None, ["model.dtype=float32", "model.activation_checkpointing=false"]).model
    sharded = load_sharded(
        AutoModelForCausalLM,
        str(folder / "model"),
        model_config=AutoConfig.from_pretrained(folder / "model"),
        settings=settings,
        device=torch.device("cpu"),
        has_experts=True,
        experts="relibra",
    )
    try:
        check_shards(sharded, whole, "the model")
    except ConfigError as error:
        (folder / f"error-{rank}").write_text(str(error))


@pytest.mark.parametrize(("family", "same"), [("Qwen3MoeForCausalLM", True), ("BailingHybridForCausalLM", False)])
def test_shards_with_other_values_than_the_files_are_refused(family, same, tmp_path):
    """Of BailingHybrid transformers 5.24 converts a convolution shard by shard, which mixes its rows."""
    run_spawned(work, (tmp_path, family), 2, 200)
    errors = [path.read_text() for path in sorted(tmp_path.glob("error-*"))]
    assert len(errors) == (0 if same else 2)
    assert all("conv1d.weight" in error and "parallel.ranks=1" in error for error in errors)
