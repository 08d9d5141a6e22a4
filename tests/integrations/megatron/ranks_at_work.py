"""A tiny GPT of Megatron-core on two gloo processes: stock, with recorded routes, and under plans."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.spawned_ranks import run_spawned

RANKS, MICRO_BATCHES, LAYERS, EXPERTS, TOP_K = 2, 2, 2, 8, 3
SAMPLES, TOKENS, VOCABULARY = 2, 16, 64
TIMEOUT_S = 200


def build(planned, **settings):
    """Return the model of this rank; every call builds the same weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from relibra.integrations.megatron.moe_layer import with_planned_layers

    config = TransformerConfig(
        **{
            "num_layers": LAYERS,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 64,
            "moe_ffn_hidden_size": 16,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "expert_model_parallel_size": RANKS,
            "expert_tensor_parallel_size": 1,
            "moe_token_dispatcher_type": "alltoall",
            "moe_enable_routing_replay": True,
            "moe_router_load_balancing_type": "none",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "normalization": "RMSNorm",
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            **settings,
        }
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    torch.manual_seed(0)
    return GPTModel(
        config,
        with_planned_layers(spec) if planned else spec,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def tokens(micro_batch):
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + micro_batch)
    return torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=generator)


def routes(seed=0):
    """Return the experts of each row of this rank by micro-batch: most rows choose expert 0 and 5."""
    rng = np.random.default_rng(1000 * seed + dist.get_rank())
    result = []
    for _ in range(MICRO_BATCHES):
        score = rng.random((SAMPLES * TOKENS, LAYERS, EXPERTS)) + np.array([1, 0, 0, 0, 0, 0.6, 0, 0])
        result.append(np.argsort(-score, axis=2)[:, :, :TOP_K])
    return result


def forward(model, micro_batch, ids=None):
    ids = tokens(micro_batch) if ids is None else ids
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    return model(ids, torch.arange(length).expand(len(ids), length), mask)


def backward(logits):
    (logits.float().logsumexp(-1).mean() + logits[..., 3].float().square().mean()).backward()


def run_step(model, begin):
    """Run all micro-batches forward and backward; return their logits."""
    outputs = []
    for number in range(MICRO_BATCHES):
        begin(number)
        logits = forward(model, number)
        backward(logits)
        outputs.append(logits.detach())
    return torch.stack(outputs)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def make_plan(ids_MTLK, slots=2, home_map=None):
    """Return a plan, and its demand, with experts at home where the map says; None: in logical order."""
    from megatron.core import parallel_state

    from relibra import Budget, Homes, cluster_preset, plan_step
    from relibra.integrations.megatron.execution import gather_demand

    group = parallel_state.get_expert_model_parallel_group()
    demand = gather_demand(ids_MTLK, group, num_experts=EXPERTS, layer_ids=np.arange(LAYERS))
    logical = np.tile(np.arange(EXPERTS), (LAYERS, 1))
    homes = Homes(
        num_nodes=1,
        ranks_per_node=RANKS,
        layer_ids=np.arange(LAYERS),
        physical_to_logical_map=(logical if home_map is None else home_map).astype(np.int16),
    )
    budget = Budget(slots=slots, move_homes=False, pack_samples=False)
    return plan_step(demand, cluster_preset("laptop", RANKS), budget, "relibra_paper_tokens", previous=homes), demand


def work(rank, folder, cases, world, parallel):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from examples.demos.megatron_on_cpu import run_on_cpu

    run_on_cpu()
    from megatron.core import parallel_state

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS, **parallel)
    for case in cases:
        torch.save(case(), Path(folder) / f"{case.__name__}-{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


def on_ranks(cases, folder, world=RANKS, **parallel):
    """Run functions on all ranks; return what each returned, by name and rank."""
    run_spawned(work, (str(folder), cases, world, parallel), world, TIMEOUT_S)
    return {
        case.__name__: [torch.load(folder / f"{case.__name__}-{rank}.pt", weights_only=False) for rank in range(world)]
        for case in cases
    }
