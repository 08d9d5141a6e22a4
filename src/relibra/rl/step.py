"""One RL step: rollout, reward, trace, recompute, update, weight sync."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

from relibra.rl.advantages import group_advantages
from relibra.rl.batch import MicroBatch, assign_micro_batches, filler_micro_batch, make_micro_batch
from relibra.rl.config import RunConfig
from relibra.rl.losses import k3_divergence
from relibra.rl.policy import Policy
from relibra.rl.ranks import gather_json, largest_over_ranks, sum_over_ranks
from relibra.rl.rollout.sample import RolloutEngine, RolloutSample, trace_of
from relibra.rl.run_folder import trace_folder
from relibra.rl.tasks.arithmetic import Problem, draw_problem, reward
from relibra.rl.tokenizer import CharacterTokenizer
from relibra.rl.update import Recomputed, recompute_log_probs, update_policy
from relibra.routing.demand import Demand
from relibra.routing.statistics import rank_skew, skew
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_files import ShardEntry, TraceWriter, index_of, write_index

_STREAM = 2
"""Random stream of problems and samples, apart from that of the demonstrations."""


@dataclass
class Stopwatch:
    """Seconds per stage."""

    seconds: dict[str, float]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def rl_step(
    step: int,
    *,
    policy: Policy,
    engine: RolloutEngine,
    optimizer: torch.optim.Optimizer,
    tokenizer: CharacterTokenizer,
    config: RunConfig,
    run: Path,
) -> dict[str, Any]:
    """Go through one step and return its metrics, the same on every rank; collective."""
    clock = Stopwatch({})
    with clock.stage("rollout"):
        problems, samples = _roll_out(step, engine, tokenizer, config)
    with clock.stage("reward"):
        rewards_S = torch.tensor([_reward(problems, sample, tokenizer) for sample in samples])
        advantages_S = group_advantages(rewards_S, torch.tensor([sample.group_id for sample in samples]))
    with clock.stage("trace"):
        trace = _write_step_trace(trace_folder(run, step), samples, config, step)
    batches, load_MLE = _make_mini_batches(samples, advantages_S, trace, config, tokenizer.pad_id)
    with clock.stage("recompute"):
        recomputed = [
            [
                recompute_log_probs(policy.trained, batch, config.rollout.temperature, weight_version=step)
                for batch in mini_batch
            ]
            for mini_batch in batches
        ]
    with clock.stage("update"):
        loss, grad_norm = _update(policy, optimizer, batches, recomputed, config)
    with clock.stage("sync"):
        policy.sync()
    return {
        "step": step,
        **_rollout_metrics(samples, rewards_S),
        "loss": loss,
        "grad_norm": grad_norm,
        **_mismatch_metrics(batches, recomputed, replayed=config.update.replay == "R3"),
        "rank_skew": float(rank_skew(load_MLE, dist.get_world_size()).mean()),
        "expert_skew": float(skew(load_MLE).mean()),
        "seconds": {name: round(seconds, 4) for name, seconds in clock.seconds.items()},
    }


def _roll_out(
    step: int, engine: RolloutEngine, tokenizer: CharacterTokenizer, config: RunConfig
) -> tuple[dict[int, Problem], list[RolloutSample]]:
    """Draw the step's problems, the same on every rank, and sample responses to this rank's share of them."""
    rng = np.random.default_rng([config.run.seed, _STREAM, step])
    per_step, per_prompt = config.rollout.prompts_per_step, config.rollout.responses_per_prompt
    problems = {
        step * per_step + i: draw_problem(
            rng, max_terms=config.task.max_terms, continue_probability=config.task.continue_probability
        )
        for i in range(per_step)
    }
    mine = list(problems)[dist.get_rank() :: dist.get_world_size()]
    group_ids = [group for group in mine for _ in range(per_prompt)]
    seed = np.random.SeedSequence([config.run.seed, _STREAM, step, dist.get_rank()]).generate_state(1, np.uint64)[0]
    samples = engine.generate(
        [tokenizer.encode(problems[group].prompt) for group in group_ids],
        sample_ids=[group * per_prompt + i for group in mine for i in range(per_prompt)],
        group_ids=group_ids,
        generator=torch.Generator().manual_seed(int(seed >> np.uint64(1))),
    )
    return problems, samples


def _reward(problems: dict[int, Problem], sample: RolloutSample, tokenizer: CharacterTokenizer) -> float:
    return reward(problems[sample.group_id], tokenizer.decode(sample.tokens_n[sample.prompt_length :].tolist()))


def _write_step_trace(
    folder: Path, samples: Sequence[RolloutSample], config: RunConfig, step: int
) -> RoutingTrace | None:
    """Write this rank's routes as shards, and on rank 0 the index over the shards of all; None without samples."""
    writer = TraceWriter(folder, shard_prefix=f"rank-{dist.get_rank():03d}")
    trace = None
    if samples:
        trace = trace_of(
            samples,
            num_experts=config.model.num_experts,
            layer_ids=range(config.model.num_layers),
            source=f"embedded engine, step {step}",
        )
        writer.append(trace)
    entries = gather_json([entry.model_dump() for entry in writer.shards])
    if dist.get_rank() == 0:
        assert trace is not None, "rank 0 has the first prompt of every step"
        shards = [ShardEntry(**entry) for of_rank in entries for entry in of_rank]
        write_index(folder, index_of(trace, shards))
    return trace


def _make_mini_batches(
    samples: Sequence[RolloutSample],
    advantages_S: Float[Tensor, " S"],
    trace: RoutingTrace | None,
    config: RunConfig,
    pad_id: int,
) -> tuple[list[list[MicroBatch]], Int64[ndarray, "M L E"]]:
    """Cut the step into mini-batches of whole groups, and this rank's share of each into micro-batches.

    Which groups a mini-batch holds does not depend on the number of ranks. Every rank gets the same number of
    micro-batches in each; fillers make up for missing ones.

    returns   the micro-batches, and the load of each of them over all ranks
    """
    num_groups = config.rollout.prompts_per_step
    group_S = np.array([sample.group_id for sample in samples], dtype=np.int64) % num_groups
    num_micro_batches = 0
    micro_batch_S = np.full(len(samples), -1)
    mini_batches = []
    replayed = trace if config.update.replay == "R3" else None
    for groups in np.array_split(np.arange(num_groups), config.update.mini_batches):
        chosen = np.flatnonzero(np.isin(group_S, groups)).tolist()
        runs = assign_micro_batches([len(samples[s].tokens_n) for s in chosen], config.update.micro_batch_tokens)
        count = largest_over_ranks(len(runs))
        batches = [make_micro_batch(samples, advantages_S, [chosen[i] for i in run], replayed, pad_id) for run in runs]
        for i, batch in enumerate(batches):
            micro_batch_S[batch.samples_B] = num_micro_batches + i
        batches += [filler_micro_batch(pad_id) for _ in range(count - len(runs))]
        num_micro_batches += count
        mini_batches.append(batches)
    return mini_batches, _load_of_all_ranks(trace, micro_batch_S, num_micro_batches, config)


def _load_of_all_ranks(
    trace: RoutingTrace | None, micro_batch_S: ndarray, num_micro_batches: int, config: RunConfig
) -> Int64[ndarray, "M L E"]:
    load_MLE = np.zeros((num_micro_batches, config.model.num_layers, config.model.num_experts), dtype=np.int64)
    if trace is not None:
        own_MLE = Demand.from_trace(trace).with_schedule(micro_batch_S, np.zeros_like(micro_batch_S), 1).load_MLE
        load_MLE[: len(own_MLE)] = own_MLE
    return sum_over_ranks(torch.from_numpy(load_MLE)).numpy()


def _update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Sequence[MicroBatch]],
    recomputed: Sequence[Sequence[Recomputed]],
    config: RunConfig,
) -> tuple[float, float]:
    """Make one optimizer step per mini-batch; return the mean loss over all ranks and the mean gradient norm."""
    losses, norms = [], []
    for mini_batch, old in zip(batches, recomputed, strict=True):
        tokens = sum_over_ranks(torch.tensor([sum(int(batch.response_BN.sum()) for batch in mini_batch)]))
        loss, norm = update_policy(
            policy.trained,
            optimizer,
            mini_batch,
            [one.log_probs_BN for one in old],
            settings=config.update,
            temperature=config.rollout.temperature,
            tokens_of_all_ranks=int(tokens),
            num_ranks=dist.get_world_size(),
        )
        losses.append(loss)
        norms.append(norm)
    return float(sum_over_ranks(torch.tensor(losses)).mean()), float(np.mean(norms))


def _rollout_metrics(samples: Sequence[RolloutSample], rewards_S: Float[Tensor, " S"]) -> dict[str, Any]:
    own = {
        "reward": rewards_S.tolist(),
        "length": [len(sample.log_probs_r) for sample in samples],
        "tokens": [len(sample.tokens_n) for sample in samples],
        "cut": [sample.finish_reason == "length" for sample in samples],
    }
    of_ranks = gather_json(own)
    every = {name: np.array([x for of_rank in of_ranks for x in of_rank[name]], dtype=np.float64) for name in own}
    return {
        "reward": float(every["reward"].mean()),
        "reward_std": float(every["reward"].std()),
        "response_length": float(every["length"].mean()),
        "response_length_p95": float(np.percentile(every["length"], 95)),
        "response_length_max": int(every["length"].max()),
        "cut_share": float(every["cut"].mean()),
        "tokens": int(every["tokens"].sum()),
    }


def _mismatch_metrics(
    batches: Sequence[Sequence[MicroBatch]], recomputed: Sequence[Sequence[Recomputed]], *, replayed: bool
) -> dict[str, Any]:
    """Compare trainer and sampler at the same weights over response tokens: k3 divergence and router disagreement."""
    totals: Float64[ndarray, " 4"] = np.zeros(4)  # sum of k3, tokens, disagreement x rows, rows
    for mini_batch, of_mini_batch in zip(batches, recomputed, strict=True):
        for batch, one in zip(mini_batch, of_mini_batch, strict=True):
            difference = (one.log_probs_BN.cpu() - batch.sampled_BN)[batch.response_BN]
            totals[:2] += float(k3_divergence(difference).sum()), len(difference)
            if one.disagreement is not None and batch.routes is not None:
                rows = int(batch.routes.valid_T.sum())
                if rows:  # none to compare in a micro-batch that ran native
                    totals[2:] += one.disagreement * rows, rows
    k3, tokens, differing, rows = sum_over_ranks(torch.from_numpy(totals)).tolist()
    return {
        "k3_kl": k3 / max(1, tokens),
        "router_disagreement": differing / max(1, rows) if replayed else None,
    }
