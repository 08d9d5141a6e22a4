"""What holds for every balancer."""

import numpy as np
import pytest
from hypothesis import given, settings

from relibra.planning.registry import BALANCERS
from tests.planning.balancers.requests import ask, rank_loads, requests, spread

IN_PLACE = {"ultraep", "ultraep_shipped", "moonep", "moonep_node", "feplb", "llep", "popfetcher"}
SEE_LOADS = {"ultraep", "ultraep_shipped", "moonep", "moonep_node", "feplb", "foremoe", "balanced"}


@pytest.mark.parametrize("name", BALANCERS)
@settings(max_examples=25)
@given(request=requests())
def test_every_decision_is_legal_and_repeatable(name, request):
    placement = BALANCERS[name].decide(request)
    rank_loads(request, placement)
    E, R, B = request.demand.num_experts, request.cluster.num_ranks, request.budget.slots
    if name != "relibra":  # it chooses a number up to the budget's
        assert placement.slots == (E // R if B and BALANCERS[name].own_slots else B)
    assert placement.slots <= max(B, E // R)
    again = BALANCERS[name].decide(request)
    for array in ("home_LE", "replica_MLRB", "quota_MLRB"):
        assert np.array_equal(getattr(placement, array), getattr(again, array))


@pytest.mark.parametrize("name", BALANCERS)
@settings(max_examples=10)
@given(request=requests())
def test_homes_stay_where_they_may_not_move(name, request):
    if not request.budget.move_homes or name in IN_PLACE:
        before_LE = np.argsort(request.previous.physical_to_logical_map, axis=1) // (
            request.previous.physical_to_logical_map.shape[1] // request.cluster.num_ranks
        )
        assert np.array_equal(BALANCERS[name].decide(request).home_LE, before_LE)


@pytest.mark.parametrize("name", sorted(SEE_LOADS))
@settings(max_examples=15)
@given(request=requests())
def test_balancers_that_see_loads_never_raise_the_maximum(name, request):
    placement = BALANCERS[name].decide(request)
    load_MLR = rank_loads(request, placement)
    M, L, R = load_MLR.shape
    for m, layer in np.ndindex(M, L):
        alone_R = np.zeros(R)
        np.add.at(alone_R, placement.home_LE[layer], request.demand.load_MLE[m, layer])
        assert load_MLR[m, layer].max() <= alone_R.max()


@pytest.mark.parametrize("name", sorted(set(BALANCERS) - {"static", "popfetcher"}))
def test_balancers_balance(name):
    rng = np.random.default_rng(0)
    load_MLE = rng.multinomial(64_000, rng.dirichlet(np.full(64, 0.5)), (4, 2))
    request = ask(spread(load_MLE, 8), 1, slots=2)
    before, after = (rank_loads(request, BALANCERS[key].decide(request)).max(axis=2).sum() for key in ("static", name))
    assert after < 0.93 * before


def test_entries_say_what_they_follow():
    for name, entry in BALANCERS.items():
        assert entry.based_on, name
    for name in ("foremoe", "feplb", "flexmoe", "popfetcher"):
        assert BALANCERS[name].based_on.startswith("after ")
