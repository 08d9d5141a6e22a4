import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.deployment.pipeline import paper_seconds
from relibra.planning.deployment.pipeline_time import StageSeconds, drained_seconds, iteration_seconds


def simulated_seconds(stage, micro_batches, layers):
    """Return the end of the last micro-batch, event by event, each of four places serving one at a time."""
    ready, free = [0.0] * micro_batches, [0.0] * 4
    for _ in range(layers):
        for m in range(micro_batches):
            for place, seconds in enumerate((stage.attention, stage.hop, stage.experts, stage.hop)):
                ready[m] = free[place] = max(ready[m], free[place]) + seconds
    return max(ready)


@given(
    attention=st.floats(0.2, 1.5), experts=st.floats(0.2, 1.5), hop=st.floats(0, 1.8), m=st.integers(1, 6),
    layers=st.sampled_from([1, 2, 3, 8, 40]),
)  # fmt: skip
def test_the_formula_is_what_events_give(attention, experts, hop, m, layers):
    stage = StageSeconds(attention, experts, hop)
    assert drained_seconds(stage, m, layers) == pytest.approx(simulated_seconds(stage, m, layers), rel=1e-9)


@given(computing=st.floats(0.2, 1.5), other=st.floats(0.2, 1.5), share=st.floats(0, 1), layers=st.integers(1, 56))
def test_the_formula_of_the_paper_holds_where_it_claims_to(computing, other, share, layers):
    stage = StageSeconds(computing, other, share * max(computing, other))
    m = next(m for m in range(1, 100) if m * stage.slowest >= stage.round_trip * (1 - 1e-12))  # fills the round trip
    assert drained_seconds(stage, m, layers) == pytest.approx(paper_seconds(stage, m, layers), rel=1e-9)


@pytest.mark.parametrize(
    ("share", "m", "ratio"), [(0.1, 1, 2.136), (0.28, 2, 1.268), (0.75, 3, 1.159), (1.2, 4, 1.195)]
)
def test_the_formula_of_the_paper_is_optimistic_elsewhere(share, m, ratio):
    stage = StageSeconds(1.0, 1.0, share)
    assert drained_seconds(stage, m, 40) / paper_seconds(stage, m, 40) == pytest.approx(ratio, abs=6e-4)


def test_each_micro_batch_pays_for_the_other_layers():
    stage = StageSeconds(1.0, 1.0, 0.5, rest=2.0)
    assert iteration_seconds(stage, 3, 10) == 3 * 10 + 3 * 2
