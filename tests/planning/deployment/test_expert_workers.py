"""Experts that are picked together on one worker: the search, copies, and which copy computes a choice."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import PlanError
from relibra.planning.deployment.deployment_files import read_expert_placement, write_expert_placement
from relibra.planning.deployment.expert_placement import ExpertPlacement
from relibra.planning.deployment.expert_workers import (
    add_row_copies,
    place_balanced,
    place_by_number,
    place_together,
    plan_placements,
)
from relibra.planning.deployment.worker_choice import choose_workers, count_traffic
from relibra.routing.readers import open_trace

DATA = Path(__file__).parents[4] / "shared" / "data"


def topical_choices(rng, tokens, experts, top_k, topics=4):
    """Return choices of tokens that have topics, each with experts of its own."""
    weight_XE = rng.gamma(0.4, size=(topics, experts)) + 0.02
    weight_TE = weight_XE[rng.integers(0, topics, tokens)] * rng.gumbel(size=(tokens, experts)).clip(-1, 6).__pow__(2)
    return np.argsort(-weight_TE, axis=1)[:, :top_k]


def rows_of(expert_TK, worker_E):
    return sum(len(set(worker_E[token])) for token in expert_TK)


def loads_of(expert_TK, worker_E, workers):
    return np.bincount(worker_E[expert_TK].ravel(), minlength=workers)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("top_k", [2, 3])
def test_search_is_within_3_percent_of_the_exhaustive_optimum(seed, top_k):
    rng = np.random.default_rng([seed, top_k])
    expert_TK = topical_choices(rng, 300, 8, top_k)
    start_E = place_balanced(np.bincount(expert_TK.ravel(), minlength=8), 2)
    limit = max(1.05 * expert_TK.size / 2, loads_of(expert_TK, start_E, 2).max())
    splits = [np.isin(np.arange(8), half).astype(int) for half in itertools.combinations(range(8), 4)]
    best = min(rows_of(expert_TK, one) for one in splits if loads_of(expert_TK, one, 2).max() <= limit)
    found_E = place_together(expert_TK, 8, 2, np.random.default_rng(0))
    assert loads_of(expert_TK, found_E, 2).max() <= limit
    assert best <= rows_of(expert_TK, found_E) <= 1.03 * best


@given(experts=st.integers(4, 14), workers=st.integers(1, 5), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=40)
def test_search_keeps_the_cap_and_never_adds_rows(experts, workers, seed):
    workers = min(workers, experts)
    expert_TK = topical_choices(np.random.default_rng(seed), 60, experts, 3)
    load_E = np.bincount(expert_TK.ravel(), minlength=experts)
    start_E = place_balanced(load_E, workers)
    found_E = place_together(expert_TK, experts, workers, np.random.default_rng(seed), starts=2)
    held_N = np.bincount(found_E, minlength=workers)
    assert 1 <= held_N.min() <= held_N.max() <= -(-experts // workers)
    limit = max(1.05 * expert_TK.size / workers, loads_of(expert_TK, start_E, workers).max())
    assert loads_of(expert_TK, found_E, workers).max() <= limit
    assert rows_of(expert_TK, found_E) <= rows_of(expert_TK, start_E)


@pytest.mark.parametrize("cap", [1.05, 1.34, 1.5, 4.0])
@pytest.mark.parametrize(
    ("experts", "workers", "top_k"), [(32, 20, 4), (32, 24, 4), (32, 12, 4), (128, 48, 8), (9, 4, 2), (6, 5, 1)]
)
def test_each_worker_keeps_an_expert(experts, workers, top_k, cap):
    expert_TK = topical_choices(np.random.default_rng(experts), 200, experts, top_k)
    start_E = place_balanced(np.bincount(expert_TK.ravel(), minlength=experts), workers)
    found_E = place_together(expert_TK, experts, workers, np.random.default_rng(0), cap=cap, starts=2)
    for worker_E in (start_E, found_E):
        held_N = np.bincount(worker_E, minlength=workers)
        assert 1 <= held_N.min() <= held_N.max() <= -(-experts // workers)


def test_experts_without_tokens_leave_no_worker_empty():
    assert set(place_balanced(np.array([5, 0, 0, 0, 0, 0]), 5)) == set(range(5))


def test_no_tokens_still_place_each_expert_once():
    for name, held_LNE in plan_placements(np.zeros((0, 2, 3), dtype=np.uint8), 6, 4, spare=1, cap=1.05).items():
        assert (held_LNE.sum(axis=1) == 1).all(), name
        assert held_LNE.any(axis=2).all(), name


def chosen_by_reference(expert_TK, held_NE, cap):
    """Choose as the docstring of `choose_workers` says, token by token."""
    workers, limit = range(len(held_NE)), cap * expert_TK.size / len(held_NE)
    load, chosen = dict.fromkeys(workers, 0), {}

    def assign(t, k, n):
        chosen[t, k] = n
        load[n] += 1

    holders = {e: [n for n in workers if held_NE[n, e]] for e in range(held_NE.shape[1])}
    for (t, k), e in np.ndenumerate(expert_TK):
        if len(holders[e]) == 1:
            assign(t, k, holders[e][0])
    for t, token in enumerate(expert_TK.tolist()):
        while waiting := [k for k in range(len(token)) if (t, k) not in chosen]:
            visited = {chosen[t, k] for k in range(len(token)) if (t, k) in chosen}
            gain = {n: sum(n in holders[token[k]] for k in waiting) for n in workers if load[n] < limit}
            order = sorted((n not in visited, -gain[n], load[n], n) for n in gain if gain[n])
            for k in waiting:
                if not order:
                    assign(t, k, min((load[n], n) for n in holders[token[k]])[1])
                elif (best := order[0][-1]) in holders[token[k]] and load[best] < limit:
                    assign(t, k, best)
    return np.array([[chosen[t, k] for k in range(expert_TK.shape[1])] for t in range(len(expert_TK))])


@given(workers=st.integers(1, 4), cap=st.sampled_from([1.0, 1.05, 1.5, 9.0]), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_copies_are_chosen_as_the_reference_chooses(workers, cap, seed):
    rng = np.random.default_rng(seed)
    expert_TK = topical_choices(rng, int(rng.integers(1, 20)), 6, int(rng.integers(1, 5)))
    held_NE = place_by_number(6, workers) | (rng.random((workers, 6)) < 0.4)
    chosen_TK = choose_workers(expert_TK, held_NE, cap)
    assert np.array_equal(chosen_TK, chosen_by_reference(expert_TK, held_NE, cap))
    assert held_NE[chosen_TK, expert_TK].all()


def test_an_expert_that_nobody_holds_has_no_worker():
    held_NE = np.array([[True, False, True], [True, False, False]])
    assert choose_workers(np.array([[1, 2], [0, 2]]), held_NE, 1.05).tolist() == [[-1, 0], [0, 0]]


def test_copies_save_rows_and_even_out_batches():
    rng = np.random.default_rng(3)
    expert_TLK = np.stack([topical_choices(rng, 1500, 16, 4) for _ in range(2)], axis=1)
    held = plan_placements(expert_TLK, 16, 4, spare=1, cap=1.05)
    assert list(held) == ["by number", "balance only", "picked together", "with copies"]
    homes, copied = held["picked together"], held["with copies"]
    assert (homes.sum(axis=1) == 1).all()
    assert (copied.sum(axis=2) <= 5).all()
    assert (copied | ~homes).all(), "homes stay"
    scored = {name: count_traffic(expert_TLK, one, np.random.default_rng(0)) for name, one in held.items()}
    rows = {name: one.rows_per_token for name, one in scored.items()}
    assert rows["with copies"] < rows["picked together"] < min(rows["by number"], rows["balance only"])
    assert scored["with copies"].busiest_in_batch < scored["picked together"].busiest_in_batch
    by_hand = [rows_of(expert_TLK[:, layer], homes[layer].argmax(axis=0)) for layer in range(2)]
    assert rows["picked together"] == pytest.approx(sum(by_hand) / 3000)
    assert np.array_equal(add_row_copies(expert_TLK[:, 0], homes[0], 0), homes[0])


@pytest.mark.parametrize(
    ("workers", "spare", "named"), [(9, 0, "--experts 9"), (1, 1, "of no use"), (2, 5, "of no use")]
)
def test_workers_and_copies_without_use_are_refused(workers, spare, named):
    with pytest.raises(PlanError, match=named):
        plan_placements(np.zeros((2, 1, 1), dtype=np.uint8), 8, workers, spare=spare, cap=1.05)


PLACEMENT = ExpertPlacement(
    layer_ids=(1, 2), holders=(((0,), (0,), (1, 0)), ((1,), (0, 1), (0, 1))), workers=2, cap=1.05
)


def test_a_placement_file_holds_the_placement(tmp_path):
    write_expert_placement(tmp_path / "placement.json", PLACEMENT)
    found = read_expert_placement(tmp_path / "placement.json")
    assert found == PLACEMENT
    again = ExpertPlacement.from_arrays(np.array([1, 2]), found.home_LNE, found.held_LNE, 1.05)
    assert again == PLACEMENT
    assert found.held_LNE.tolist() == [[[True] * 3, [False, False, True]], [[False, True, True], [True] * 3]]


@pytest.mark.parametrize(
    "changes",
    [
        {"holders": (((0,), (0,), (0,)), ((1,), (0,), (0,)))},
        {"holders": (((0,), (0,), (1,)), ((1,), (0,)))},
        {"holders": (((0,), (0,), (1, 1)), ((1,), (0,), (0,)))},
        {"holders": (((0,), (2,), (1,)), ((1,), (0,), (0,)))},
        {"holders": (((0,), (), (1,)), ((1,), (0,), (0,)))},
        {"layer_ids": (1,)},
        {"holders": (), "layer_ids": ()},
    ],
)
def test_broken_placements_are_refused(changes):
    with pytest.raises(PlanError):
        ExpertPlacement(**vars(PLACEMENT) | changes).validate()


REACHED = {  # rows per token on 2, 4, 8 workers and load, on samples that the search has not seen; two digits
    ("deepseek_v2_lite_esft_topk.npz", 64): ((1.72, 2.62, 3.60), 1.17, 6),
    ("gpt_oss_20b_decode_topk.npz", 32): ((1.62, 2.36, 3.15), 1.10, 4),
}


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"recorded routes of real models are not there ({DATA})")
@pytest.mark.parametrize(("file", "experts"), REACHED)
def test_recorded_tokens_go_to_few_workers_on_held_out_samples(file, experts):
    """Means over every third layer and two splits: alternate samples, and random halves."""
    trace, (most_rows, most_load, top_k) = open_trace(DATA / file, experts), REACHED[file, experts]
    assert trace.top_k == top_k
    order = np.arange(trace.num_samples)
    splits = [one[first::2] for one in (order, np.random.default_rng(1).permutation(order)) for first in (0, 1)]
    halves = [trace.select(np.sort(half)).experts_TLK[:, ::3] for half in splits]
    for workers, most in zip((2, 4, 8), most_rows, strict=True):
        found = {}
        for planned_TLK, scored_TLK in zip(halves[::2], halves[1::2], strict=True):
            for name, held_LNE in plan_placements(planned_TLK, experts, workers, spare=1, cap=1.05).items():
                traffic = count_traffic(scored_TLK, held_LNE, np.random.default_rng(0))
                found.setdefault(name, []).append([*vars(traffic).values()])
        mean = {name: np.mean(rows, axis=0) for name, rows in found.items()}
        print(workers, {name: np.round(rows, 3).tolist() for name, rows in found.items()})
        rows, load, in_batch = mean["picked together"]
        assert rows <= most
        assert round(load, 2) <= most_load
        assert round(mean["balance only"][1], 2) <= 1.09
        assert mean["with copies"][0] < rows
        assert mean["with copies"][2] < in_batch


def test_traffic_in_the_given_order_counts_batches_of_neighbours():
    """Four tokens of one worker, then four of the other: even in all, one busy worker in each batch."""
    expert_TLK = np.repeat([[[0, 1]], [[2, 3]]], 4, axis=0)
    held_LNE = np.array([[[True, True, False, False], [False, False, True, True]]])
    traffic = count_traffic(expert_TLK, held_LNE, batch=4)
    assert (traffic.rows_per_token, traffic.busiest_worker, traffic.busiest_in_batch) == (1.0, 1.0, 2.0)
