"""The plan in the loop: what ranks tell each other, and one plan made of parts that each rank made."""

from dataclasses import replace

import numpy as np
import pytest

from relibra.cluster import cluster_preset
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from relibra.rl.batch.plan_budget import plan_budget
from relibra.rl.batch.step_plan import count_demand, gather_table, make_step_schedule, plan_together
from relibra.rl.config.run_config import load_config
from relibra.rl.run.step_trace import trace_of
from relibra.routing.demand import Demand
from tests.rl.joined import on_ranks
from tests.rl.made_up import EXPERTS, LAYERS, TOP_K, mini_batch_of, response_of

EXPERT, MEMORY = ExpertShape(hidden=64, width=32), 8.0
RESPONSES = [response_of(s, length=3 + s * 5 % 11, group=s // 3) for s in range(12)]


def config_of(*overrides, ranks=1):
    return load_config(
        None,
        [
            f"parallel.ranks={ranks}",
            "model.num_experts=8",
            "rollout.prompts_per_step=4",
            "rollout.responses_per_prompt=3",
            "update.mini_batches=2",
            "update.micro_batch_tokens=40",
            "plan.balancer=relibra_paper_tokens",
            *overrides,
        ],
    )


def schedule_of(table, config):
    return make_step_schedule(
        table, config.update, by_group=config.algorithm.advantage == "group", seed=config.run.seed
    )


def demand_of(responses, table, schedule):
    return count_demand(responses, table, schedule, num_experts=EXPERTS, layer_ids=range(LAYERS), top_k=TOP_K)


@pytest.mark.usefixtures("group")
def test_the_table_is_by_sample_id_and_finds_places():
    table = gather_table([RESPONSES[7], RESPONSES[2], RESPONSES[4]])
    assert table.sample_id_S.tolist() == [2, 4, 7]
    assert table.group_id_S.tolist() == [0, 1, 2]
    assert table.tokens_S.tolist() == [len(RESPONSES[s].tokens_n) - 1 for s in (2, 4, 7)]
    assert table.index_of([7, 2]).tolist() == [2, 0]
    assert gather_table([]).sample_id_S.tolist() == []


@pytest.mark.usefixtures("group")
def test_groups_stay_together_if_advantages_are_measured_in_them():
    table = gather_table(RESPONSES)
    by_group = mini_batch_of(schedule_of(table, config_of("algorithm.preset=grpo")))
    assert [len(set(group)) for group in by_group.reshape(4, 3).tolist()] == [1] * 4
    assert np.bincount(by_group).tolist() == [6, 6]
    uneven = mini_batch_of(schedule_of(table, config_of("algorithm.preset=ppo", "update.mini_batches=8")))
    assert np.bincount(uneven).tolist() == [2, 2, 2, 2, 1, 1, 1, 1]


@pytest.mark.usefixtures("group")
def test_lots_decide_the_mini_batch_the_same_when_repeated():
    table, settings = gather_table(RESPONSES), ("algorithm.preset=ppo", "update.mini_batches=6")
    dealt = mini_batch_of(schedule_of(table, config_of(*settings))).tolist()
    assert dealt == mini_batch_of(schedule_of(table, config_of(*settings))).tolist()
    assert dealt != sorted(dealt), "old responses would always be trained first"
    assert dealt != mini_batch_of(schedule_of(table, config_of(*settings, "run.seed=1"))).tolist()


@pytest.mark.usefixtures("group")
def test_the_demand_counts_every_fed_row_of_every_layer():
    table, config = gather_table(RESPONSES), config_of()
    schedule = schedule_of(table, config)
    demand = demand_of(RESPONSES, table, schedule)
    rows = sum(len(one.tokens_n) - 1 for one in RESPONSES)
    assert demand.load_MLE.sum(axis=(0, 2)).tolist() == [2 * rows] * LAYERS
    expected = Demand.from_trace(
        trace_of(RESPONSES, num_experts=EXPERTS, layer_ids=range(LAYERS), source="test")
    ).counts_SLE
    assert demand.counts_SLE.tolist() == expected.tolist()
    assert demand.group_M.tolist() == schedule.mini_batch_M.tolist()
    assert demand.length_S.tolist() == table.tokens_S.tolist()


@pytest.mark.usefixtures("group")
def test_a_plan_of_one_rank_is_that_of_the_planner():
    table, config = gather_table(RESPONSES), config_of()
    demand = demand_of(RESPONSES, table, schedule_of(table, config))
    plan = plan_together(demand, config.plan, cluster_preset("h100x8", 1, 1), EXPERT, None, memory_gib=MEMORY).plan
    validate_plan(plan, cluster_preset("h100x8", 1, 1).topology, demand)
    assert plan.digest() == whole_plan(demand, config, 1).digest()
    assert plan.demand_digest == demand.digest()


def whole_plan(demand, config, num_ranks, previous=None):
    """Plan all layers in one place; what the parts of the ranks are held against."""
    cluster = cluster_preset("h100x8", num_ranks, num_ranks)
    budget = replace(plan_budget(config.plan, MEMORY), pack_samples=False)
    return plan_step(demand, cluster, budget, config.plan.balancer, expert=EXPERT, previous=previous)


CASES = {
    "relibra": (),
    "no_copies": ("plan.slots=0",),
    "homes_stay": ("plan.move_homes=false",),
    "seconds": ("plan.balancer=relibra",),
    "eplb": ("plan.balancer=eplb",),
    "lplb": ("plan.balancer=lplb",),
    "canonical": ("plan.sums=canonical", "plan.balancer=static"),
}


def _plan_on_a_rank(_folder):
    """Make the plans of two steps in a row on this rank; return what they are beside those of a single planner."""
    import torch.distributed as dist

    rank, found, machine = dist.get_rank(), {}, cluster_preset("h100x8", 2, 2)
    own = RESPONSES[rank::2] if rank else []  # rank 0 has no response at all
    table = gather_table(own)
    for name, overrides in CASES.items():
        config, previous = config_of(*overrides, ranks=2), None
        schedule = schedule_of(table, config)
        demand = demand_of(own, table, schedule)
        for step in range(2):
            plan = plan_together(demand, config.plan, machine, EXPERT, previous, memory_gib=MEMORY).plan
            whole = whole_plan(demand, config, 2, previous)
            validate_plan(plan, machine.topology, demand)
            found[name, step] = {
                "digest": plan.digest(),
                "whole": whole.digest(),
                "skews": (plan.skew(demand), whole.skew(demand), plan.bound(demand), whole.bound(demand)),
                "moved": plan.num_moved,
                "copies": plan.num_copies,
                "resident": plan.resident,
            }
            previous = plan
    config, cluster = config_of(ranks=2), cluster_preset("h100x8", 2, 1)
    demand = demand_of(own, table, schedule_of(table, config))
    on_two_nodes = plan_together(demand, config.plan, cluster, EXPERT, None, memory_gib=MEMORY, rank_tokens=40).plan
    validate_plan(on_two_nodes, cluster.topology, demand, rank_tokens=40)  # responses are packed
    budget = replace(plan_budget(config.plan, MEMORY), rank_tokens=40)
    alone = plan_step(demand, cluster, budget, config.plan.balancer, expert=EXPERT)
    found["two nodes"] = on_two_nodes.digest(), alone.digest()
    return found


@pytest.mark.slow
def test_ranks_together_make_the_plan_of_a_single_planner(tmp_path):
    first, second = on_ranks(2, _plan_on_a_rank, tmp_path)
    assert first == second
    assert first["two nodes"][0] == first["two nodes"][1], "rank 0 plans for all"
    for case, found in first.items():
        if case != "two nodes":
            # the search for homes draws by the place of a layer, and parts fall back to the static layout on their own
            if case[0] == "canonical":
                assert found["digest"] == found["whole"], f"{case}: {found}"
            if case[0] != "seconds":
                assert found["skews"][0] <= 1.02 * found["skews"][1]
            assert found["skews"][2] <= found["skews"][0] + 1e-12
    assert first["no_copies", 0]["moved"] > 0
    assert first["homes_stay", 0]["copies"] > 0
    assert first["homes_stay", 0]["moved"] == first["no_copies", 0]["copies"] == 0
    assert first["no_copies", 1]["moved"] <= first["no_copies", 0]["moved"], "a second plan starts from the first"
