import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.deployment.pipeline import paper_seconds
from relibra.planning.deployment.pipeline_time import StageSeconds, drained_seconds
from relibra.simulation.serving.ping_pong import Work, new_clocks, run_layers, sending_order
from tests.simulation.serving.reference import simulate


def constant_work(stage, layers, micro_batches, X=1, Y=1):
    shape = (layers, micro_batches, X, Y)
    hop = np.full(shape, stage.hop / max(X, Y))
    return Work(
        attention_LMX=np.full(shape[:3], stage.attention), experts_LMXY=np.full((*shape[:2], 1, Y), stage.experts),
        send_LMXY=hop, receive_LMXY=hop, give_LMXY=hop, take_LMXY=hop,
        late_LMXY=np.zeros(shape), back_late_LMXY=np.zeros(shape),
    )  # fmt: skip


def random_work(rng, layers, micro_batches, X, Y):
    shape = (layers, micro_batches, X, Y)
    six = [rng.uniform(0, 0.3, shape) for _ in range(6)]
    return Work(rng.uniform(0.2, 1, shape[:3]), rng.uniform(0.2, 1, (*shape[:2], 1, Y)), *six)


def run(work, **options):
    _, M, X = work.attention_LMX.shape
    Y = work.send_LMXY.shape[3]
    clocks = new_clocks(M, X, Y, window=options.pop("window", 0))
    events = run_layers(work, clocks, sending_order(X, Y), sending_order(Y, X), **options)
    return clocks.ready_MX, events


@pytest.mark.parametrize("layers", [1, 2, 40, 56])
@pytest.mark.parametrize(("attention", "experts", "hop", "m"), [(1, 1, 0.1, 3), (1, 1, 0.5, 3), (0.7, 1, 0.99, 4)])
def test_events_give_the_formula_of_the_paper_where_it_holds(layers, attention, experts, hop, m):
    stage = StageSeconds(float(attention), float(experts), hop)
    ready_MX, _ = run(constant_work(stage, layers, m))
    assert ready_MX.max() == pytest.approx(paper_seconds(stage, m, layers), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    attention=st.floats(0.2, 1.5), experts=st.floats(0.2, 1.5), hop=st.floats(0, 1.8), m=st.integers(1, 4),
    layers=st.sampled_from([1, 2, 40]), nodes=st.integers(1, 3),
)  # fmt: skip
def test_events_give_the_general_formula_everywhere(attention, experts, hop, m, layers, nodes):
    stage = StageSeconds(attention, experts, hop)
    ready_MX, _ = run(constant_work(stage, layers, m, nodes, nodes))
    assert ready_MX.max() == pytest.approx(drained_seconds(stage, m, layers), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), m=st.integers(1, 4), X=st.integers(1, 4), Y=st.integers(1, 4))
def test_one_pass_gives_what_a_queue_of_events_gives(seed, m, X, Y):
    work = random_work(np.random.default_rng(seed), 4, m, X, Y)
    found_MX, _ = run(work)
    expected_MX = simulate(work, sending_order(X, Y), sending_order(Y, X))
    # Messages of two micro-batches that reach a NIC in another order than that of micro-batches are taken in theirs.
    assert found_MX.max() == pytest.approx(expected_MX.max(), rel=1e-9 if X == Y == 1 else 0.1)
    if m == 1:
        np.testing.assert_allclose(found_MX, expected_MX, rtol=1e-9)


def test_a_step_goes_on_where_the_last_one_ended():
    stage = StageSeconds(1.0, 1.0, 0.4)
    clocks = new_clocks(3, 1, 1)
    ends = []
    for _ in range(4):
        run_layers(constant_work(stage, 10, 3), clocks, sending_order(1, 1), sending_order(1, 1))
        ends.append(clocks.ready_MX.max())
    assert np.diff(ends) == pytest.approx([30.0] * 3)


def test_partial_inputs_begin_earlier():
    work = random_work(np.random.default_rng(0), 6, 1, 4, 2)
    parts = work._replace(experts_LMXY=np.repeat(work.experts_LMXY / 4, 4, axis=2))
    whole, _ = run(work)
    partial, _ = run(parts, partial=True)
    assert partial.max() < whole.max()


def test_acknowledgements_that_overtake_rows_stall_senders_less():
    stage = StageSeconds(0.3, 0.3, 1.0)
    work = constant_work(stage, 40, 4, 4, 4)
    work = work._replace(late_LMXY=np.full(work.late_LMXY.shape, 0.05))
    stalls = {}
    for priority in (True, False):
        ready_MX, events = run(work, window=1, ack_priority=priority)
        stalls[priority] = events.stalled_X.mean(), ready_MX.max()
    assert stalls[True][0] < stalls[False][0]
    assert stalls[True][1] <= stalls[False][1]
    assert run(work)[1].stalled_X.max() == 0


@pytest.mark.parametrize(("senders", "receivers", "server"), [(3, 5, 1), (5, 3, 1), (4, 4, 1), (16, 16, 8), (8, 8, 4)])
def test_everybody_sends_to_everybody_once_and_begins_elsewhere(senders, receivers, server):
    order_XY = sending_order(senders, receivers, server)
    assert (np.sort(order_XY, axis=1) == np.arange(receivers)).all()
    if senders == receivers:
        assert (np.sort(order_XY, axis=0) == np.arange(senders)[:, None]).all()
