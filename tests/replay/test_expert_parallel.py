"""Replay under FSDP2 and expert parallelism: two gloo processes against one."""

import pytest
import torch
import torch.distributed as dist

from relibra.replay import BatchRoutes, record_routing, replay_routing
from tests.replay.tiny_models import random_tokens, random_trace, tiny_model
from tests.spawned_ranks import run_spawned

RANKS, LENGTH, TIMEOUT_S = 2, 7, 120


def trace_of_all_ranks():
    return random_trace([LENGTH] * RANKS, layer_ids=[0, 1, 2])


def policy_loss(logits, ids_BN):
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids_BN[:, 1:, None]).mean()


def train_on_rank(rank, folder):
    """Replay one sample per rank on a model whose experts are spread over both; leave logits and gradients on disk."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    config = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS, ep_implementation="all_to_all")
    model = AutoModelForCausalLM.from_pretrained(
        f"{folder}/model", distributed_config=config, dtype=torch.float32, attn_implementation="eager"
    ).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    ids_BN = random_tokens(RANKS, LENGTH)[rank : rank + 1]
    routes = BatchRoutes.packed(trace_of_all_ranks().select([rank]))
    with replay_routing(model, routes) as replay, record_routing(model) as recorder:
        logits = model(ids_BN, use_cache=False).logits
        policy_loss(logits, ids_BN).backward()
    [executed_TLK] = recorder.take()
    assert torch.equal(executed_TLK[:-1], routes.experts_TLK[:-1])
    gradients = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    torch.save(
        {
            "logits": logits.detach(),
            "gradients": gradients,
            "disagreement": replay.disagreement,
        },
        f"{folder}/rank{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_spread_experts_equal_one(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    ids_BN = random_tokens(RANKS, LENGTH)
    with replay_routing(model, BatchRoutes.padded(trace_of_all_ranks(), torch.ones_like(ids_BN))):
        logits = model(ids_BN, use_cache=False).logits
        policy_loss(logits, ids_BN).backward()

    run_spawned(train_on_rank, (str(tmp_path),), RANKS, TIMEOUT_S)

    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(RANKS)]
    torch.testing.assert_close(torch.cat([rank["logits"] for rank in ranks]), logits.detach(), rtol=1e-5, atol=1e-5)
    assert all(rank["disagreement"] > 0.5 for rank in ranks)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ranks[0]["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-5, msg=name)
