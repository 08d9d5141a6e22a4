"""`Budget`: what a plan may use. Its defaults are those of `relibra train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from relibra.errors import PlanError
from relibra.field_checks import check_fields
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
    memory_gib      most memory of a rank for resident slots, with their gradient sums; None: half of what the experts
                    leave (`planner.memory_beside_experts`). Shared slots are made in any case
    move_homes      experts may change their home rank between steps
    pack_samples    samples may change micro-batch and rank; the gradient of a step is the same sum
    tolerance       accepted load of the busiest rank above an even one, as a share; larger: fewer copies. The balancer
                    `relibra` tries 1, 5 and 20 times as much too, and keeps what takes the fewest seconds
    steps_served    steps that new homes are expected to serve: each is charged 1 / `steps_served` of the moves
    gradient_wire   type in which gradients of replicas travel home
    rank_tokens     most tokens of a rank in a micro-batch; a longer sample is alone there. None: as many as the
                    fullest rank of the given schedule has

    raises    PlanError for values out of range
    """

    slots: Annotated[int, Field(ge=0, le=MOST_SLOTS)] | None = None
    memory_gib: Annotated[float, Field(ge=0, le=1 << 20)] | None = None
    move_homes: bool = True
    pack_samples: bool = True
    tolerance: Annotated[float, Field(ge=0, le=MOST_TOLERANCE)] = 0.01
    steps_served: Annotated[int, Field(ge=1)] = 10
    gradient_wire: GradientWire = "model"
    rank_tokens: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(Budget, vars(self), "budget", PlanError)
