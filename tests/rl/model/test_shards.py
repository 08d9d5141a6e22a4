"""Weights in shards against the same weights in one piece."""

import copy
import logging
from functools import partial

import pytest
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.model.sharding import check_shards, load_parameters, load_sharded
from tests.replay.model_zoo import tiny_causal_model
from tests.rl.joined import CPU, on_ranks


def refusal_of(family, folder):
    """Return what is wrong with the shards of a family on this rank; None: nothing."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if dist.get_rank() == 0:
        tiny_causal_model(family).save_pretrained(folder / "model")
    dist.barrier()
    path, settings = str(folder / "model"), load_config(None, ["model.dtype=float32"]).model
    model_config = AutoConfig.from_pretrained(path)
    meta = AutoModelForCausalLM.from_pretrained(path, device_map="meta")
    sharded = load_sharded(
        AutoModelForCausalLM,
        path,
        model_config=copy.deepcopy(model_config),
        settings=settings,
        device=CPU,
        num_experts=8,
        follows_plans=True,
    )
    try:
        check_shards(sharded, meta, "the model", lambda names: load_parameters(path, names, model_config, settings))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("family", "same"), [("Qwen3MoeForCausalLM", True), ("BailingHybridForCausalLM", False)])
def test_shards_with_other_values_than_the_files_are_refused(family, same, tmp_path):
    """Of BailingHybrid transformers 5.24 converts a convolution shard by shard, which mixes its rows."""
    for refusal in on_ranks(2, partial(refusal_of, family), tmp_path):
        if same:
            assert refusal is None
        else:
            assert "conv1d.weight" in refusal
            assert "parallel.ranks=1" in refusal
