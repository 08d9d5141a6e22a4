"""One RL iteration: rollout, reward, recompute, update, relocation and weight sync, and the gain of a faster stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int
from numpy import ndarray
from numpy.random import Generator

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.simulation.cost_model import weight_sync_seconds
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.rollout import Draw, decode_cost, decode_in_windows, decode_whole, prefill_seconds
from relibra.simulation.step.step_result import SimulatedStep

STAGES = ("rollout", "reward", "recompute", "relocation", "update", "weight sync")
_WINDOW_STEPS, _WINDOW_BURN_IN = 20, 10


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Rollout engines of one job.

    num_engines   each with a copy of the model
    ranks         of one engine, which share that copy
    slots         responses that one engine decodes at a time
    raises        ConfigError for numbers below 1
    """

    num_engines: int
    ranks: int
    slots: int

    def __post_init__(self) -> None:
        for name in ("num_engines", "ranks", "slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engines have {name} {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SimulatedRollout:
    """Seconds of the rollout of one iteration, of the slowest engine.

    decode, prefill, fed_again   seconds; `fed_again`: to prefill again the responses that a window or new weights cut
    tokens                       decoded by all engines
    idle                         share of slots x decode steps without a response, mean over engines
    """

    decode: float
    prefill: float
    fed_again: float
    tokens: int
    idle: float

    @property
    def seconds(self) -> float:
        """Return decode, prefill and tokens fed again together."""
        return self.decode + self.prefill + self.fed_again


def simulate_rollout(
    lengths_S: Int[ndarray, " S"], prompt_tokens: float, engines: Engines, model: ModelShape, cluster: Cluster
) -> SimulatedRollout:
    """Return the rollout of responses of known lengths; response s goes to engine s modulo the number of engines.

    prompt_tokens   mean length of a prompt
    cluster         whose ranks the engines run on
    """
    cost = decode_cost(model, cluster, engines.ranks, prompt_tokens + _mean_context(lengths_S))
    parts = [lengths_S[engine :: engines.num_engines] for engine in range(engines.num_engines)]
    decoded = [decode_whole(part_S, engines.slots) for part_S in parts]
    prefill = [
        prefill_seconds(model, cluster, engines.ranks, np.full(len(part_S), round(prompt_tokens))) for part_S in parts
    ]
    seconds = [cost.seconds(item.decode_steps, item.tokens) for item in decoded]
    slowest = int(np.argmax(np.add(seconds, prefill)))
    return SimulatedRollout(
        decode=seconds[slowest],
        prefill=prefill[slowest],
        fed_again=0.0,
        tokens=int(lengths_S.sum()),
        idle=float(np.mean([item.idle for item in decoded])),
    )


def rollout_ahead(
    rollout: SimulatedRollout,
    lengths_S: Int[ndarray, " S"],
    prompt_tokens: float,
    engines: Engines,
    model: ModelShape,
    cluster: Cluster,
) -> SimulatedRollout:
    """Return the rollout of an iteration whose engines sample the next batch beside the update, on ranks of their own.

    Responses of the next batch fill the slots of those that ended. At each push of weights responses under way are cut,
    and their tokens so far fed again.

    rollout    the same responses where the update waits for them (`simulate_rollout`)
    """
    cut = np.full(min(engines.slots, len(lengths_S)), round(prompt_tokens + _mean_context(lengths_S)))
    again = prefill_seconds(model, cluster, engines.ranks, cut)
    return replace(rollout, decode=rollout.decode * (1 - rollout.idle), fed_again=again, idle=0.0)


def simulate_windowed_rollout(
    draw: Draw,
    window: int,
    prompt_tokens: float,
    engines: Engines,
    model: ModelShape,
    cluster: Cluster,
    *,
    rng: Generator,
) -> SimulatedRollout:
    """Return a rollout of at most `window` tokens per response (T-PPO): the mean of several iterations after a burn-in.

    Slots stay full: in the next iteration a new response replaces one that ended, and one that was cut continues after
    its earlier tokens are prefilled again.

    draw    lengths of whole responses
    """
    own = [
        decode_in_windows(draw, engines.slots, window, rng, steps=_WINDOW_STEPS, burn_in=_WINDOW_BURN_IN)
        for _ in range(engines.num_engines)
    ]
    context = prompt_tokens + _mean_context(draw(1000, rng))
    cost = decode_cost(model, cluster, engines.ranks, context)
    seconds = [cost.seconds(item.decode_steps, item.tokens) / _WINDOW_STEPS for item in own]
    slowest = int(np.argmax(seconds))
    decoded = own[slowest]
    fed_again = 0.0
    if decoded.continued:
        again = np.full(decoded.continued, round(decoded.fed_again / decoded.continued + prompt_tokens))
        fed_again = prefill_seconds(model, cluster, engines.ranks, again) / _WINDOW_STEPS
    fresh = np.full(decoded.slots - decoded.continued, round(prompt_tokens))
    return SimulatedRollout(
        decode=seconds[slowest],
        prefill=prefill_seconds(model, cluster, engines.ranks, fresh) / _WINDOW_STEPS,
        fed_again=fed_again,
        tokens=round(sum(each.tokens for each in own) / _WINDOW_STEPS),
        idle=float(np.mean([each.idle(engines.slots) for each in own])),
    )


def _mean_context(lengths_S: Int[ndarray, " S"]) -> float:
    """Return the position of a decoded token in its response, mean over all decoded tokens."""
    total = float(lengths_S.sum())
    return float((lengths_S.astype(np.float64) ** 2).sum()) / (2 * total) if total else 0.0


@dataclass(frozen=True, kw_only=True)
class RlIteration:
    """Seconds of one RL iteration by stage (STAGES), one after the other (label `simulated`)."""

    stages: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Return the seconds of all stages."""
        return sum(self.stages.values())

    def share(self, stage: str) -> float:
        """Return the share of a stage, such as "rollout"."""
        return self.stages[stage] / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, object]:
        """Return the figures of a table or a JSON file."""
        return {
            "label": "simulated",
            "seconds": self.seconds,
            "stages": dict(self.stages),
            "rollout_share": self.share("rollout"),
        }


def rl_iteration(
    rollout: SimulatedRollout,
    update: SimulatedStep,
    model: ModelShape,
    cluster: Cluster,
    engines: Engines,
    *,
    recompute: SimulatedStep | None = None,
    reward_seconds: float = 0.0,
) -> RlIteration:
    """Return the iteration of these stages; planning is hidden behind reward and the first micro-batches.

    update       with `Execution(mini_batches=...)`; its relocation is the iteration's
    recompute    with `Execution(forward_only=True)`; replicas and schedule of its own, homes of the update's plan: they
                 move once, before it. None: no log-probabilities are computed again
    """
    moved = update.terms["relocation"]
    again = 0.0 if recompute is None else recompute.seconds_without_relocation
    return RlIteration(
        stages={
            "rollout": rollout.seconds,
            "reward": reward_seconds,
            "recompute": again,
            "relocation": moved,
            "update": update.seconds - moved,
            "weight sync": weight_sync_seconds(model, cluster, engines.ranks),
        }
    )


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Gain of one iteration over another: stage by stage, training stages together, and end to end.

    stages          seconds before / after of each stage that both have
    training        recompute, relocation and update together
    end_to_end      the whole iteration
    rollout_share   of the iteration before
    """

    stages: Mapping[str, float]
    training: float
    end_to_end: float
    rollout_share: float

    def __str__(self) -> str:
        return (
            f"training {self.training:.2f}x, end to end {self.end_to_end:.2f}x with a rollout share of "
            f"{self.rollout_share:.0%}"
        )


def speedup(before: RlIteration, after: RlIteration) -> Speedup:
    """Return the speed-up from one iteration to another."""
    training = ("recompute", "relocation", "update")
    seconds = [sum(item.stages[name] for name in training) for item in (before, after)]
    return Speedup(
        stages={name: before.stages[name] / after.stages[name] for name in STAGES if after.stages[name]},
        training=seconds[0] / seconds[1] if seconds[1] else 1.0,
        end_to_end=before.seconds / after.seconds if after.seconds else 1.0,
        rollout_share=before.share("rollout"),
    )


def end_to_end_speedup(stage_speedup: float, other_share: float) -> float:
    """Return the end-to-end speed-up when all but `other_share` of the time gets faster (Amdahl).

    >>> round(end_to_end_speedup(1.8, 0.3), 2)
    1.45
    """
    return 1 / (other_share + (1 - other_share) / stage_speedup)


def needed_stage_speedup(end_to_end: float, other_share: float) -> float:
    """Return the stage speed-up needed for an end-to-end one (Amdahl); infinite where none is enough.

    >>> [round(needed_stage_speedup(1.45, share), 1) for share in (0.2, 0.3, 0.4, 0.5, 0.6)]
    [1.6, 1.8, 2.1, 2.6, 4.5]
    """
    left = 1 / end_to_end - other_share
    return (1 - other_share) / left if left > 0 else float("inf")
