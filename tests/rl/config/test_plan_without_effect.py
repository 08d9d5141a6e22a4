"""A run says which settings of its plan do nothing, and where nothing balances it."""

import pytest

from relibra.rl.config.plan_without_effect import plan_settings_without_effect
from relibra.rl.config.run_config import load_config
from tests.rl.ranks_at_work import run_alone

OFF = "algorithm.replay=off"


def said(*overrides, experts=16, nodes=1):
    return plan_settings_without_effect(load_config(None, overrides), num_experts=experts, num_nodes=nodes)


LIVE, STATIC, ALONE = "plan.balancer=live", "plan.balancer=static", "parallel.ranks=1"
HIERARCHICAL, CANONICAL = "plan.dispatch=hierarchical", "plan.sums=canonical"
NOTHING = "nothing balances this run: "


@pytest.mark.parametrize(
    ("overrides", "sizes", "begin"),
    [
        ((), {}, []),
        (("plan.slots=2", "plan.balancer=eplb", CANONICAL), {}, []),
        ((STATIC,), {}, []),
        ((STATIC, OFF), {}, []),
        ((LIVE, OFF, "plan.slots=1"), {}, []),
        ((ALONE, OFF), {}, []),
        ((OFF,), {}, [NOTHING]),
        ((OFF, "plan.balancer=eplb", "plan.slots=2", CANONICAL), {}, [NOTHING, "plan.slots, plan.sums have no effect"]),
        ((LIVE, "plan.slots=0"), {}, [NOTHING]),
        (
            (LIVE, "plan.memory_gib=1", "plan.pack=false", "plan.tolerance=0.1"),
            {},
            ["plan.memory_gib, plan.pack have no effect: plan.balancer='live'"],
        ),
        ((HIERARCHICAL,), {}, ["plan.dispatch has no effect: all 2 ranks are on one node"]),
        ((HIERARCHICAL,), {"nodes": 2}, []),
        ((HIERARCHICAL, CANONICAL), {"nodes": 2}, ["plan.dispatch has no effect: with plan.sums='canonical'"]),
        ((OFF, "model.num_experts=0", LIVE), {"experts": 0}, ["plan.balancer has no effect: the model has no experts"]),
        ((ALONE, "plan.slots=2"), {}, ["plan.slots has no effect: one rank"]),
        ((STATIC, "plan.slots=2"), {}, ["plan.slots has no effect: plan.balancer='static'"]),
    ],
)
def test_settings_that_do_nothing_are_named_and_no_others(overrides, sizes, begin):
    found = said(*overrides, **sizes)
    assert len(found) == len(begin)
    assert all(sentence.startswith(start) for sentence, start in zip(found, begin, strict=True))


@pytest.mark.usefixtures("_leave_group")
def test_a_run_says_it_before_its_first_step(tmp_path, caplog):
    run_alone(("plan.tolerance=0.5", "run.steps=1", "warmup.steps=0"), tmp_path)
    assert "plan.tolerance has no effect: one rank has all experts" in caplog.text
