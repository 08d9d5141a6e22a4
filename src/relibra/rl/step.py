"""One RL step: rollout, reward, plan, recompute, values, update, weight sync. A thin composition of the other files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from relibra.errors import ConfigError
from relibra.parallel import relocate
from relibra.rl.batch.training_batch import TrainingBatch, executing, homes_at_rest, place, with_recorded_routes
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import Policy
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.admission import SampleCursor, check_versions
from relibra.rl.rollout.collect import check_live_responses, collect, compute_rewards
from relibra.rl.rollout.engines import sync_weights
from relibra.rl.rollout.response import Response, RolloutCost, RolloutEngine
from relibra.rl.run.ranks import sum_over_ranks
from relibra.rl.run.step_metrics import balance_metrics, mismatch_of_ranks, rollout_metrics, update_metrics
from relibra.rl.run.step_trace import write_step_trace
from relibra.rl.tasks.task import Task
from relibra.rl.update.credit import (
    Credit,
    auroc_at_cuts,
    compare_groups,
    estimate,
    is_correct,
    spread,
    useful_groups,
    variance_explained,
)
from relibra.rl.update.policy_update import (
    Around,
    MiniBatchTotals,
    PolicyTargets,
    StepTotals,
    UpdateSums,
    own_totals,
    update_policy,
)
from relibra.rl.update.recompute import Recomputed, recompute, reference_log_probs
from relibra.rl.update.values import expect, update_values


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that is trained, and what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(kw_only=True)
class Progress:
    """What goes on from step to step, beside weights; a checkpoint keeps all of it.

    live                  unfinished responses of this rank
    for_values            finished ones that the value model has not been trained on yet
    cursor                samples that have not begun
    finished              responses of all ranks that have ended
    policy_steps          optimizer steps of the policy so far
    value_steps           of the value model
    explained_variance    share of the variance of returns that the value model explained last; None: not known
    planned               a step has been planned, so the next plan starts from the homes there are
    """

    live: list[Response] = field(default_factory=list)
    for_values: list[Response] = field(default_factory=list)
    cursor: SampleCursor = field(default_factory=SampleCursor)
    finished: int = 0
    policy_steps: int = 0
    value_steps: int = 0
    explained_variance: float | None = None
    planned: bool = False

    def as_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside responses, for `from_state`; the same on all ranks."""
        return {**asdict(self.cursor), **{name: getattr(self, name) for name in _STATE}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], responses: Sequence[Response]) -> Progress:
        """Return the progress of a checkpoint; `responses` are this rank's.

        raises    ConfigError for a checkpoint of another version of relibra
        """
        if missing := [name for name in ("next_sample", "passed_over", *_STATE) if name not in state]:
            raise ConfigError(
                f"the checkpoint lacks {', '.join(missing)}: another version of relibra wrote it; finish the run with "
                "that version, or begin a new one"
            )
        return cls(
            live=[response for response in responses if response.finish_reason is None],
            for_values=[response for response in responses if response.finish_reason is not None],
            cursor=SampleCursor(next_sample=state["next_sample"], passed_over=tuple(state["passed_over"])),
            **{name: state[name] for name in _STATE},
        )


_STATE = ("finished", "policy_steps", "value_steps", "explained_variance", "planned")


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Everything one rank trains with.

    critic      value model of the "gae" algorithms
    reference   frozen policy that the trained one is held near; None: there is none
    """

    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: Trained | None
    reference: nn.Module | None
    engine: RolloutEngine
    task: Task
    tokenizer: Tokenizer
    progress: Progress
    ranks_per_node: int


@dataclass
class Stopwatch:
    """Seconds per stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def rl_step(step: int, learner: Learner, config: RunConfig, run: Path) -> tuple[dict[str, Any], list[Response]]:
    """Go through one step; return its metrics, the same on every rank, and what this rank sampled; collective."""
    policy, clock = learner.policy, Stopwatch()
    responses, cost = _roll_out(step, learner, config, clock)
    with clock.stage("trace"):
        write_step_trace(run, step, responses, policy, config)
    with clock.stage("reward"):
        kept_S = useful_groups(responses, config)
        advantage_of = compare_groups(responses, config) if config.algorithm.advantage == "group" else {}
    kept = [response for response, is_kept in zip(responses, kept_S, strict=True) if is_kept]
    if config.algorithm.replay != "R3":
        kept = [_without_routes(response) for response in kept]
    responses = [_without_routes(response) for response in responses]  # those kept go on, and are many bytes
    batch, recomputed = _place_and_recompute(learner, kept, config, clock)
    credit, value_metrics = _assign_credit(learner, batch, advantage_of, config, clock)
    targets = _targets(learner, batch, credit, recomputed, config, clock)
    sums, norms = UpdateSums(), []
    if step >= config.critic.warmup_steps or learner.critic is None:
        with clock.stage("update"), executing(policy.trained, batch, config) as around:
            norms = _update(learner, batch, targets, around, config, sums)
    with clock.stage("sync"):
        sync_weights(learner.engine, policy, config.rollout.server_weights, step + 1)
    rollout = rollout_metrics(responses, cost)
    progress = learner.progress
    progress.finished += rollout["finished"]
    check_live_responses(progress.live, cursor=progress.cursor, finished=progress.finished, settings=config.rollout)
    metrics = {
        "step": step,
        **rollout,
        **update_metrics(sums, norms, referenced=learner.reference is not None),
        **value_metrics,
        **mismatch_of_ranks(recomputed),
        **balance_metrics(batch),
        "seconds": {name: round(seconds, 4) for name, seconds in clock.seconds.items()},
    }
    return metrics, responses


def _roll_out(step: int, learner: Learner, config: RunConfig, clock: Stopwatch) -> tuple[list[Response], RolloutCost]:
    """Sample a window of every response under way, and rate those that end."""
    progress = learner.progress
    with clock.stage("rollout"):
        rollout = collect(
            progress.live,
            cursor=progress.cursor,
            engine=learner.engine,
            task=learner.task,
            tokenizer=learner.tokenizer,
            settings=config.rollout,
            weight_version=step,
        )
        progress.cursor = rollout.cursor
    with clock.stage("reward"):
        responses = compute_rewards(
            rollout.responses,
            learner.task,
            learner.tokenizer,
            max_response=config.rollout.max_response,
            overlong_buffer=config.algorithm.overlong_buffer,
        )
        check_versions(responses, step)
    return responses, rollout.cost


def _place_and_recompute(
    learner: Learner, responses: Sequence[Response], config: RunConfig, clock: Stopwatch
) -> tuple[TrainingBatch, Recomputed]:
    """Bring responses where they are trained, plan from the routes to be replayed, and take the old log-probs.

    Routes are those of the rollout (R3), and known before the recompute pass; or those of that very pass (R2).
    """
    policy, replay, nodes = learner.policy, config.algorithm.replay, learner.ranks_per_node
    with clock.stage("plan"):
        previous = homes_at_rest(policy, nodes) if learner.progress.planned else None
        batch = place(responses, policy, config, previous=previous, ranks_per_node=nodes, plan=replay == "R3")
    _move_homes(learner, batch, clock)
    with clock.stage("recompute"), executing(policy.trained, batch, config) as around:
        recomputed = recompute(policy.trained, batch, around, config, record=replay == "R2")
    if replay == "R2":
        with clock.stage("plan"):
            own = recomputed.responses
            batch = with_recorded_routes(batch, own, policy, config, previous=previous, ranks_per_node=nodes)
        _move_homes(learner, batch, clock)
    return batch, recomputed


def _move_homes(learner: Learner, batch: TrainingBatch, clock: Stopwatch) -> None:
    """Bring experts where the plan wants them, with their optimizer states."""
    if batch.plan is None:
        return
    with clock.stage("relocate"):
        relocate(learner.policy.trained, batch.plan.physical_to_logical_map, learner.optimizer)
    learner.progress.planned = True


def _assign_credit(
    learner: Learner, batch: TrainingBatch, advantage_of: Mapping[int, float], config: RunConfig, clock: Stopwatch
) -> tuple[Credit, dict[str, Any]]:
    """Turn rewards into advantages, train the value model if there is one, and put unfinished responses aside."""
    progress, critic = learner.progress, learner.critic
    responses: Sequence[Response] = batch.responses
    if critic is None:
        return spread(responses, advantage_of), dict.fromkeys(("explained_variance", "cut_auroc", "value_loss"))
    with clock.stage("values"):
        expected_Sr = expect(critic.model, responses, config)
        explained = variance_explained(responses, expected_Sr, config.algorithm.gamma)
        progress.explained_variance = progress.explained_variance if explained is None else explained
        gate, known = config.critic.explained_variance_gate, progress.explained_variance
        is_open = gate is None or (known is not None and known > gate)
        credit = estimate(responses, expected_Sr, config, train_unfinished=is_open)
    valued = [_with_values(response, values) for response, values in zip(responses, expected_Sr, strict=True)]
    progress.live = [_without_routes(response) for response in valued if response.finish_reason is None]
    progress.for_values += [_without_routes(response) for response in valued if response.finish_reason is not None]
    value_loss, steps = None, 0
    if int(sum_over_ranks(torch.tensor([len(progress.for_values)]))) >= config.critic.min_finished:
        with clock.stage("update values"):
            value_loss, steps = update_values(
                critic.model,
                critic.optimizer,
                progress.for_values,
                config,
                optimizer_step=progress.value_steps,
                num_ranks=dist.get_world_size(),
            )
        progress.for_values = []
        progress.value_steps += steps
    return credit, {
        "explained_variance": progress.explained_variance,
        "cut_auroc": auroc_at_cuts(responses, config),
        "value_loss": value_loss,
    }


def _without_routes(response: Response) -> Response:
    """Forget routes that nobody replays any more: the next window feeds the prefix anew, the critic routes itself."""
    return replace(response, experts_nLK=None)


def _with_values(response: Response, values: np.ndarray) -> Response:
    """Record what was expected of the tokens of the last window; those of earlier ones were recorded then."""
    start = response.length - response.window_length
    return replace(response, values_r=np.concatenate([response.values_r[:start], values[start:-1]]))


def _targets(
    learner: Learner,
    batch: TrainingBatch,
    credit: Credit,
    recomputed: Recomputed,
    config: RunConfig,
    clock: Stopwatch,
) -> PolicyTargets:
    reference_Sr = None
    if learner.reference is not None:
        with clock.stage("reference"):
            reference_Sr = reference_log_probs(learner.reference, batch, config)
    return PolicyTargets(
        log_probs_old_Sr=recomputed.log_probs_Sr,
        sampled_Sr=[response.log_probs_r for response in batch.responses],
        advantage_Sr=credit.advantage_Sr,
        trained_Sr=credit.trained_Sr,
        reference_Sr=reference_Sr,
        positive_S=np.array([is_correct(response, config) for response in batch.responses], dtype=bool),
    )


def _update(
    learner: Learner,
    batch: TrainingBatch,
    targets: PolicyTargets,
    around: Around,
    config: RunConfig,
    sums: UpdateSums,
) -> list[float]:
    """Make one optimizer step per mini-batch and epoch; return the gradient norms."""
    numbers = np.unique(batch.schedule.mini_batch_M)
    counts_n3 = own_totals(targets, batch.mini_batch_S, len(numbers))
    counts = sum_over_ranks(torch.from_numpy(counts_n3)).tolist()
    totals = StepTotals(of_mini_batch=[MiniBatchTotals(tokens=a, responses=b, positive_tokens=c) for a, b, c in counts])
    norms: list[float] = []
    for _ in range(config.update.epochs):
        for number in numbers.tolist():
            if not totals.of_mini_batch[number].tokens and not totals.of_mini_batch[number].positive_tokens:
                continue  # nothing of it is trained on any rank
            norms.append(
                update_policy(
                    learner.policy.trained,
                    learner.optimizer,
                    batch.of_mini_batch(number),
                    targets,
                    totals,
                    number,
                    config,
                    around=around,
                    optimizer_step=learner.progress.policy_steps,
                    num_ranks=dist.get_world_size(),
                    sums=sums,
                )
            )
            learner.progress.policy_steps += 1
    return norms
