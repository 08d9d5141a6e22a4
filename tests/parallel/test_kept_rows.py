"""What a rank keeps of prepared micro-batches: rows of the same plan, demand and routes; the first and latest stay."""

import gc
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from relibra.parallel import preparation
from relibra.parallel.preparation import Preparation, PreparedStep
from relibra.parallel.rows.prepared_rows import PreparedRows
from relibra.replay import BatchRoutes
from relibra.timeline import TimelineRecorder
from tests.parallel.steps import step


@pytest.fixture
def prepared():
    """A preparation on one rank of two whose rows have 1,000 bytes, and a step."""
    with (
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(preparation, "micro_batch_tables"),
        mock.patch.object(preparation, "prepare_rows") as prepare_rows,
        mock.patch.object(preparation, "KEPT_BYTES", 2500),
    ):
        prepare_rows.side_effect = lambda *_, **__: mock.Mock(spec=PreparedRows, numbers=torch.zeros(250).int())
        case = step()
        source = (case.plan, case.demand)
        one = Preparation(mock.Mock(spec=dist.ProcessGroup), torch.device("cpu"))
        yield (
            one,
            PreparedStep(
                source=source, plan=case.plan, demand=case.demand, chunk=None, recorder=TimelineRecorder(0, 1)
            ),
        )


def start(one, number, routes):
    one.start(number, routes)
    return one.wait_for(number)


def test_rows_are_kept_for_the_same_plan_demand_sums_and_routes(prepared):
    one, of_step = prepared
    routes, other = mock.Mock(spec=BatchRoutes), mock.Mock(spec=BatchRoutes)
    with one.of_step(of_step):
        start(one, 0, routes)
        start(one, 1, None)
    plan, demand = of_step.source
    assert one.holds(plan, demand, None, 0, routes)
    assert one.holds(plan, demand, None, 1, None)
    assert not one.holds(plan, demand, None, 0, other)
    assert not one.holds(plan, demand, None, 0, None)
    assert not one.holds(plan, demand, None, 1, routes)
    assert not one.holds(plan, demand, 128, 0, routes)
    assert not one.holds(replace(plan), demand, None, 0, routes)
    with one.of_step(replace(of_step, chunk=128)):
        assert not one.holds(plan, demand, 128, 0, routes)


def test_first_rows_and_latest_stay_within_the_limit(prepared):
    one, of_step = prepared
    kept = [mock.Mock(spec=BatchRoutes) for _ in range(5)]
    with one.of_step(of_step):
        for number, routes in enumerate(kept):
            start(one, number, routes)
    held = [one.holds(*of_step.source, None, number, routes) for number, routes in enumerate(kept)]
    assert held == [True, False, False, True, True]
    with one.of_step(of_step):  # the next pass finds the first ones
        assert one.holds(*of_step.source, None, 0, kept[0])
    del routes
    kept[4] = mock.Mock(spec=BatchRoutes)
    gc.collect()
    assert not one.holds(*of_step.source, None, 4, kept[4])


def test_an_error_is_raised_at_the_wait_and_not_kept(prepared):
    one, of_step = prepared
    with one.of_step(of_step), mock.patch.object(preparation, "prepare_rows", side_effect=OSError("gone")):
        with pytest.raises(OSError, match="gone"):
            start(one, 0, None)
        assert not one.holds(*of_step.source, None, 0, None)
    with one.of_step(of_step):
        start(one, 0, None)
        assert one.holds(*of_step.source, None, 0, None)
