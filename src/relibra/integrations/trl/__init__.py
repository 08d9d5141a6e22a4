"""TRL: a `GRPOTrainer` that replays routes and follows a plan of each generation batch.

In: TRL's generation batches. Out: the same losses and gradients, with experts where the plan puts them. Open
`planned_grpo.py` first, then `generation_batches.py` (what is planned) and `plan_runner.py` (how it is executed).

PlannedGRPOTrainer   TRL's GRPOTrainer with routing replay and plans; loads on first use, which needs TRL
PlannedGRPO          the mixin that it is made of, for a trainer of your own: class Mine(PlannedGRPO, MyGRPOTrainer)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relibra.integrations.trl.planned_grpo import PlannedGRPO as PlannedGRPO
    from relibra.integrations.trl.trainer import PlannedGRPOTrainer as PlannedGRPOTrainer

_WHERE = {
    "PlannedGRPO": "relibra.integrations.trl.planned_grpo",
    "PlannedGRPOTrainer": "relibra.integrations.trl.trainer",
}

__all__ = ["PlannedGRPO", "PlannedGRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
