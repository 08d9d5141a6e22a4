"""What runs around the micro-batches of a step: a plan, live balancing with the run's settings, or nothing."""

from contextlib import nullcontext
from unittest import mock

import pytest
from torch import nn

from relibra.cluster import cluster_preset
from relibra.rl.batch import training_batch
from relibra.rl.batch.training_batch import TrainingBatch, executing
from relibra.rl.model.policy import Policy
from tests.rl.ranks_at_work import tiny_config

MODEL = nn.Linear(1, 1)
LIVE = {"slots": 3, "ranks_per_node": 2, "tolerance": 0.02, "sums": "canonical", "dispatch": "flat"}


@pytest.mark.parametrize(
    ("balancer", "balanced", "slots"),
    [("live", True, 3), ("live", False, None), ("relibra", True, 3), ("static", True, 0)],
)
def test_without_a_plan_balanced_layers_balance_live(balancer, balanced, slots):
    words = (f"plan.balancer={balancer}", "plan.slots=3", "plan.tolerance=0.02", "plan.sums=canonical")
    policy = mock.Mock(spec=Policy, trained=MODEL)
    batch = mock.Mock(spec=TrainingBatch, plan=None)
    with (
        mock.patch.object(training_batch, "is_balanced", return_value=balanced),
        mock.patch.object(training_batch, "balance_live", return_value=nullcontext()) as balance_live,
        executing(policy, batch, tiny_config(*words).plan, cluster_preset("h100x8", 4, 2)) as execution,
    ):
        assert execution.ran_at_home == 0
    assert balance_live.mock_calls == ([] if slots is None else [mock.call(MODEL, **LIVE | {"slots": slots})])
