"""RL steps of a tiny policy on one rank or two, with samples that do not depend on the number of ranks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from relibra.rl.config import RunConfig, load_config
from relibra.rl.policy import build_policy, full_tensor
from relibra.rl.ranks import Meeting, joined_ranks
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.step import rl_step
from relibra.rl.tasks.arithmetic import CHARACTERS, STOP
from relibra.rl.tokenizer import CharacterTokenizer

TINY = (
    "warmup.steps=2",
    "run.steps=2",
    "rollout.prompts_per_step=4",
    "rollout.responses_per_prompt=2",
    "rollout.max_new_tokens=12",
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_experts=4",
    "update.mini_batches=2",
    "update.max_grad_norm=0.05",  # so low that clipping is always at work
)
CPU = torch.device("cpu")
TOKENIZER = CharacterTokenizer(CHARACTERS, STOP)


def tiny_config(*overrides: str) -> RunConfig:
    return load_config(None, [*TINY, *overrides])


def meeting(rank: int = 0, num_ranks: int = 1, port: int = 0) -> Meeting:
    """Return where to meet; rank 0 listens from now on, at a free port if `port` is 0."""
    listener = socket.create_server(("127.0.0.1", port)) if rank == 0 else None
    return Meeting(rank, num_ranks, listener.getsockname()[1] if listener else port, listener)


@dataclass(frozen=True)
class SampleBySample:
    """An engine that draws each sample from a generator of its own, so that ranks can share prompts out at will."""

    inner: EmbeddedEngine

    def generate(self, prompts, *, sample_ids, group_ids, generator):  # noqa: ARG002
        return [
            self.inner.generate(
                [prompt],
                sample_ids=[sample_id],
                group_ids=[group_id],
                generator=torch.Generator().manual_seed(sample_id),
            )[0]
            for prompt, sample_id, group_id in zip(prompts, sample_ids, group_ids, strict=True)
        ]


def reward_of_length(_problem: object, response: str) -> float:
    """Stand in for the task: an untrained policy earns nothing there, so nothing would be trained."""
    return float(len(response) % 3)


@patch("relibra.rl.step.reward", reward_of_length)
def train_steps(config: RunConfig, folder: Path) -> dict:
    """Make two steps in a joined group; return metrics, whole weights, and how far the copy is from the trained model.

    Plain descent with momentum: Adam would blow up the last bits of gradients that are zero but for rounding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    policy = build_policy(config.model, TOKENIZER.vocab_size, config.run.seed, folder, CPU)
    optimizer = torch.optim.SGD(policy.trained.parameters(), lr=1.0, momentum=0.9, foreach=False)
    metrics = []
    for step in range(2):
        engine = EmbeddedEngine(
            model=policy.copy,
            weight_version=step,
            pad_id=TOKENIZER.pad_id,
            stop_id=TOKENIZER.stop_id,
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=1.0,
        )
        metrics.append(
            rl_step(
                step,
                policy=policy,
                engine=SampleBySample(engine),
                optimizer=optimizer,
                tokenizer=TOKENIZER,
                config=config,
                run=folder,
            )
        )
    tokens_BN = torch.arange(1, 13).view(2, 6)
    with torch.no_grad():
        logits = [model(input_ids=tokens_BN, use_cache=False).logits for model in (policy.trained, policy.copy)]
    weights = {name: full_tensor(parameter).clone() for name, parameter in policy.trained.named_parameters()}
    return {"metrics": metrics, "weights": weights, "copy_is_off_by": float((logits[0] - logits[1]).abs().max())}


def train_on_one_rank(config: RunConfig, folder: Path) -> dict:
    with joined_ranks(60.0, CPU, meeting()):
        return train_steps(config, folder)


def _train_scenarios(rank: int, num_ranks: int, port: int, scenarios: dict, folder: Path) -> None:
    torch.set_num_threads(1)
    own = meeting(rank, num_ranks, port)
    with joined_ranks(60.0, CPU, own):
        for name, overrides in scenarios.items():
            config = tiny_config(f"parallel.ranks={num_ranks}", *overrides)
            outcome = train_steps(config, folder / name)
            torch.save(outcome, folder / f"{name}-rank-{rank}.pt")
            dist.barrier()


def train_on_ranks(num_ranks: int, scenarios: dict[str, tuple[str, ...]], folder: Path) -> dict[str, list[dict]]:
    """Run all scenarios in processes of their own; return what each rank found, by scenario."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mp.spawn(_train_scenarios, (num_ranks, port, scenarios, folder), nprocs=num_ranks)
    return {name: [torch.load(folder / f"{name}-rank-{rank}.pt") for rank in range(num_ranks)] for name in scenarios}
