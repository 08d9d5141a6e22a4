from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.simulation.layout import even_sizes, layer_slices
from relibra.simulation.step import stage_cuts
from relibra.simulation.step.pipeline_schedule import round_tasks, run_tasks
from relibra.simulation.step.stage_cuts import RoundCut, best_cut, narrowest_cut, round_cuts
from tests.simulation.step.test_pipeline_schedule import run_1f1b

FORWARD, BACKWARD, DEVICES, M = [1.0] * 12 + [3.0], [3.0] * 12 + [6.0], 4, 16
"""12 layers, forward 1 and backward with recomputation 3, and a head of 3 and 6 (RoundPipe's example)."""


def all_sizes(layers, parts):
    for borders in combinations(range(1, layers), parts - 1):
        yield tuple(np.diff((0, *borders, layers)).tolist())


def parts_of(cut, side_L):
    return [sum(side_L[part]) for part in layer_slices(cut)]


def end_of(cut, seconds_2LM, handover_M, mini_batches):
    forward, backward = ([one_LM[part].sum(axis=0) for part in layer_slices(cut)] for one_LM in seconds_2LM)
    seconds_XM = np.array([*forward, *backward[::-1]])
    return sum(run_1f1b(seconds_XM[:, m], handover_M[m])[1] for m in mini_batches)


def test_the_example_takes_234_in_turns_and_304_in_stages():
    seconds, cut = round_cuts(FORWARD, BACKWARD, DEVICES, M)[0]
    assert (seconds, len(cut.parts()), cut.fused) == (234, 9, 1)
    forward, backward = (np.array(side) for side in (FORWARD, BACKWARD))
    parts = [forward[part].sum() for part in cut.parts()[:2]] + [backward[part].sum() for part in cut.parts()[2:]]
    seconds_XM = np.repeat(np.array(parts)[:, None], M, axis=1)
    (start_XM,) = run_tasks(round_tasks(9, DEVICES, cut.round_M(M, DEVICES)), seconds_XM[None], 0 * seconds_XM)
    assert (start_XM + seconds_XM).max() == 234  # as events too
    whole = [a + b for a, b in zip(FORWARD, BACKWARD, strict=True)]
    widest = max(parts_of(narrowest_cut(whole, DEVICES), np.array(whole)))
    assert (M + DEVICES - 1) * widest == 304
    assert M * sum(whole) / DEVICES == 228
    seconds_2LM = np.repeat(np.array([FORWARD, BACKWARD])[:, :, None], M, axis=2)
    cut = best_cut(seconds_2LM, np.zeros(M), DEVICES, [np.arange(M)])
    ends = [end_of(one, seconds_2LM, np.zeros(M), [np.arange(M)]) for one in all_sizes(13, DEVICES)]
    assert end_of(cut, seconds_2LM, np.zeros(M), [np.arange(M)]) == min(ends) == 290  # not all are full


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=40)
def test_cuts_equal_the_best_of_all_up_to_14_layers(seed):
    rng = np.random.default_rng(seed)
    L = int(rng.integers(1, 15))
    stages = int(rng.integers(1, min(L, 5) + 1))
    cost_L = rng.integers(1, 20, L).astype(float)
    widest = min(max(parts_of(cut, cost_L)) for cut in all_sizes(L, stages))
    cut = narrowest_cut(cost_L.tolist(), stages)
    assert (len(cut), sum(cut), min(cut) > 0) == (stages, L, True)
    assert max(parts_of(cut, cost_L)) == widest


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=15)
def test_no_cut_of_few_layers_ends_before_the_best(seed):
    rng = np.random.default_rng(seed)
    L, micro_batches = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    stages = int(rng.integers(1, min(L, 4) + 1))
    seconds_2LM = rng.integers(1, 20, (2, L, micro_batches)).astype(float)
    handover_M = rng.integers(0, 3, micro_batches).astype(float)
    mini_batches = np.array_split(np.arange(micro_batches), int(rng.integers(1, 3)))
    cut = best_cut(seconds_2LM, handover_M, stages, mini_batches)
    ends = [end_of(one, seconds_2LM, handover_M, mini_batches) for one in all_sizes(L, stages)]
    assert end_of(cut, seconds_2LM, handover_M, mini_batches) == min(ends)


def test_of_many_cuts_the_narrowest_is_nearly_the_best(monkeypatch):
    rng = np.random.default_rng(0)
    monkeypatch.setattr(stage_cuts, "_MOST_NUMBERS", 0)
    gaps = []
    for _ in range(20):
        seconds_2LM = rng.uniform(1, 5, (2, 14, 8)) * np.array([1, 2])[:, None, None]
        found, even = (
            end_of(cut, seconds_2LM, np.zeros(8), [np.arange(8)])
            for cut in (best_cut(seconds_2LM, np.zeros(8), 4, [np.arange(8)]), even_sizes(14, 4))
        )
        best = min(end_of(cut, seconds_2LM, np.zeros(8), [np.arange(8)]) for cut in all_sizes(14, 4))
        assert best <= found <= even
        gaps.append(found / best - 1)
    assert max(gaps) < 0.05


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=20)
def test_round_robin_cuts_equal_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    L, devices, micro_batches = int(rng.integers(1, 8)), int(rng.integers(1, 5)), int(rng.integers(1, 20))
    forward_L, again_L = (rng.integers(1, 9, L).astype(float) for _ in range(2))
    backward_L = forward_L + again_L
    best = np.inf
    for fused in range(1, L + 1):
        sides = [
            [parts_of(cut, side) for n in range(1, len(side) + 1) for cut in all_sizes(len(side), n)] or [[]]
            for side in (forward_L[: L - fused], backward_L[: L - fused])
        ]
        for forward in sides[0]:
            for backward in sides[1]:
                parts = [*forward, backward_L[L - fused :].sum(), *backward]
                full = micro_batches * len(parts) + devices * (devices - 1)
                best = min(best, full * max(parts) / devices)
    seconds, cut = round_cuts(forward_L.tolist(), backward_L.tolist(), devices, micro_batches)[0]
    assert seconds == pytest.approx(best)
    assert [sum(side) + cut.fused for side in (cut.forward, cut.backward)] == [L, L]


def test_parts_of_a_round_go_up_the_layers_and_down():
    assert RoundCut((2,), 2, (1, 1), 1).parts() == [slice(0, 2), slice(2, 4), slice(1, 2), slice(0, 1)]
