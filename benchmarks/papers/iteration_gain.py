"""Seconds of an RL iteration whose stages run one after another, and the gain of one over another (also Amdahl's)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relibra.cluster import Cluster
from relibra.simulation import Engines, ModelShape, SimulatedRollout, SimulatedStep
from relibra.simulation.cost_model import weight_sync_seconds

STAGES = ("rollout", "reward", "recompute", "relocation", "update", "weight sync")


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
