import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.deployment.brute_force import brute_force
from relibra import ConfigError
from relibra.planning.deployment.decision import decide
from relibra.planning.deployment.deployment_files import read_deployment, write_deployment
from relibra.planning.deployment.measured_seconds import MeasuredSeconds, fit_line, read_measured, seconds_at
from relibra.planning.deployment.performance import measured_worker
from relibra.planning.deployment.search import SearchSpace, search_pair
from relibra.planning.deployment.served_model import ServedModel
from relibra.planning.deployment.service_level import ServiceLevel

MODEL = ServedModel(
    name="small", layers=4, hidden=64, experts=8, top_k=2, width=64, qkv_width=128, output_rows=64, cache_values=64,
    cache_ways=2, score_flops=256, head_values=10_000, output_values=5_000,
)  # fmt: skip
AMOUNTS = (8, 32, 64, 128)
LEVEL = ServiceLevel(seconds_per_token=0.05, context=64)


def lines(attention, expert, message=(1e-5, 1e-11)):
    """Return tables on three lines of (start, slope)."""

    def table(start, slope, unit=1):
        return tuple((unit * x, start + slope * unit * x) for x in AMOUNTS)

    return MeasuredSeconds(attention=table(*attention), expert=table(*expert), message=table(*message, 256))


def slow_seconds(table, amount):
    """Return the seconds of one amount by the two entries around it."""
    if amount <= table[0][0]:
        return table[0][1]
    for (low, first), (high, second) in itertools.pairwise(table):
        if amount <= high:
            return first + (second - first) * (amount - low) / (high - low)
    x = np.array([one for one, _ in table])
    y = np.array([one for _, one in table])
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return table[-1][1] + slope * (amount - table[-1][0])


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=6, unique=True),
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
    st.lists(st.floats(0, 2000), min_size=1, max_size=5),
)
def test_seconds_are_those_of_the_entries_around(amounts, seconds, asked):
    table = tuple(zip(sorted(amounts), seconds, strict=False))
    expected = [slow_seconds(table, one) for one in asked]
    assert seconds_at(table, np.array(asked)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_line_is_fitted():
    start, slope, r2 = fit_line(((0, 1.0), (1, 3.0), (2, 5.0)))
    assert (start, slope, r2) == pytest.approx((1, 2, 1))
    assert fit_line(((0, 0.0), (1, 1.0), (2, 0.0)))[2] == pytest.approx(0)


def test_measured_seconds_come_from_a_file(tmp_path):
    path = tmp_path / "measured.toml"
    path.write_text("attention = [[1, 1e-4], [64, 4e-4]]\nexpert = [[0, 0], [100, 2e-4]]\n")
    found = read_measured(path)
    assert seconds_at(found.attention, np.array([1, 64, 127])) == pytest.approx([1e-4, 4e-4, 7e-4])
    assert found.message == ()
    path.write_text(path.read_text() + "message = [[0, 1e-5], [1000, 2e-5]]\n")
    assert read_measured(path).message == ((0, 1e-5), (1000, 2e-5))


@pytest.mark.parametrize(
    "text", ["", "attention = [[1, 2]]", "attention = 3\nexpert = 4",
             "attention = [[1], [2]]\nexpert = [[1, 1], [2, 2]]",
             "attention = [[1, -1], [2, 2]]\nexpert = [[1, 1], [2, 2]]", "attention = [[1, nan], [2, 2]]\nexpert = []",
             "attention = [[2, 1], [1, 1]]\nexpert = [[1, 1], [2, 2]]", "= 3", "expert = [[true, 1]]\nattention = []",
             "attention = [[1, 2], [2, 1]]\nexpert = [[1, 1], [2, 2]]", "message = [[1, 2], [2, 1]]"],
)  # fmt: skip
def test_files_without_measured_seconds_are_refused(text, tmp_path):
    (tmp_path / "measured.toml").write_text(text)
    with pytest.raises(ConfigError):
        read_measured(tmp_path / "measured.toml")


@settings(max_examples=8, deadline=None)
@given(
    starts=st.tuples(*2 * [st.floats(1e-5, 1e-3)]),
    slopes=st.tuples(*2 * [st.floats(1e-7, 1e-5)]),
    allowed=st.floats(1e-3, 2e-2),
    most=st.sampled_from([2, 3, 6]),
)
def test_the_search_over_workers_is_that_of_brute_force(starts, slopes, allowed, most):
    worker, used = measured_worker(lines(*zip(starts, slopes, strict=True)), "here", 1.2e6)
    level = replace(LEVEL, seconds_per_token=allowed)
    space = SearchSpace(ways=(1,), node_counts=(1, 2, 3), most_gpus=most)
    found, best = (one(MODEL, level, (worker, worker), space, used) for one in (search_pair, brute_force))
    assert (found is None) == (best is None)
    if found is not None:
        assert found.gpus <= most
        figures = [one.steady_tokens_per_second / one.price for one in (found, best)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-9)


def test_a_plan_of_two_workers_takes_the_times_of_its_tables():
    """64 requests and 16 rows per expert: 1.64 ms of attention, 8 experts of 0.26 ms; 32 KiB one way in 10 us."""
    measured = lines((1e-3, 1e-5), (1e-4, 1e-5))
    worker, used = measured_worker(measured, "here", 1e9)
    space = SearchSpace(ways=(1,), node_counts=(1,), most_gpus=2, micro_batches=(3,))
    plan = replace(search_pair(MODEL, LEVEL, (worker, worker), space, used), rows=64)
    assert plan.stage[:3] == pytest.approx((1.64e-3, 8 * 2.6e-4, 1e-5 + 1e-11 * 2 * 64 * 2 * 64))
    assert plan.iteration_seconds == pytest.approx(4 * 3 * 8 * 2.6e-4)
    assert plan.tokens_per_second == pytest.approx(3 * 64 / plan.iteration_seconds)


def test_the_verdict_is_against_a_worker_that_does_both():
    """Both sides take alike: apart they give the tokens of two workers that do both, less messages and fixed times."""
    for attention, message, apart in (((8e-4, 8e-5), (0, 1e-15), True), ((1e-6, 1e-8), (1e-3, 1e-9), False)):
        worker, used = measured_worker(lines(attention, (1e-4, 4e-5), message), "here", 1e9)
        decision = decide(MODEL, LEVEL, [worker], SearchSpace(ways=(1,), most_gpus=2), used)
        [together] = decision.colocated
        assert (together.kind, together.gpus, together.rows > 32) == ("tensor", 1, True)
        rows = together.rows * MODEL.top_k / MODEL.experts
        layer = attention[0] + attention[1] * together.rows + 8 * (1e-4 + 4e-5 * rows)
        assert together.iteration_seconds == pytest.approx(4 * layer, rel=1e-6)
        assert decision.best.gpus == 2
        assert (decision.gain > 0.9) == apart


def test_a_plan_file_keeps_the_tables(tmp_path):
    worker, used = measured_worker(lines((1e-3, 1e-5), (1e-4, 1e-5)), "here", 1e9)
    plan = search_pair(MODEL, LEVEL, (worker, worker), SearchSpace(ways=(1,), most_gpus=2), used)
    write_deployment(tmp_path / "plan.json", plan)
    assert read_deployment(tmp_path / "plan.json") == plan
