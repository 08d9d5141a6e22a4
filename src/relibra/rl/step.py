"""One RL step: rollout, rewards, plan, recompute, values and credit, update, weight sync."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.parallel import relocate
from relibra.parallel.adapters import without_adapters
from relibra.planning.balancers.lasting import with_residents
from relibra.planning.placement import Homes
from relibra.rl.algorithms.loss import PolicyLoss
from relibra.rl.algorithms.mismatch import LARGEST_MISMATCH, alarms, check_mismatch
from relibra.rl.batch.step_plan import exchange_residents
from relibra.rl.batch.training_batch import TrainingBatch, build_batch, current_homes, executing, plan_recorded_routes
from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.host_weights import idle_while_sampling
from relibra.rl.model.optimizer import StepCount
from relibra.rl.model.policy import Policy
from relibra.rl.model.tokenizer import Tokenizer
from relibra.rl.rollout.admission import SampleCursor, check_versions
from relibra.rl.rollout.collect import Rollout, check_failed_rewards, check_live_responses, collect, compute_rewards
from relibra.rl.rollout.engines import sync_weights
from relibra.rl.rollout.response import Response, RolloutEngine
from relibra.rl.rollout.served.canary_probe import Canary
from relibra.rl.rollout.served.sleep import put_servers_to_sleep
from relibra.rl.run import step_metrics
from relibra.rl.run.ranks import sum_over_ranks
from relibra.rl.run.step_trace import StepTraces, record_routes
from relibra.rl.stopwatch import Stopwatch
from relibra.rl.tasks.task import Task
from relibra.rl.update.credit import (
    Credit,
    auroc_at_cuts,
    broadcast_advantages,
    compute_gae,
    compute_group_advantages,
    compute_values,
    filter_groups,
    groups_with_signal,
    record_values,
    variance_explained,
    with_credit,
    with_recorded_values,
    without_mixed_routes,
)
from relibra.rl.update.planned_activations import PlannedActivations
from relibra.rl.update.policy_update import BeforeFirstStep, PolicyUpdate, update_policy
from relibra.rl.update.recompute import (
    Comparison,
    PassScores,
    Recomputed,
    micro_batches_to_recompute,
    recompute,
    reference_log_probs,
)
from relibra.rl.update.sampler_watch import SamplerWatch
from relibra.rl.update.value_update import update_values


@dataclass(frozen=True, kw_only=True)
class Progress:
    """State that a step hands to the next one, beside weights; checkpoints contain all of it.

    live                  unfinished responses of this rank
    for_values            finished ones that the value model has not been trained on yet
    cursor                samples that have not begun
    finished              responses of all ranks that have ended
    policy_steps          optimizer steps of the policy so far
    value_steps           of the value model
    policy_skips          optimizer steps skipped in a row, at the end of the step before
    value_skips           of the value model
    untrained_steps       RL steps in a row whose rewards trained nothing
    explained_variance    share of the variance of returns that the value model explained last; None: not known
    planned               whether a step was planned, so that the next plan starts from the current homes
    residents             experts `[L][R][B]` in lasting replica slots, chosen from the step before; None: none
    sampler_history       of accepted steps, as JSON data (`SamplerHistory`); None: no step yet
    """

    live: Sequence[Response] = ()
    for_values: Sequence[Response] = ()
    cursor: SampleCursor = field(default_factory=SampleCursor)
    finished: int = 0
    policy_steps: int = 0
    value_steps: int = 0
    policy_skips: int = 0
    value_skips: int = 0
    untrained_steps: int = 0
    explained_variance: float | None = None
    planned: bool = False
    residents: list | None = None
    sampler_history: Mapping[str, Any] | None = None

    def as_state(self) -> dict[str, Any]:
        """Return the part of a checkpoint beside responses, for `from_state`; the same on all ranks."""
        return {**asdict(self.cursor), **{name: getattr(self, name) for name in _STATE}}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], responses: Sequence[Response]) -> Progress:
        """Return the progress of a checkpoint; `responses` are this rank's.

        raises    ConfigError for a checkpoint of another version of relibra
        """
        newer = dict.fromkeys(("policy_skips", "value_skips", "untrained_steps"), 0)  # 0.2.0 wrote none of these
        state = {**newer, "residents": None, "sampler_history": None, **state}
        if missing := [name for name in ("next_sample", "passed_over", *_STATE) if name not in state]:
            raise ConfigError(
                f"the checkpoint lacks {', '.join(missing)}: another version of relibra wrote it; finish the run with "
                "that version, or begin a new one"
            )
        return cls(
            live=tuple(response for response in responses if response.finish_reason is None),
            for_values=tuple(response for response in responses if response.finish_reason is not None),
            cursor=SampleCursor(next_sample=state["next_sample"], passed_over=tuple(state["passed_over"])),
            **{name: state[name] for name in _STATE},
        )


_STATE = [one.name for one in fields(Progress) if one.name not in ("live", "for_values", "cursor")]


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Settings, models, engine and task of one rank.

    critic      value model of the "gae" algorithms, with its optimizer
    loss        of the policy
    reference   frozen policy of the KL term; None: there is no such term, or not yet
    cluster     machine that steps are planned for
    canary      on rank 0: compares servers with the policy after each update of its weights; None: there is none
    activations   plans which activations each layer keeps; None: all layers keep the same
    """

    config: RunConfig
    policy: Policy
    optimizer: torch.optim.Optimizer
    critic: tuple[nn.Module, torch.optim.Optimizer] | None
    loss: PolicyLoss
    engine: RolloutEngine
    task: Task
    tokenizer: Tokenizer
    cluster: Cluster
    reference: nn.Module | None = None
    canary: Canary | None = None
    activations: PlannedActivations | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step.

    metrics     the same on every rank
    responses   sampled on this rank in this step, without routes
    """

    metrics: dict[str, Any]
    responses: list[Response]
    progress: Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedStep:
    """What a step trains on.

    rollout        of this rank, without routes
    signal         by group: whether its rewards differ
    advantage_of   advantages of groups, by sample id
    batch          with the plan, where the routes of the rollout are replayed
    routed         bytes of the routes that this rank got from its engine and trains on
    traced         bytes of the routes that it wrote
    sampled_at     seconds of `time.perf_counter`, when all responses were whole
    begun_ahead    samples of later steps that have begun
    """

    rollout: Rollout
    signal: Mapping[int, bool]
    advantage_of: Mapping[int, float]
    batch: TrainingBatch
    routed: int
    traced: int
    sampled_at: float = 0.0
    begun_ahead: int = 0


def rl_step(
    step: int,
    learner: Learner,
    progress: Progress,
    traces: StepTraces,
    take: Callable[[Stopwatch], PreparedStep] | None = None,
) -> StepResult:
    """Go through one step: sample, reward, plan, recompute, assign credit, update, sync weights; collective.

    take    returns what was prepared while earlier steps trained (`rollout.ahead`); None: prepare it here
    """
    config, clock = learner.config, Stopwatch(step)
    if take is None:
        rollout = _sample(learner, progress, clock)
        prepared = prepare_step(learner, rollout, homes_before(learner, progress), traces, clock)
    else:
        prepared = take(clock)
    waited = dict(clock.seconds)
    rollout, signal, advantage_of = prepared.rollout, prepared.signal, prepared.advantage_of
    batch, recomputed = _recompute(learner, progress, prepared.batch, clock)
    if take is not None:
        batch = replace(batch, responses=with_recorded_values(batch.responses, progress.live))

    watch = SamplerWatch(step, learner.policy, config, progress.sampler_history)

    def before_first_step(scored: PassScores | None, batch: TrainingBatch, compared: Comparison) -> bool:
        if progress.policy_steps == 0:
            mismatch = step_metrics.mismatch_metrics_of_ranks(recomputed.compared + compared)
            check_mismatch(mismatch, largest_mismatch(config), where=f"step {step}")
        return watch.accepts(scored, batch)

    before_first_step(None, batch, Comparison())  # checks what `_recompute` found
    with clock.stage("trace"):
        traces.write_plan(step, batch.plan, batch.demand)
    progress, credit, value_metrics = _run_value_model(learner, progress, batch.responses, clock)
    credit = credit or broadcast_advantages(batch.responses, advantage_of)
    batch = _with_targets(learner, batch, recomputed, credit, clock)
    update = PolicyUpdate(
        count=StepCount(rl_step=step, made=progress.policy_steps, skipped_in_a_row=progress.policy_skips)
    )
    trains = _trains_policy(step, learner, progress)
    if trains:
        update = _update_policy(learner, update.count, batch, clock, before_first_step)
    mismatch = step_metrics.mismatch_metrics_of_ranks(recomputed.compared + update.compared)
    with clock.stage("sync"):
        canary = sync_weights(learner.engine, learner.policy, step + 1, learner.canary)
    residents = progress.residents if config.plan.lasting else None
    if config.plan.lasting and batch.plan is not None:
        with clock.stage("plan"):  # waits for what the update has not hidden
            residents = exchange_residents(batch.lasting)
    metrics = {
        "step": step,
        **step_metrics.rollout_metrics(rollout.responses, rollout.cost),
        "equal_groups": 1 - sum(signal.values()) / len(signal) if signal else None,
        **step_metrics.update_metrics(update, learner.loss.metrics),
        **value_metrics,
        **mismatch,
        **step_metrics.balance_metrics(batch, recomputed, update, learner.policy.shape, clock.skews),
        **clock.row_metrics(),
        **step_metrics.prompt_metrics(batch),
        "canary": canary and asdict(canary),
        "sampler_check": watch.metrics(),
        "bytes": step_metrics.route_bytes(batch, routed=prepared.routed, traced=prepared.traced),
        "ahead": take and step_metrics.ahead_metrics(step, rollout.responses, prepared.begun_ahead, waited),
        "seconds": {name: round(seconds, 4) for name, seconds in clock.seconds.items()},
    }
    untrained = progress.untrained_steps
    if trains:
        other = config.algorithm.kl_coefficient or config.algorithm.entropy_coefficient or ":" in config.algorithm.loss
        without_signal = metrics["equal_groups"] == 1 and not other  # terms that train without it
        untrained = untrained + 1 if not metrics["trained_tokens"] or without_signal else 0
    metrics["untrained_steps"] = untrained
    metrics["alarms"] = [*alarms(metrics), *filter(None, [watch.sentence])]
    progress = replace(
        progress,
        cursor=rollout.cursor,
        finished=progress.finished + metrics["finished"],
        policy_steps=update.count.made,
        policy_skips=update.count.skipped_in_a_row,
        untrained_steps=untrained,
        planned=progress.planned or batch.plan is not None,
        residents=residents,
        sampler_history=watch.state,
    )
    check_live_responses(progress.live, cursor=progress.cursor, finished=progress.finished, settings=config.rollout)
    return StepResult(metrics=metrics, responses=rollout.responses, progress=progress)


def _trains_policy(step: int, learner: Learner, progress: Progress) -> bool:
    """Return whether a step trains the policy: a value model is trained first (`critic.pretrain_steps`)."""
    first = learner.config.critic.pretrain_steps
    return learner.critic is None or (step >= first and (progress.value_steps > 0 or not first))


def largest_mismatch(config: RunConfig) -> float:
    """Return the largest allowed `log_ratio_mean_abs` before the first update; a user's server may compute in bfloat16.

    Logits, and so their rounding, are divided by the temperature.
    """
    exact = config.model.dtype == "float32" and config.rollout.engine in ("embedded", "serve")
    rounding = LARGEST_MISMATCH["float32" if exact else "bfloat16"] / min(1.0, config.rollout.temperature)
    return config.update.max_mismatch or rounding


def _sample(learner: Learner, progress: Progress, clock: Stopwatch) -> Rollout:
    """Sample a window of every response."""
    with clock.stage("rollout"), idle_while_sampling(learner.policy.trained, learner.config.update):
        rollout = collect(
            progress.live,
            cursor=progress.cursor,
            engine=learner.engine,
            task=learner.task,
            tokenizer=learner.tokenizer,
            settings=learner.config.rollout,
            weight_version=clock.step,
        )
        put_servers_to_sleep(learner.engine, learner.canary, next(learner.policy.trained.parameters()).device)
    return rollout


def prepare_step(
    learner: Learner, rollout: Rollout, previous: Homes | None, traces: StepTraces, clock: Stopwatch
) -> PreparedStep:
    """Compute rewards, write the routes of the step, compare groups, and plan; collective.

    rollout     its list of responses is empty afterwards
    previous    homes of experts before the step, and replicas that last; None: the static layout
    """
    sampled_at = time.perf_counter()
    responses = _rate(learner, rollout.responses, traces, clock)
    rollout.responses.clear()  # so that routes that are sent leave memory
    kept, signal, advantage_of = _compare_groups(responses, learner.config, clock)
    responses[:] = [_without_routes(response) for response in responses]
    routed = sum(response.experts_mLK.nbytes for response in kept if response.experts_mLK is not None)
    with clock.stage("plan"):
        batch = build_batch(kept, learner.policy, learner.config, previous=previous, cluster=learner.cluster)
    return PreparedStep(
        rollout=replace(rollout, responses=responses),
        signal=signal,
        advantage_of=advantage_of,
        batch=batch,
        routed=routed,
        traced=traces.written_bytes,
        sampled_at=sampled_at,
    )


def _rate(learner: Learner, sampled: Sequence[Response], traces: StepTraces, clock: Stopwatch) -> list[Response]:
    """Compute rewards, and write the routes of the step."""
    config, step = learner.config, clock.step
    with clock.stage("reward"):
        responses, errors = compute_rewards(
            sampled,
            learner.task,
            learner.tokenizer,
            max_response=config.rollout.max_response,
            overlong_buffer=config.algorithm.overlong_buffer,
        )
        rated = sum(response.finish_reason is not None for response in responses)
        check_failed_rewards(errors, rated, where=f"step {step}")
        check_versions(responses, step, config.rollout.ahead)
    with clock.stage("trace"):
        records_routes = config.rollout.engine == "embedded" or config.algorithm.replay == "R3"
        if learner.policy.layer_ids and records_routes:
            responses = record_routes(step, responses, traces)
    return responses


def _compare_groups(
    responses: Sequence[Response], config: RunConfig, clock: Stopwatch
) -> tuple[list[Response], Mapping[int, bool], Mapping[int, float]]:
    """Return the responses that the group filter keeps, which groups have a signal, and advantages by sample id."""
    settings = config.algorithm
    with clock.stage("reward"):
        signal = groups_with_signal(responses, settings, max_response=config.rollout.max_response)
        kept_S = filter_groups(responses, settings, signal)
        advantage_of: Mapping[int, float] = {}
        if settings.advantage == "group":
            advantage_of = compute_group_advantages(responses, divide_by_std=settings.divide_by_std)
    kept = [response for response, is_kept in zip(responses, kept_S, strict=True) if is_kept]
    kept = kept if settings.replay == "R3" else [_without_routes(response) for response in kept]
    return kept, signal if settings.advantage == "group" else {}, advantage_of


def homes_before(learner: Learner, progress: Progress) -> Homes | None:
    """Return where experts are now, with replicas that last; None: no step was planned."""
    previous = current_homes(learner.policy, learner.cluster.topology) if progress.planned else None
    if previous is None or progress.residents is None:
        return previous
    return with_residents(previous, progress.residents)


def _recompute(
    learner: Learner, progress: Progress, batch: TrainingBatch, clock: Stopwatch
) -> tuple[TrainingBatch, Recomputed]:
    """Compute old log-probs, with the routes of the rollout (R3), or record routes and plan from them (R2)."""
    policy, config, cluster = learner.policy, learner.config, learner.cluster
    settings, trains = config.algorithm, _trains_policy(clock.step, learner, progress)
    previous = homes_before(learner, progress)
    _move_homes(learner, batch, clock)
    numbers = micro_batches_to_recompute(batch.schedule, settings, trains=trains)
    if not numbers:
        return batch, Recomputed(log_probs=[None] * len(batch.micro_batches))
    with clock.stage("recompute"), executing(policy, batch, config.plan, cluster, numbers) as context:
        recomputed = recompute(
            policy.trained,
            batch,
            context,
            settings,
            temperature=config.rollout.temperature,
            numbers=numbers,
            record=settings.replay == "R2",
        )
        recomputed = replace(recomputed, ran_at_home=context.ran_at_home, live=context.live)
        clock.keep_execution("recompute", context)
    if settings.replay == "R2":
        with clock.stage("plan"):
            batch = plan_recorded_routes(batch, recomputed.routes, policy, config, previous=previous, cluster=cluster)
        _move_homes(learner, batch, clock)
    return batch, recomputed


def _move_homes(learner: Learner, batch: TrainingBatch, clock: Stopwatch) -> None:
    """Move experts to the homes of the plan, with their optimizer states."""
    if batch.plan is not None:
        with clock.stage("relocate"):
            relocate(learner.policy.trained, batch.plan.physical_to_logical_map, learner.optimizer)


def _run_value_model(
    learner: Learner, progress: Progress, responses: Sequence[Response], clock: Stopwatch
) -> tuple[Progress, Credit | None, dict[str, float | None]]:
    """Compute values and advantages, and train the value model once enough responses have finished.

    returns   progress with responses and counters of the value model; credit (None without a value model: advantages
              are then those of groups); metrics
    """
    config, settings = learner.config, learner.config.algorithm
    if learner.critic is None:
        nothing: dict[str, float | None] = dict.fromkeys(("explained_variance", "cut_auroc", "value_loss"))
        return replace(progress, live=(), for_values=()), None, {**nothing, "skipped_value_updates": 0}
    critic, optimizer = learner.critic
    with clock.balanced_stage("values", critic, config.plan, learner.cluster):
        shares_prompts = learner.policy.shares_prompts
        values = compute_values(critic, responses, config.update.micro_batch_tokens, shares_prompts=shares_prompts)
        explained = variance_explained(responses, values)
        explained = progress.explained_variance if explained is None else explained
        gate = config.critic.explained_variance_gate
        credit = compute_gae(
            responses,
            values,
            settings,
            window_tokens=config.rollout.window_tokens,
            train_unfinished=gate is None or (explained is not None and explained > gate),
        )
        recorded = [_without_routes(response) for response in record_values(responses, values)]
    for_values = [*progress.for_values, *(one for one in recorded if one.finish_reason is not None)]
    value_loss, skipped = None, 0
    count = StepCount(rl_step=clock.step, made=progress.value_steps, skipped_in_a_row=progress.value_skips)
    if int(sum_over_ranks(torch.tensor([len(for_values)]))) >= config.critic.min_finished:
        with clock.balanced_stage("update values", critic, config.plan, learner.cluster):
            value_loss, count, skipped = update_values(
                critic,
                optimizer,
                for_values,
                config.critic,
                config.update,
                by_group=settings.advantage == "group",
                seed=config.run.seed,
                responses_per_step=config.rollout.responses_per_step,
                count=count,
                num_ranks=dist.get_world_size(),
                shares_prompts=shares_prompts,
            )
        for_values = []
    found_auroc = auroc_at_cuts(
        responses,
        window_tokens=config.rollout.window_tokens,
        max_response=config.rollout.max_response,
        overlong_buffer=settings.overlong_buffer,
    )
    progress = replace(
        progress,
        live=[one for one in recorded if one.finish_reason is None],
        for_values=for_values,
        value_steps=count.made,
        value_skips=count.skipped_in_a_row,
        explained_variance=explained,
    )
    value_metrics = {"explained_variance": explained, "cut_auroc": found_auroc, "value_loss": value_loss}
    return progress, credit, {**value_metrics, "skipped_value_updates": skipped}


def _without_routes(response: Response) -> Response:
    """Return the response without its routes: the next window prefills the prefix again, the critic routes itself."""
    return replace(response, experts_mLK=None)


def _with_targets(
    learner: Learner, batch: TrainingBatch, recomputed: Recomputed, credit: Credit, clock: Stopwatch
) -> TrainingBatch:
    """Return the batch with all that the policy loss reads."""
    config = learner.config
    if config.rollout.mixed_routes == "mask" and config.algorithm.replay == "R3":
        credit = without_mixed_routes(credit, batch.responses)
    batch = with_credit(
        batch.filled(old_log_probs_X=recomputed.log_probs),
        credit,
        max_response=config.rollout.max_response,
        overlong_buffer=config.algorithm.overlong_buffer,
    )
    if learner.reference is None:
        return batch
    # A policy with adapters is its own reference, with the adapters switched off.
    with (
        without_adapters(learner.reference),
        clock.balanced_stage("reference", learner.reference, config.plan, learner.cluster),
    ):
        return batch.filled(ref_log_probs_X=reference_log_probs(learner.reference, batch, config.rollout.temperature))


def _update_policy(
    learner: Learner, count: StepCount, batch: TrainingBatch, clock: Stopwatch, before_first_step: BeforeFirstStep
) -> PolicyUpdate:
    if learner.activations is not None:
        learner.activations.prepare(batch)
    config = learner.config
    with clock.stage("update"), executing(learner.policy, batch, config.plan, learner.cluster) as context:
        update = update_policy(
            learner.policy.trained,
            learner.optimizer,
            batch,
            context,
            learner.loss,
            config.update,
            count=count,
            num_ranks=dist.get_world_size(),
            before_first_step=before_first_step,
        )
        clock.keep_execution("update", context)
        return replace(update, ran_at_home=context.ran_at_home, live=context.live)
