"""A rank at another point of a step than the others: all of them get one error that says who is where."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from relibra import EngineError
from relibra.parallel import execute_plan
from relibra.parallel.agreement import LastForward, Point, explain_points, refuse_differences
from relibra.planning.traffic.rank_tables import Place
from relibra.replay import BatchRoutes
from tests.parallel.ranks_at_work import load, on_ranks
from tests.parallel.steps import step

NO_SAMPLE_ON_RANK_1 = ([0, 0, 1, 1], [0, 0, 0, 1])


def test_ranks_and_points_are_named():
    told_RX = [
        (Point.BACKWARD, 3, LastForward.WITH_GRADIENTS),
        (Point.MICRO_BATCH, 4, LastForward.WITHOUT_GRADIENTS),
        (Point.BACKWARD, 3, LastForward.WITH_GRADIENTS),
        (Point.RELOCATE, -1, LastForward.WITHOUT_GRADIENTS),
    ]
    message = explain_points(told_RX)
    assert "begins the backward pass of micro-batch 3: ranks [0, 2]" in message
    assert "enters micro-batch 4 after a forward pass without gradients: ranks [1]" in message
    assert "moves experts (relocate): ranks [3]" in message


def test_modes_that_differ_name_the_ranks():
    told_RX = torch.tensor([[1, 1], [1, 0], [1, 1]])
    with pytest.raises(EngineError, match=r"ranks differ in gradients, by rank \[1, 0, 1\]"):
        refuse_differences(Place(0, -1, 2), told_RX, ("training mode", "gradients"))
    refuse_differences(Place(0, -1, 2), told_RX[:, :1], ("training mode",))


def differ(case, folder, *, kind: str, rank: int, micro_batch: int) -> str:
    """Run a step in which one rank leaves out a backward pass, or has no gradients; return what this rank is told."""
    model, own = load(case, folder), dist.get_rank()
    try:
        with execute_plan(model, case.plan, case.demand) as execution:
            for m in range(len(case.plan.replica_MLRB)):
                differs = (rank, micro_batch) == (own, m)
                samples, tokens_BN, mask_BN = case.batch(m, own)
                routes = BatchRoutes.padded(case.trace.select(samples), mask_BN) if samples else None
                attention = mask_BN if samples else torch.ones_like(mask_BN)
                with execution.micro_batch(m, routes):
                    with torch.no_grad() if differs and kind == "no_grad" else nullcontext():
                        logits = model(tokens_BN, attention_mask=attention, use_cache=False).logits
                    if not differs:
                        logits.square().mean().backward()
    except EngineError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "micro_batch", "checkpointing", "points"),
    [
        ("no_grad", 0, True, ("of micro-batch 0: ranks [0]", "enters micro-batch 1 after a forward pass without gr")),
        ("no backward", 0, False, ("of micro-batch 0: ranks [0]", "enters micro-batch 1: ranks [1]")),
        ("no backward", 1, True, ("of micro-batch 1: ranks [0]", "leaves execute_plan: ranks [1]")),
        ("idle", 0, False, ("of micro-batch 0: ranks [0]", "enters micro-batch 1: ranks [1]")),
    ],
)
def test_a_rank_without_a_backward_pass_ends_the_step_of_all(tmp_path, kind, micro_batch, checkpointing, points):
    schedule = {"schedule": NO_SAMPLE_ON_RANK_1} if kind == "idle" else {}
    case = step(replicas=[(1, 0, 0, 0.5), (0, 0, 6, 0.5)], checkpointing=checkpointing, **schedule)
    work = partial(differ, kind=kind, rank=1, micro_batch=micro_batch)
    told = on_ranks(2, {"step": case}, tmp_path, work)["step"]
    assert told[0] == told[1]
    assert all(part in told[0] for part in ("begins the backward pass", *points)), told[0]
