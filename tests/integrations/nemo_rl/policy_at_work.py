"""NeMo-RL's own `Policy` and batches, with the plug-in and without: what its workers would get, and return.

Started by the interpreter of an environment that has what NeMo-RL's driver imports (test_nemo_rl_source.py): `python -m
relibra.integrations.nemo_rl policy_at_work.py FILE SOURCE OVERRIDES`. What runs is NeMo-RL's: messages become a batch,
the policy cuts it, workers iterate over their micro-batches, and results go back into the order of samples. Its workers
are not started: no GPU, no Ray.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import torch

RANKS, PROMPTS, ANSWERS, LAYERS, EXPERTS, TOP_K = 4, 16, 8, 3, 16, 2
STEP, LIMIT, MULTIPLE = 64, 512, 8
"""Samples of an optimizer step; tokens of a micro-batch; what lengths are padded to."""


def compose(source, overrides):
    """Return the policy's configuration of a recipe of NeMo-RL with overrides of a command line."""
    from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    recipe = source / "examples" / "configs" / "recipes" / "llm" / "grpo-qwen3-30ba3b-8n8g-megatron-cp2-r3.yaml"
    return OmegaConf.to_container(parse_hydra_overrides(load_config(str(recipe)), overrides), resolve=True)["policy"]


def make_policy(config, model, **settings):
    """Return a policy as its constructor leaves it, without workers."""
    from nemo_rl.distributed.named_sharding import NamedSharding
    from nemo_rl.models.policy.lm_policy import Policy

    config = {**config, "model_name": str(model)}
    config["megatron_cfg"] = {
        **config["megatron_cfg"],
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        **settings.get("megatron_cfg", {}),
    }
    config["sequence_packing"] = {
        **config["sequence_packing"],
        "train_mb_tokens": LIMIT,
        "logprob_mb_tokens": 2 * LIMIT,
        **settings.get("sequence_packing", {}),
    }
    policy = object.__new__(Policy)
    policy.cfg, policy.use_dynamic_batches = config, False
    policy.use_sequence_packing = config["sequence_packing"]["enabled"]
    policy.sequence_packing_args = {
        "algorithm": config["sequence_packing"]["algorithm"],
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": MULTIPLE,
        "microbatch_order": config["sequence_packing"]["microbatch_order"],
    }
    policy.sharding_annotations = NamedSharding(
        layout=np.arange(2 * RANKS).reshape(1, RANKS, 1, 2),
        names=["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"],
    )
    policy.debug_payload_metrics, policy.flops_tracker = False, None
    policy.worker_group = Workers()
    return policy


class Workers:
    """Stands for the workers: a log-prob of a token says which sample and place it is of."""

    def run_all_workers_sharded_data(self, _, *, data, **__):
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        self.shards = data
        results = []
        for shard in data:
            rows = [
                micro_batch["sample"][:, None] * 1000 + torch.arange(micro_batch["input_ids"].shape[1])
                for micro_batch in shard.make_microbatch_iterator_for_packable_sequences()
            ]
            results.append(BatchedDataDict({"logprobs": torch.cat(rows)}))
        return results

    def get_all_worker_results(self, futures):
        return futures

    def shutdown(self, **_):
        return True


def make_batch(*, routes=True):
    """Return samples as a rollout leaves them in the driver; answers to a prompt share a few experts."""
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    rng = np.random.default_rng(0)
    taste_XLE = rng.gumbel(size=(PROMPTS, LAYERS, EXPERTS)) * 1.5
    logs = []
    for sample in range(PROMPTS * ANSWERS):
        log = []
        for role, tokens in (("user", 9 + sample // ANSWERS), ("assistant", int(rng.integers(8, 180)))):
            message = {"role": role, "content": "", "token_ids": torch.from_numpy(rng.integers(0, 99, tokens))}
            scores = taste_XLE[sample // ANSWERS] + rng.gumbel(size=(tokens, LAYERS, EXPERTS))
            if routes:
                message["routed_experts"] = torch.from_numpy(np.argsort(-scores, axis=2)[:, :, :TOP_K]).to(torch.int16)
            log.append(message)
        if routes:
            log[-1]["routed_experts"][-1] = -1  # the last token was never fed to the engine
        logs.append(log)
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 0})
    batch = {"input_ids": flat["token_ids"], "input_lengths": lengths, "sample": torch.arange(len(logs))}
    if routes:
        batch["routed_experts"] = flat["routed_experts"]
    return BatchedDataDict(batch)


def check_shards(shards, batch, limit):
    """Return the samples of each bin by rank; raise AssertionError where NeMo-RL's conditions on shards do not hold."""
    lengths = batch["input_lengths"]
    padded = (lengths + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    assert sorted(int(s) for shard in shards for s in shard["sample"]) == list(range(len(lengths)))
    steps = [[len(one) for one in shard.micro_batch_indices] for shard in shards]
    assert all(one == steps[0] for one in steps), "every rank runs as many micro-batches in each step"
    found = []
    for shard in shards:
        bins, first = [], 0
        for step, bounds in enumerate(shard.micro_batch_indices):
            for (a, b), tokens in zip(bounds, shard.micro_batch_lengths[step], strict=True):
                samples = shard["sample"][first + a : first + b].tolist()
                assert samples
                assert tokens == int(padded[samples].sum()) <= limit
                assert len(steps[0]) == 1 or all(s // STEP == step for s in samples), "samples stay in their step"
                bins.append(samples)
            first += shard.elem_counts_per_gb[step]
        for key in ("input_ids", "input_lengths", "routed_experts"):
            assert key not in batch or torch.equal(shard[key], batch[key][shard["sample"]]), key
        found.append(bins)
    return found


class Lines(logging.Handler):
    """What relibra logs."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("relibra.nemo_rl").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def cut(policy, batch):
    """Return bins of the update and of log-probs; check that log-probs come back in the order of samples."""
    update = check_shards(policy._shard_for_train(batch, STEP), batch, LIMIT)
    log_probs = policy.get_logprobs(batch)["logprobs"]
    assert torch.equal(log_probs, batch["sample"][:, None] * 1000 + torch.arange(batch["input_ids"].shape[1]))
    return update, check_shards(policy.worker_group.shards, batch, 2 * LIMIT)


def without_plugin(make):
    """Return what NeMo-RL alone does: its packer, put back for this call."""
    from nemo_rl.distributed import batched_data_dict

    planned = batched_data_dict.get_packer
    batched_data_dict.get_packer = planned.relibra_stock
    try:
        return make()
    finally:
        batched_data_dict.get_packer = planned


CASES = {
    "all ranks share experts": {"megatron_cfg": {"expert_model_parallel_size": 8}},
    "two ranks share experts": {"megatron_cfg": {"expert_model_parallel_size": 4}},
    "one rank feeds experts": {"megatron_cfg": {"expert_model_parallel_size": 2}},
    "largest first": {"sequence_packing": {"microbatch_order": "largest_first"}},
    "no expert parallelism": {"megatron_cfg": {"expert_model_parallel_size": 1}},
    "DTensor": {"megatron_cfg": {"enabled": False}},
}
"""Settings of policies on 8 GPUs with tensor parallelism 2."""


def main():
    from transformers import Qwen3MoeConfig

    file, source, overrides = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    config = compose(source, overrides)
    model = file.parent / "model"
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    Qwen3MoeConfig(num_experts=EXPERTS, head_dim=8, **sizes).save_pretrained(model)
    handler, batch = Lines(), make_batch()
    result = {"router_replay": config["router_replay"], "sequence_packing": config["sequence_packing"], "cases": {}}
    for name, settings in CASES.items():
        policy = make_policy(config, model, **settings)
        stock = without_plugin(lambda policy=policy: cut(policy, batch))
        handler.lines.clear()
        ours = cut(policy, batch)
        ranks = [[{s for one in bins for s in one} for bins in kind] for kind in (*stock, *ours)]
        result["cases"][name] = {
            "lines": list(handler.lines),
            "same": [a == b for a, b in zip(ours, stock, strict=True)],
            "same_ranks": ranks[:2] == ranks[2:],
            "bins": [[len(bins[0]) for bins in kind] for kind in (stock, ours)],
        }
    policy = make_policy(config, model, **CASES["all ranks share experts"])
    handler.lines.clear()
    cut(policy, make_batch(routes=False))
    result["without routes"] = list(handler.lines)
    file.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
