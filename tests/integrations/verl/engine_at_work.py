"""verl's Megatron engine on a host: a tiny GPT, and batches as a rollout of verl returns them.

What needs a GPU is replaced: verl's platform, what `run_on_cpu` replaces, and the attention of packed sequences, which
is torch's here. The model is built here, not loaded through Megatron-Bridge.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch

LAYERS, EXPERTS, TOP_K, VOCABULARY, PROMPT, RESPONSE = 2, 8, 2, 64, 8, 40
SAMPLES, LIMIT = 24, 128
"""Of each data-parallel rank; tokens of a micro-batch."""


@dataclass(frozen=True)
class Case:
    """Processes, how they share a model, and verl's replay."""

    ranks: int
    mode: str = "R3"
    tensor: int = 1
    stages: int = 1

    @property
    def expert_ranks(self):
        return min(2, self.ranks)


def use_the_host() -> None:
    """Let verl and Megatron-core run without a GPU."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Host(PlatformCUDA):
        device_name = "cpu"

        def current_device(self):
            return "cpu"

        def device_count(self):
            return 0

    set_platform(Host())
    from examples.demos.megatron_on_cpu import run_on_cpu

    run_on_cpu()
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def rms_norm(_cls, config, hidden_size, **_):
        return torch.nn.RMSNorm(hidden_size)  # what Megatron's wrapper returns, which asserts that nothing is parallel

    WrappedTorchNorm.__new__ = rms_norm


def model_settings(case):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        tensor_model_parallel_size=case.tensor,
        sequence_parallel=case.tensor > 1,
        pipeline_model_parallel_size=case.stages,
        pipeline_dtype=torch.float32,
        expert_model_parallel_size=case.expert_ranks,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        moe_enable_routing_replay=case.mode != "disabled",
        moe_router_load_balancing_type="none",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.1,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        variable_seq_lengths=True,
    )


def build_model(config):
    """Return a GPT whose attention takes packed sequences on the host; every call builds the same weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class PackedAttention(DotProductAttention):
        def forward(self, query, key, value, _mask, packed_seq_params=None, **_):
            bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
            parts = [
                torch.nn.functional.scaled_dot_product_attention(
                    *(one[a:b].transpose(0, 1) for one in (query, key, value)), is_causal=True
                ).transpose(0, 1)
                for a, b in pairwise(bounds)
            ]
            return torch.cat(parts).flatten(1)

    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    torch.manual_seed(0)
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=PROMPT + RESPONSE,
        position_embedding_type="rope",
        parallel_output=True,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def build_engine(case):
    """Return verl's engine around that model: its own constructor, and what loading a checkpoint would set."""
    from verl.workers.config import McoreEngineConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.stages,
        expert_model_parallel_size=case.expert_ranks,
        expert_tensor_parallel_size=1,
        use_remove_padding=True,
        use_fused_kernels=False,
        router_replay=EngineRouterReplayConfig(mode=case.mode),
        strategy="megatron",
    )
    off = SimpleNamespace(enable=False, enable_train=False)
    settings = SimpleNamespace(
        mtp=off,
        hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine = MegatronEngineWithLMHead(settings, engine_config, None, None)
    engine.tf_config = model_settings(case)
    engine.module = [build_model(engine.tf_config)]
    return engine


def make_batch(engine, *, routes=True, **settings):
    """Return the samples of this data-parallel rank: padded as a rollout returns them, then as verl's trainer does it.

    Tasks follow each other, and each has two favourite experts on one rank.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    generator = torch.Generator().manual_seed(engine.get_data_parallel_rank())
    prompts = torch.randint(2, PROMPT + 1, (SAMPLES,), generator=generator)
    answers = torch.randint(4, RESPONSE + 1, (SAMPLES,), generator=generator)
    place = torch.arange(PROMPT + RESPONSE)
    attention = (place >= PROMPT - prompts[:, None]) & (place < PROMPT + answers[:, None])
    data = {
        "input_ids": torch.randint(0, VOCABULARY, attention.shape, generator=generator) * attention,
        "attention_mask": attention.long(),
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": attention[:, PROMPT:].long(),
    }
    data["prompts"], data["responses"] = data["input_ids"].split([PROMPT, RESPONSE], dim=1)
    if routes:
        taste = torch.zeros(SAMPLES, 1, LAYERS, EXPERTS)
        for s in range(SAMPLES):
            task = s * 4 // SAMPLES
            taste[s, :, :, 2 * task : 2 * task + 2] = 0.7
        scores = taste + torch.rand(*attention.shape, LAYERS, EXPERTS, generator=generator)
        chosen = scores.topk(TOP_K).indices.to(torch.int16)
        recorded = attention & (place < (PROMPT + answers - 1)[:, None])  # the last token was never fed to the engine
        data["routed_experts"] = chosen * recorded[:, :, None, None]
    batch = left_right_2_no_padding(TensorDict(data, batch_size=SAMPLES))
    batch["temperature"] = torch.ones(SAMPLES)
    tu.assign_non_tensor(
        batch,
        **{
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": LIMIT,
            "micro_batch_size_per_gpu": 4,
            "enable_routing_replay": engine.enable_routing_replay,
            "use_fused_kernels": False,
            **settings,
        },
    )
    return batch


def loss_of(model_output, data, dp_group=None):
    """Return verl's token mean of log-probs of the responses, and no metrics."""
    from verl.workers.utils.padding import no_padding_2_padding

    log_probs = no_padding_2_padding(model_output["log_probs"], data)
    mask = data["response_mask"].bool()
    return -(log_probs * mask).sum() / data["batch_num_tokens"] * data["dp_size"], {}
