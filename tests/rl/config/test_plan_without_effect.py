"""A run says which settings of its plan do nothing, and where nothing balances it."""

import pytest

from relibra.rl.config.plan_without_effect import plan_settings_without_effect
from relibra.rl.config.run_config import load_config
from tests.rl.ranks_at_work import run_alone

OFF = "algorithm.replay=off"


def said(*overrides, experts=16, nodes=1):
    return plan_settings_without_effect(load_config(None, overrides), num_experts=experts, num_nodes=nodes)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("plan.slots=2", "plan.balancer=eplb", "plan.sums=canonical"),
        ("plan.balancer=static",),
        ("plan.balancer=static", OFF),
        ("plan.balancer=live", OFF, "plan.slots=1"),
        ("parallel.ranks=1", OFF),
    ],
)
def test_settings_that_all_do_something_are_not_named(overrides):
    assert not said(*overrides)


def test_without_replay_a_plan_balances_nothing():
    [sentence] = said(OFF)
    assert "nothing balances this run" in sentence
    assert "set plan.balancer=live" in sentence
    _, others = said(OFF, "plan.balancer=eplb", "plan.slots=2", "plan.sums=canonical")
    assert others.startswith("plan.slots, plan.sums have no effect")


def test_live_balancing_needs_slots():
    [sentence] = said("plan.balancer=live", "plan.slots=0")
    assert "nothing balances this run" in sentence
    assert "set plan.slots to 1 or more" in sentence


def test_live_balancing_follows_no_setting_of_whole_steps():
    [sentence] = said("plan.balancer=live", "plan.memory_gib=1", "plan.pack=false", "plan.tolerance=0.1")
    assert sentence.startswith("plan.memory_gib, plan.pack have no effect: plan.balancer='live'")


def test_hierarchical_dispatch_needs_several_nodes_and_fast_sums():
    [sentence] = said("plan.dispatch=hierarchical")
    assert sentence == "plan.dispatch has no effect: all 2 ranks are on one node"
    assert not said("plan.dispatch=hierarchical", nodes=2)
    [sentence] = said("plan.dispatch=hierarchical", "plan.sums=canonical", nodes=2)
    assert sentence.startswith("plan.dispatch has no effect: with plan.sums='canonical'")


@pytest.mark.parametrize(
    ("overrides", "experts", "why"),
    [
        (
            (OFF, "model.num_experts=0", "plan.balancer=live"),
            0,
            "plan.balancer has no effect: the model has no experts",
        ),
        (("parallel.ranks=1", "plan.slots=2"), 16, "plan.slots has no effect: one rank"),
        (("plan.balancer=static", "plan.slots=2"), 16, "plan.slots has no effect: plan.balancer='static'"),
    ],
)
def test_a_setting_that_does_nothing_is_named(overrides, experts, why):
    [sentence] = said(*overrides, experts=experts)
    assert sentence.startswith(why)


@pytest.mark.usefixtures("_leave_group")
def test_a_run_says_it_before_its_first_step(tmp_path, caplog):
    run_alone(("plan.tolerance=0.5", "run.steps=1", "warmup.steps=0"), tmp_path)
    assert "plan.tolerance has no effect: one rank has all experts" in caplog.text
