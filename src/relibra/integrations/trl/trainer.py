"""`PlannedGRPOTrainer`: TRL's `GRPOTrainer` with `PlannedGRPO`; importing this needs TRL."""

from __future__ import annotations

from relibra.errors import missing_packages
from relibra.integrations.trl.planned_grpo import PlannedGRPO

with missing_packages(__name__, "in the checkout, pip install -e '.[train,trl]'"):
    from trl import GRPOTrainer


class PlannedGRPOTrainer(PlannedGRPO, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with routing replay and plans; `PlannedGRPO` says what it takes beside TRL's arguments."""
