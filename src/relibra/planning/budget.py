"""`Budget`: what a plan may use. Its defaults are those of `relibra train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from relibra.errors import PlanError
from relibra.planning.costs.expert_shape import GradientWire

MOST_SLOTS, MOST_TOLERANCE = 64, 10
"""Slots per rank and tolerance, at most: what plans, runs and live balancing take."""
DEFAULT_MODEL = "qwen3-30b-a3b"
"""Model whose expert sizes are used where none is named: by `plan_step`, commands without `--model`, pages."""
PEER_SLOTS = 2
"""Slots per rank of balancers that do not choose a number, where the budget gives none."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Levers and limits of a plan.

    slots           most slots per rank for replicas; 0 turns replicas off; None: as many as memory allows and as pay
    memory_gib      most memory of a rank for slots of layers, with their gradient sums; None: half of what the experts
                    leave (`planner.memory_beside_experts`). Slots of all layers are made in any case
    move_homes      experts may change their home rank between steps
    pack_samples    samples may change micro-batch and rank; the gradient of a step is the same sum
    tolerance       accepted load of the busiest rank above the lowest reachable, as a share; larger: fewer copies
    steps_served    steps that new homes are expected to serve: each is charged this part of the moves
    gradient_wire   type in which gradients of replicas travel home
    rank_tokens     most tokens of a rank in a micro-batch; a longer sample is alone there. None: as many as the
                    fullest rank of the given schedule has

    raises    PlanError for values out of range
    """

    slots: int | None = None
    memory_gib: float | None = None
    move_homes: bool = True
    pack_samples: bool = True
    tolerance: float = 0.01
    steps_served: int = 10
    gradient_wire: GradientWire = "model"
    rank_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise PlanError for values out of range."""
        for name in ("slots", "steps_served", "rank_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise PlanError(f"budget {name} is {value!r}: it must be a whole number")
        if self.slots is not None and not 0 <= self.slots <= MOST_SLOTS:
            raise PlanError(f"budget of {self.slots} slots per rank: allowed are 0 (no replicas) to {MOST_SLOTS}")
        if self.memory_gib is not None and not 0 <= self.memory_gib <= 1 << 20:
            raise PlanError(f"budget memory_gib is {self.memory_gib}: allowed are 0 to {1 << 20}")
        if self.steps_served < 1:
            raise PlanError(f"budget steps_served is {self.steps_served}: new homes serve at least 1 step")
        if not 0 <= self.tolerance <= MOST_TOLERANCE:
            raise PlanError(f"budget tolerance is {self.tolerance}: allowed are shares from 0 to {MOST_TOLERANCE}")
        if self.gradient_wire not in get_args(GradientWire):
            raise PlanError(f"budget gradient_wire is {self.gradient_wire!r}: allowed are 'model' and 'float32'")
        if self.rank_tokens is not None and self.rank_tokens < 1:
            raise PlanError(
                f"budget of {self.rank_tokens} tokens per rank: at least 1, or None for the given schedule's"
            )
