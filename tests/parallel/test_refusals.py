"""Whoever asks for what cannot be done gets a sentence, on the rank that sees it, and nobody waits forever."""

import pytest

from .ranks_at_work import on_ranks
from .refusals import one_rank_is_wrong, refuse_all
from .steps import step

pytestmark = pytest.mark.slow

EXPECTED = {
    "wrong routes": ("EngineError: layer 0, micro-batch 0, rank ", "was planned to get", "replay the routes"),
    "wrong micro-batch": ("EngineError: the plan has micro-batches 0 to 1, not 5",),
    "micro-batch in micro-batch": ("EngineError: micro-batch 1 begins inside micro-batch 0",),
    "plan in plan": ("EngineError: the model is executing another plan",),
    "moved homes": ("EngineError: the plan moves homes in layers [0, 1, 2]", "Budget(move_homes=False)"),
    "other layers": ("EngineError: the plan is for layers [1, 2, 3], the model has [0, 1, 2]",),
    "different plans": ("EngineError: ranks [1] hold another plan or demand than rank 0",),
    "illegal plan": ("PlanError: a quota is negative",),
    "valid_T of another batch": ("EngineError: layer 0, micro-batch 0, rank ", "valid_T has 3 rows"),
    "all_to_all": ("EngineError: no experts of ", "relibra.parallel.register()"),
    "tensor parallelism": ("EngineError: ep_implementation 'relibra' does not run under tensor parallelism",),
    "recompute outside": ("EngineError: layer 2: activation checkpointing recomputes it outside of any micro-batch",),
    "afterwards": ("no error",),
}


def test_refusals_name_what_is_wrong_and_leave_the_model_usable(tmp_path):
    for messages in on_ranks(2, {"refusals": step()}, tmp_path, refuse_all)["refusals"]:
        assert messages.keys() == EXPECTED.keys()
        for name, message in messages.items():
            assert all(part in message for part in EXPECTED[name]), (name, message)


def test_one_wrong_rank_ends_the_step_of_all(tmp_path):
    (wrong, _), (other, seconds) = on_ranks(2, {"wrong": step()}, tmp_path, one_rank_is_wrong)["wrong"]
    assert wrong.startswith("EngineError: layer 0, micro-batch 0, rank 0: expert ")
    assert other != "no error"
    assert seconds < 30
