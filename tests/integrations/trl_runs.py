"""GRPO runs of TRL on several gloo processes: TRL's own trainer, routes replayed, and plans followed."""

from __future__ import annotations

import json
import logging
import os
import socket
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relibra.errors import RelibraError
from tests.spawned_ranks import run_spawned

TIMEOUT_S = 300
WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(14))]
STOCK = {"implementation": "all_to_all", "trainer": "stock"}
REPLAY = {"implementation": "all_to_all", "trainer": "replay"}
"""Routes are replayed, nothing is planned."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    trainer   "stock": TRL's; "replay": no plans; "planned"
    budget    of plans for even token-slots
    options   of GRPOConfig
    engine    routes come from the model as it was before training, without those of last tokens
    lost      error of the engine on the last rank, in the second generation batch
    prompts   in the data set
    """

    implementation: str = "relibra"
    trainer: str = "planned"
    budget: dict[str, Any] = field(default_factory=lambda: {"slots": 1})
    options: dict[str, Any] = field(default_factory=dict)
    engine: bool = False
    lost: Exception | None = None
    prompts: int = 24
    ep_size: int = 2


def tiny_config():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.2,  # uneven routes
        pad_token_id=0,
        eos_token_id=1,
    )


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left")


def even_words(completions, **_):
    return [sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in text.split()) / 8 for text in completions]


def options_of(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "max_steps": 3,
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "report_to": "none",
        "adam_epsilon": 1e-2,  # else Adam makes a step of a gradient that is only rounding
        "gradient_checkpointing": False,
    } | case.options


class EarlyRoutes:
    """An engine that never gets new weights: the model before training, whole on each rank."""

    def __init__(self, folder: Path, lost: Exception | None) -> None:
        from transformers import AutoModelForCausalLM

        self.lost, self.calls = lost, 0
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()

    def __call__(self, tokens_S):
        from relibra.replay import record_routing

        self.calls += 1
        if self.lost is not None and self.calls == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise self.lost
        with torch.no_grad(), record_routing(self.model) as recorder:
            for tokens in tokens_S:
                self.model(torch.tensor([tokens]), use_cache=False)
            return [experts[:-1].numpy() for experts in recorder.take()]


def run_on_rank(case: Case, folder: Path, name: str) -> dict[str, Any]:
    """Train on this rank; return its losses, the logs, and what is checked beside them."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig
    from trl import GRPOConfig, GRPOTrainer

    from relibra import Budget
    from relibra.integrations.trl import PlannedGRPOTrainer
    from relibra.parallel import register

    register()
    base = GRPOTrainer if case.trainer == "stock" else PlannedGRPOTrainer

    class Recorded(base):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses = [*getattr(self, "losses", []), float(loss)]
            return loss

    more = {}
    if case.trainer == "planned":
        more = {"cluster": "h100x8", "balancer": "relibra_paper_tokens", "budget": Budget(**case.budget)}
    if case.engine:
        more["engine_routes"] = EarlyRoutes(folder, case.lost)
    world = dist.get_world_size()
    experts = DistributedConfig(fsdp_size=world, ep_size=case.ep_size, ep_implementation=case.implementation)
    prompts = [" ".join(WORDS[2 + (n * 5 + k) % 14] for k in range(1 + n % 4)) for n in range(case.prompts)]
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=experts),
        reward_funcs=even_words,
        args=GRPOConfig(**options_of(case, folder)),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        eval_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts[:2]]),
        processing_class=tokenizer(),
        **more,
    )
    try:
        trainer.train()
    except (RelibraError, type(case.lost)) as error:
        if case.lost is None:
            raise
        return {"said": f"{type(error).__name__}: {error}"}
    trainer.save_model(str(folder / name))
    return {"losses": trainer.losses, "logs": trainer.state.log_history[:-1]}


def _work(rank: int, num_ranks: int, port: int, cases: dict[str, Case], folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of other libraries, in a process of its own
    logging.disable(logging.WARNING)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group("gloo")
    for name, case in cases.items():
        found = run_on_rank(case, folder, name)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def train(cases: dict[str, Case], folder: Path, num_ranks: int = 2) -> dict[str, list[dict[str, Any]]]:
    """Run all cases in processes of their own; return what each rank found, by case."""
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(tiny_config()).save_pretrained(folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_spawned(_work, (num_ranks, port, cases, folder), num_ranks, TIMEOUT_S)
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(num_ranks)] for name in cases
    }


def weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights that a run has saved."""
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")
