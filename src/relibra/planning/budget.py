"""`Budget`: slots, levers, time and objective of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from relibra.errors import PlanError
from relibra.planning.costs.expert_shape import ExpertShape

if TYPE_CHECKING:
    from relibra.cluster import Cluster

Objective = Literal["seconds", "tokens"]
MOST_SLOTS, MOST_TOLERANCE = 64, 10
"""Spare slots per rank and tolerance, at most: what plans, runs and live balancing take."""
SLOT_MEMORY = 0.1
"""Share of the device memory that slots may take where nothing else is said."""
DEFAULT_MODEL = "qwen3-30b-a3b"
"""Model whose expert sizes are used where none is named: by `plan_step`, commands without `--model`, pages."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Slots, levers, time and objective of a balancer for one step.

    The defaults: two slots shared by all layers, no resident slots, homes and source ranks may change, no tolerance,
    moves paid by one step. The objective follows from the `expert` of `plan_step`: seconds if given, else tokens. So
    what a program compares or proves does not depend on what suits a run. Runs and the command line use `RUN_DEFAULTS`.

    slots               B, spare expert slots per rank for replicas; 0 turns replicas off
    resident_slots      of these, the slots that every layer has for itself, so that replicas stay over micro-batches;
                        None: the largest number that fits into `memory_gib`
    fewer_resident      internal, set when the number came from memory: a plan in seconds with several groups of fewer
                        than 4 micro-batches on average (mini-batches) then tries all, half and none
    memory_gib          limit for resident slots, with weights and fp32 gradients: as many are resident as fit together
                        with the shared ones. Shared slots are made in any case
    objective           "seconds": modelled step time; "tokens": sum over micro-batches and layers of the busiest rank;
                        None: seconds if the size of an expert is given, else tokens
    move_homes          experts may change their home rank between steps
    place_samples       samples may change their source rank inside their micro-batch
    pack_samples        samples may change their micro-batch; the gradient of a step is the same sum
    cross_node_copies   replicas may be on another node than their home: weights and gradients then cross the network
    tolerance           the busiest rank may exceed the lowest reachable load by this share; larger: fewer copies
    static_rows         ranks pad what they compute in a layer to the rows of the busiest rank of the step: shapes are
                        the same in all micro-batches, at the price of computed padding
    rank_tokens         most tokens of a rank in a micro-batch; a longer sample is alone there. None: as many as the
                        fullest rank of the given schedule has
    steps_served        steps that new homes are expected to serve: each is charged this part of the moves
    token_slack         share by which packing may exceed the tokens of the largest micro-batch of the given schedule
    deadline_seconds    stop improving after this long and return the best plan so far; None: no limit. A plan under a
                        deadline may differ from run to run
    threads             layers planned at the same time; None: the cores of this process
    seed                seed of the annealing; same seed, same plan

    raises    PlanError for values out of range
    """

    slots: int = 2
    resident_slots: int | None = None
    fewer_resident: bool = False
    memory_gib: float = 0.0
    objective: Objective | None = None
    move_homes: bool = True
    place_samples: bool = True
    pack_samples: bool = False
    cross_node_copies: bool = False
    tolerance: float = 0.0
    static_rows: bool = False
    rank_tokens: int | None = None
    steps_served: int = 1
    token_slack: float = 0.02
    deadline_seconds: float | None = None
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise PlanError for values out of range."""
        for name in ("slots", "resident_slots", "steps_served", "seed", "threads", "rank_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise PlanError(f"budget {name} is {value!r}: it must be a whole number")
        if not 0 <= self.slots <= MOST_SLOTS:
            raise PlanError(f"budget of {self.slots} slots per rank: allowed are 0 (no replicas) to {MOST_SLOTS}")
        if self.resident_slots is not None and not 0 <= self.resident_slots <= self.slots:
            raise PlanError(f"{self.resident_slots} resident slots: allowed are 0 to {self.slots}, the slots per rank")
        if not 0 <= self.memory_gib <= 1 << 20:
            raise PlanError(f"budget memory_gib is {self.memory_gib}: allowed are 0 to {1 << 20}")
        if self.steps_served < 1:
            raise PlanError(f"budget steps_served is {self.steps_served}: new homes serve at least 1 step")
        if self.objective not in ("seconds", "tokens", None):
            raise PlanError(f"objective {self.objective!r} is unknown: allowed are 'seconds' and 'tokens'")
        for name in ("tolerance", "token_slack"):
            if not 0 <= getattr(self, name) <= MOST_TOLERANCE:
                raise PlanError(
                    f"budget {name} is {getattr(self, name)}: allowed are shares from 0 to {MOST_TOLERANCE}"
                )
        if self.deadline_seconds is not None and not 0 < self.deadline_seconds < float("inf"):
            raise PlanError(f"deadline of {self.deadline_seconds} seconds: it must be above 0, or None for no limit")
        if self.rank_tokens is not None and self.rank_tokens < 1:
            raise PlanError(
                f"budget of {self.rank_tokens} tokens per rank: at least 1, or None for the given schedule's"
            )
        if self.threads is not None and self.threads < 1:
            raise PlanError(f"{self.threads} planner threads: at least 1, or None for all cores")
        if not isinstance(self.static_rows, bool):
            raise PlanError(f"budget static_rows is {self.static_rows!r}: it must be True or False")
        if self.seed < 0:
            raise PlanError(f"seed {self.seed}: it must be 0 or more")

    def with_resident_slots(self, expert: ExpertShape, num_layers: int) -> Budget:
        """Return the budget with `resident_slots` set: as given, or the largest number that fits into `memory_gib`.

        A resident slot needs the memory of an expert in every layer, all shared slots together that of one layer.

        num_layers   MoE layers on a rank, also where only some of them are planned
        """
        if self.resident_slots is not None:
            return self
        one = (expert.weight_bytes + expert.gradient_bytes) / 2**30
        fitting = [n for n in range(self.slots + 1) if (n * num_layers + self.slots - n) * one <= self.memory_gib]
        return replace(self, resident_slots=max(fitting, default=0), fewer_resident=True)


RUN_DEFAULTS = Budget(
    slots=4,
    objective="seconds",
    pack_samples=True,
    place_samples=True,
    cross_node_copies=True,
    tolerance=0.01,
    steps_served=10,
)
"""What a step may use if nothing else is said: in runs (`PlanSettings`) and in `relibra plan`, `simulate`, `sweep` and
`compare`.

Copies cross nodes for the objective in seconds only, where they are priced. Memory for slots: `slot_memory_gib`.
"""


def slot_memory_gib(cluster: Cluster) -> float:
    """Return the most memory of a rank for slots where nothing else is said: a tenth of the device memory."""
    return SLOT_MEMORY * cluster.memory_bytes / 2**30
