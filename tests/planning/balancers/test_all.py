"""What holds for every balancer."""

import numpy as np
import pytest
from hypothesis import given, settings

from relibra.planning.registry import BALANCERS
from tests.examples import few_and_many
from tests.planning.balancers.requests import ask, rank_loads, requests, spread

IN_PLACE = {"ultraep", "ultraep_shipped", "moonep", "moonep_node", "feplb", "llep", "popfetcher"}
SEE_LOADS = {"ultraep", "ultraep_shipped", "moonep", "moonep_node", "feplb", "foremoe", "balanced"}


@few_and_many(10, 60)
@pytest.mark.parametrize("name", BALANCERS)
def test_every_decision_is_legal_and_repeatable(name, examples):
    @settings(max_examples=examples)
    @given(request=requests())
    def check(request):
        placement = BALANCERS[name].decide(request)
        load_MLR = rank_loads(request, placement)
        E, R, B = request.demand.num_experts, request.cluster.num_ranks, request.budget.slots
        if name != "relibra":  # it chooses a number up to the budget's
            assert placement.slots == (E // R if B and BALANCERS[name].own_slots else B)
        assert placement.slots <= max(B, E // R)
        again = BALANCERS[name].decide(request)
        for array in ("home_LE", "replica_MLRB", "quota_MLRB"):
            assert np.array_equal(getattr(placement, array), getattr(again, array))
        if not request.budget.move_homes or name in IN_PLACE:
            assert np.array_equal(placement.home_LE, request.previous.home_LE)
        if name in SEE_LOADS:  # the busiest rank is never above that of its homes alone
            for m, layer in np.ndindex(*load_MLR.shape[:2]):
                alone_R = np.bincount(placement.home_LE[layer], request.demand.load_MLE[m, layer], R)
                assert load_MLR[m, layer].max() <= alone_R.max()

    check()


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
