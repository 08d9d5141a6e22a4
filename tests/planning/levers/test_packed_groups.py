"""Packing by groups of micro-batches: the work of a step does not grow with its groups."""

from dataclasses import replace

import numpy as np

from relibra.planning.balancer import PlacementRequest
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import EXPERT_SHAPES
from relibra.planning.levers import packing
from relibra.planning.placement import static_homes
from tests.planning.cases import cluster, make_demand

MACHINE, MICRO_BATCHES = cluster(2, 2), 16


def packed(group_M):
    """Pack a step of 256 samples in the static layout."""
    demand = make_demand(256, 2, 8, MICRO_BATCHES, MACHINE.num_ranks, 0)
    demand = replace(demand, group_M=group_M)
    homes = static_homes(MACHINE.topology, demand.layer_ids, demand.num_experts)
    request = PlacementRequest(
        demand=demand,
        cluster=MACHINE,
        budget=Budget(),
        expert=EXPERT_SHAPES["qwen3-30b-a3b"],
        memory_gib=0.0,
        previous=homes,
        total_LE=demand.load_MLE.sum(axis=0).astype(np.float64),
    )
    return demand, packing.pack_groups(request, demand, homes.home_LE)


def groups_of(number):
    return (np.arange(MICRO_BATCHES) * number // MICRO_BATCHES).astype(np.int32)


def test_groups_share_the_proposals_of_one_group(monkeypatch):
    calls = []

    def count(load_SLN, *arguments, proposals, **options):
        calls.append((len(load_SLN), proposals))
        return pack_samples(load_SLN, *arguments, proposals=1000, **options)

    pack_samples = packing.pack_samples
    monkeypatch.setattr(packing, "pack_samples", count)
    packed(groups_of(1))
    (samples, whole), calls[:] = calls[0], []
    packed(groups_of(8))
    assert sum(size for size, _ in calls) == samples
    assert sum(proposals for _, proposals in calls) == whole
    assert min(proposals for _, proposals in calls) >= 4000


def test_one_group_is_packed_as_a_step_without_groups():
    (_, without), (_, one) = packed(None), packed(groups_of(1))
    assert np.array_equal(one.micro_batch_S, without.micro_batch_S)
    assert np.array_equal(one.rank_S, without.rank_S)


def test_samples_stay_in_their_group():
    before, after = packed(groups_of(4))
    group_M = groups_of(4)
    assert np.array_equal(group_M[after.micro_batch_S], group_M[before.micro_batch_S])
    assert not np.array_equal(after.micro_batch_S, before.micro_batch_S)
