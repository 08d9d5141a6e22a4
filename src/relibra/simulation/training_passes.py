"""Passes of an iteration under one plan: their seconds and bytes, and what each lever changes.

A plan is simulated with activations recomputed, with all of them kept, and forward only; every choice of passes and
activations follows from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.cost_model import rows_and_scores, weight_sync_seconds
from relibra.simulation.memory import RESERVE, kept_bytes, memory_use
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.rollout import Engines, SimulatedRollout, rollout_ahead, simulate_rollout
from relibra.simulation.step.group_run import Execution, mini_batches_of
from relibra.simulation.step.step_result import SimulatedStep
from relibra.simulation.step.training_step import only_micro_batches, simulate_step, with_mini_batches

OldLogProbs = Literal["all", "later", "none"]
"""Mini-batches that get a pass of old log-probs: all; all but the first, whose update computes the same; none."""
Activations = Literal["recomputed", "kept", "chosen"]
"""Of the update: recomputed in all layers; kept whole in as many layers as fit; the fastest that fits."""
TRAINING = ("relocate", "recompute", "reference", "values", "update values", "update")
"""Stages that train."""
_FOR_WEIGHTS = 0.5
"""Share of a rank's memory that the weights of a rollout engine may take."""


@dataclass(frozen=True, kw_only=True)
class Levers:
    """Choices of an RL iteration: log-prob passes, activations, rollout ahead, reference and value model.

    ahead        steps by which the rollout may be ahead of the update; 0: one after the other
    reference    log-probs of a reference policy are computed
    values       a value model of the same size is evaluated and trained
    """

    old_log_probs: OldLogProbs = "all"
    activations: Activations = "recomputed"
    ahead: int = 0
    reference: bool = False
    values: bool = False


class Kept(NamedTuple):
    """Layers by what they keep for the backward pass; the others keep their input and recompute the rest.

    attention       layers that recompute their experts only
    everything      layers that recompute nothing
    host_moments    moments are in host memory between optimizer steps, and pass through the device in each
    """

    attention: int = 0
    everything: int = 0
    host_moments: bool = False

    def __str__(self) -> str:
        """Return it in words."""
        kinds = {"attention": self.attention, "everything": self.everything}
        words = [f"{name} of {number} layers" for name, number in kinds.items() if number]
        return ", ".join([*words, *["moments on the host"] * self.host_moments]) or "nothing"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingPasses:
    """Simulated passes of one plan, and their memory.

    update           the optimizer steps with activations recomputed; all_kept: with none recomputed
    forward          seconds of a pass over all mini-batches; later: over all but the first
    moment_seconds   transfers of moments offloaded to the host, of all optimizer steps (both directions overlap)
    parts            bytes of the fullest rank with activations recomputed
    layer_bytes      that a layer adds by keeping its attention, or everything; mean over layers
    room             bytes of a rank x the part of the model that these layers are, without the tenth that stays free
    """

    update: SimulatedStep
    all_kept: SimulatedStep
    forward: float
    later: float
    moment_seconds: float
    parts: Mapping[str, float]
    layer_bytes: tuple[float, float]
    layers: int
    room: float

    @property
    def layer_seconds(self) -> tuple[float, float]:
        """Seconds of a step that a layer saves by keeping its attention, or everything."""
        attention = self.update.terms["attention"] - self.all_kept.terms["attention"]
        return attention / self.layers, (self.update.seconds - self.all_kept.seconds) / self.layers

    def seconds(self, kept: Kept) -> float:
        """Return the seconds of the update, the moves of experts included."""
        attention, everything = self.layer_seconds
        saved = kept.attention * attention + kept.everything * everything
        return self.update.seconds - saved + kept.host_moments * self.moment_seconds

    def bytes(self, kept: Kept) -> float:
        """Return the bytes of the fullest rank."""
        attention, everything = self.layer_bytes
        added = kept.attention * attention + kept.everything * everything
        return sum(self.parts.values()) + added - kept.host_moments * self.parts["optimizer"]

    def choose(self, activations: Activations) -> Kept:
        """Return what the update keeps: the fastest choice that fits. Where none does, that with the fewest bytes.

        Layers are alike, so only counts are chosen. "chosen": for each count of layers that keep everything, attention
        is kept in as many other layers as fit; moments are on the device or on the host.
        """
        choices = [Kept()]
        for host in (False, True) if activations == "chosen" else (False,):
            for everything in range(0 if activations == "recomputed" else self.layers + 1):
                beside = Kept(everything=everything, host_moments=host)
                left = (self.room - self.bytes(beside)) // max(1.0, self.layer_bytes[0])
                attention = min(max(0, int(left)), self.layers - everything) if activations == "chosen" else 0
                choices.append(beside._replace(attention=attention))
        return min(choices, key=lambda kept: (max(self.room, self.bytes(kept)), self.seconds(kept), self.bytes(kept)))


def simulate_passes(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    how: Execution | None = None,
    *,
    steps_served: int = 1,
    distinct: DistinctRows | None = None,
) -> TrainingPasses:
    """Simulate the passes of a plan on one pipeline stage.

    demand          under the schedule of the plan; `group_M` are mini-batches
    how             its choice of activations is ignored, and so are its mini-batches where the demand has `group_M`
    steps_served    steps that share the moves of homes
    distinct        as for `simulate_step`
    raises          as `simulate_step`
    """
    demand, how = with_mini_batches(demand, how)
    later = np.arange(len(plan.bound_ML))[len(mini_batches_of(len(plan.bound_ML), how.mini_batches)[0]) :]
    forward_only = replace(how, forward_only=True, mini_batches=1)
    recomputing, keeping = (replace(how, recompute_activations=again) for again in (True, False))

    def simulated(execution: Execution) -> SimulatedStep:
        step = simulate_step(plan, demand, cluster, model, execution, distinct=distinct)
        return step.with_relocation_over(steps_served)

    after_first = 0.0
    if len(later):
        rows = None if distinct is None else distinct.of_micro_batches(later)
        own = only_micro_batches(plan, demand, later)
        step = simulate_step(*own, cluster, model, forward_only, distinct=rows)
        after_first = step.seconds_without_relocation
    parts, kept_parts = (memory_use(plan, demand, cluster, model, one).parts for one in (recomputing, keeping))
    tokens = float(rows_and_scores(plan, demand, model)[0].max(initial=0.0))
    inputs = model.expert.row_bytes * tokens  # kept in any case
    share = model.layers / (model.part_of or model.layers)
    return TrainingPasses(
        update=simulated(recomputing),
        all_kept=simulated(keeping),
        forward=simulated(forward_only).seconds_without_relocation,
        later=after_first,
        moment_seconds=how.num_mini_batches * float(cluster.host.seconds(parts["optimizer"])),
        parts=parts,
        layer_bytes=(kept_bytes(model)[0] * tokens - inputs, kept_parts["activations"] / model.layers - inputs),
        layers=model.layers,
        room=(1 - RESERVE) * share * cluster.memory_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class PredictedIteration:
    """Seconds of an iteration by stage, named as a run logs them, and its memory (label `simulated`).

    stages   one after the other. tail: idle slot time at the rollout's end; waits: of the update for the rollout
    beside   rollout, where it runs beside these
    bytes    of the fullest rank, those of reference and value model included; fits: a tenth of the memory stays free
    """

    stages: Mapping[str, float]
    beside: Mapping[str, float]
    kept: Kept
    bytes: float
    fits: bool

    @property
    def seconds(self) -> float:
        """Return the seconds of the iteration."""
        return sum(self.stages.values())

    @property
    def training(self) -> float:
        """Return the seconds of the stages that train."""
        return sum(self.stages[name] for name in TRAINING)


@dataclass(frozen=True, kw_only=True, eq=False)
class Iteration:
    """Stages of an iteration that its plan does not change.

    rollout   which the update waits for; rollout_beside: beside the update, on ranks of its own
    reward    seconds of the reward function; sync: of sending weights to all engines
    """

    rollout: SimulatedRollout
    rollout_beside: SimulatedRollout
    reward: float
    sync: float

    @staticmethod
    def of_lengths(
        rows_S: Int[ndarray, " S"],
        prompt_S: Int[ndarray, " S"],
        cluster: Cluster,
        model: ModelShape,
        reward: float = 0.0,
    ) -> Iteration:
        """Return the rollout, reward and weight-sync stages for responses of known lengths.

        All responses run at once; an engine is the fewest ranks of a node that hold the weights in half their memory.

        rows_S     tokens of prompt and response; prompt_S: of the prompt
        """
        G, weights = cluster.ranks_per_node, model.parameters * model.expert.bytes_per_value
        room = _FOR_WEIGHTS * cluster.memory_bytes
        ranks = next((n for n in range(1, G) if G % n == 0 and weights / n <= room), G)
        number = cluster.num_ranks // ranks
        engines = Engines(num_engines=number, ranks=ranks, slots=max(1, -(-len(rows_S) // number)))
        own_S, prompt = rows_S - prompt_S, float(prompt_S.mean()) if len(prompt_S) else 0.0
        rollout = simulate_rollout(own_S, prompt, engines, model, cluster)
        return Iteration(
            rollout=rollout,
            rollout_beside=rollout_ahead(rollout, own_S, prompt, engines, model, cluster),
            reward=reward,
            sync=weight_sync_seconds(model, cluster, ranks),
        )

    def predict(self, passes: TrainingPasses, levers: Levers) -> PredictedIteration:
        """Return the iteration of some levers."""
        more = {"weights": levers.reference + levers.values, "gradients": levers.values, "optimizer": levers.values}
        passes = replace(passes, parts={name: size * (1 + more.get(name, 0)) for name, size in passes.parts.items()})
        kept = passes.choose(levers.activations)
        moved, update = passes.update.terms["relocation"], passes.seconds(kept)
        training = {
            "relocate": moved,
            "recompute": {"all": passes.forward, "later": passes.later, "none": 0.0}[levers.old_log_probs],
            "reference": levers.reference * passes.forward,
            "values": levers.values * passes.forward,
            "update values": levers.values * (update - moved),
            "update": update - moved,
        }
        tail = self.rollout.idle * self.rollout.decode
        before = {"rollout": self.rollout.seconds - tail, "tail": tail}
        stages = {**before, "reward": self.reward, **training, "sync": self.sync}
        if levers.ahead:
            waits = max(0.0, self.rollout_beside.seconds - self.reward - sum(training.values()))
            before = {"rollout": self.rollout_beside.seconds}
            stages = {"reward": self.reward, **training, "sync": self.sync, "waits": waits}
        return PredictedIteration(
            stages=stages,
            beside=before if levers.ahead else {},
            kept=kept,
            bytes=(size := passes.bytes(kept)),
            fits=size <= passes.room,
        )
