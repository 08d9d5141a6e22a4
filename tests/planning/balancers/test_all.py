"""What holds for every balancer."""

import numpy as np
import pytest
from hypothesis import given, settings

from relibra.planning.balancers import BALANCERS
from tests.planning.balancers.questions import ask, questions, rank_loads, spread

IN_PLACE = {"ultraep", "feplb", "llep", "popfetcher"}
LIVE = {"ultraep", "feplb", "foremoe", "balanced"}


@pytest.mark.parametrize("name", BALANCERS)
@settings(max_examples=25)
@given(question=questions())
def test_every_decision_is_legal_and_repeatable(name, question):
    decision = BALANCERS[name].decide(question)
    rank_loads(question, decision)
    again = BALANCERS[name].decide(question)
    for array in ("home_LE", "replica_MLRB", "quota_MLRB"):
        assert np.array_equal(getattr(decision, array), getattr(again, array))


@pytest.mark.parametrize("name", BALANCERS)
@settings(max_examples=10)
@given(question=questions())
def test_homes_stay_where_they_may_not_move(name, question):
    if not question.budget.move_homes or name in IN_PLACE:
        before_LE = np.argsort(question.previous_map, axis=1) // (
            question.previous_map.shape[1] // question.cluster.num_ranks
        )
        assert np.array_equal(BALANCERS[name].decide(question).home_LE, before_LE)


@pytest.mark.parametrize("name", sorted(LIVE))
@settings(max_examples=15)
@given(question=questions())
def test_whoever_knows_the_load_is_never_worse_than_no_replicas(name, question):
    decision = BALANCERS[name].decide(question)
    load_MLR = rank_loads(question, decision)
    M, L, R = load_MLR.shape
    for m, layer in np.ndindex(M, L):
        alone_R = np.zeros(R)
        np.add.at(alone_R, decision.home_LE[layer], question.demand.load_MLE[m, layer])
        assert load_MLR[m, layer].max() <= alone_R.max()


@pytest.mark.parametrize("name", sorted(set(BALANCERS) - {"static", "popfetcher"}))
def test_balancers_balance(name):
    rng = np.random.default_rng(0)
    load_MLE = rng.multinomial(64_000, rng.dirichlet(np.full(64, 0.5)), (4, 2))
    question = ask(spread(load_MLE, 8), 1, slots=2)
    before, after = (
        rank_loads(question, BALANCERS[key].decide(question)).max(axis=2).sum() for key in ("static", name)
    )
    assert after < 0.93 * before


def test_entries_say_what_they_follow():
    for name, entry in BALANCERS.items():
        assert entry.based_on, name
    for name in ("foremoe", "feplb", "flexmoe", "popfetcher"):
        assert BALANCERS[name].based_on.startswith("after ")
