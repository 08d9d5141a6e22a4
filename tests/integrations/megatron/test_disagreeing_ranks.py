"""Ranks of a Megatron model that disagree about homes or routes: a sentence on each of them, and nothing has moved."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/guides/trainers.md")

from relibra.errors import RelibraError
from tests.integrations.megatron.ranks_at_work import EXPERTS, LAYERS, RANKS, build, make_plan, on_ranks, routes

pytestmark = pytest.mark.slow

LOGICAL = np.tile(np.arange(EXPERTS), (LAYERS, 1))


def swapped(first, second, layers=slice(None)):
    """Return the logical order with two experts exchanged."""
    map_LE = LOGICAL.copy()
    map_LE[layers, [first, second]] = map_LE[layers, [second, first]]
    return map_LE


def refuses_homes():
    """Return what each case says on this rank, and whether weights and maps are as they were."""
    from relibra.integrations.megatron.execution import planned_layers
    from relibra.integrations.megatron.homes import relocate

    found, own = {}, dist.get_rank()
    for name, map_LE in {
        "one rank stays": LOGICAL if own == 0 else swapped(0, 4, 0),
        "other experts": swapped(0, 4, 0) if own == 0 else swapped(1, 5, 0),
        "no permutation on one": swapped(0, 4) if own == 0 else np.zeros_like(LOGICAL),
        "states are missing in the second layer": swapped(0, 4),
    }.items():
        model = build(planned=True)
        layers, before = planned_layers([model]), [p.detach().clone() for p in model.parameters()]
        try:
            relocate([model], map_LE, states_of_one_layer(model, layers) if "states" in name else None)
            said = ""
        except RelibraError as error:
            said = str(error)
        kept = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        found[name] = (said, kept and all((la.physical_to_logical_E == LOGICAL[0]).all() for la in layers.values()))
    return found


def states_of_one_layer(model, layers):
    """Return an optimizer that has states of all experts but the first of the second layer."""
    without = {id(parameter.tensor) for parameter in layers[1].expert_parameters(0)}
    for parameter in model.parameters():
        parameter.grad = None if id(parameter) in without else torch.zeros_like(parameter)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    return optimizer


def refuses_routes():
    """Return what is said of routes that cannot be counted."""
    from megatron.core import parallel_state

    from relibra.integrations.megatron.execution import gather_demand

    found, own = {}, dist.get_rank()
    ids_TLK = np.zeros((4, 1, 1), dtype=np.int64)
    for name, (ids, layers) in {
        "out of range on one": (ids_TLK + (EXPERTS if own == 1 else 0), 1),
        "one layer for two": (ids_TLK, 2),
    }.items():
        try:
            group = parallel_state.get_expert_model_parallel_group()
            gather_demand([ids], group, num_experts=EXPERTS, layer_ids=np.arange(layers))
        except RelibraError as error:
            found[name] = str(error)
    return found


def refuses_plans():
    """Return what is said of a plan whose homes one rank has not moved to, and of two plans."""
    from relibra.integrations.megatron.execution import execute_plan, planned_layers

    found, own = {}, dist.get_rank()
    ids_MTLK = routes()
    plan, demand = make_plan(ids_MTLK)
    without_replicas, _ = make_plan(ids_MTLK, slots=0)
    other = replace(demand, sample_ids=demand.sample_ids + own)
    for name, (homes, of_rank, counted) in {
        "other homes on one": (swapped(0, 4) if own else LOGICAL, plan, demand),
        "two plans": (LOGICAL, without_replicas if own else plan, demand),
        "other demand on one": (LOGICAL, plan, other),
    }.items():
        model = build(planned=True)
        for layer, home_E in zip(planned_layers([model]).values(), homes, strict=True):
            layer.physical_to_logical_E = home_E
        try:
            with execute_plan([model], of_rank, counted):
                pass
        except RelibraError as error:
            found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_ranks([refuses_homes, refuses_routes, refuses_plans], tmp_path_factory.mktemp("disagreement"))


def test_nothing_moves_where_ranks_disagree_about_homes(found):
    expected = {
        "one rank stays": ["different maps of homes"] * RANKS,
        "other experts": ["different maps of homes"] * RANKS,
        "no permutation on one": ["expert-parallel ranks [1] say", "is no permutation"],
        "states are missing in the second layer": ["absent in some"] * RANKS,
    }
    for name, words in expected.items():
        for of_rank, word in zip(found["refuses_homes"], words, strict=True):
            said, kept = of_rank[name]
            assert word in said, name
            assert kept, name


def test_no_rank_waits_for_one_whose_routes_cannot_be_counted(found):
    first, second = found["refuses_routes"]
    assert "rank 1 cannot count its routes" in first["out of range on one"]
    assert "beyond the 8 experts" in second["out of range on one"]
    assert all("routes of 1 layers, and layer_ids names 2" in one["one layer for two"] for one in (first, second))


def test_no_rank_waits_for_one_whose_model_does_not_fit_the_plan(found):
    first, second = found["refuses_plans"]
    assert "does not fit the model: see what expert-parallel ranks [1] say" in first["other homes on one"]
    assert "experts are not at the homes of the plan" in second["other homes on one"]
    assert all("have different plans" in one["two plans"] for one in (first, second))
    assert "expert-parallel ranks [1] say" in first["other demand on one"]
    assert "another demand" in second["other demand on one"]
