"""A cluster from measured seconds: the line through them, the table of experts, and two processes that measure."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import ClusterError, ConfigError, EngineError, cluster_preset
from relibra.calibration import measurement
from relibra.calibration.fit import Machine, Spread, Timings, fit_cluster, fit_link, gemm_rows, monotone_table
from relibra.cli.inputs.workload import open_cluster
from relibra.cluster import write_cluster
from relibra.planning.costs.expert_shape import ExpertShape

SHAPE = ExpertShape(hidden=32, width=16, bytes_per_value=4)
MACHINE = Machine(name="here", ranks=2, memory_bytes=1 << 30, description="a machine")
SIZES = measurement.Sizes(
    rows=(1, 8, 64), dense=64, copies=(1 << 16, 1 << 20), exchange=(1 << 12, 1 << 20), repetitions=3
)
JOB = measurement.Job(ranks=2, cuda=False, expert=SHAPE, sizes=SIZES, timeout_seconds=60.0)


def timings(**changes):
    of = {
        "num_experts": 4,
        "experts": {1: [1e-3, 2e-3, 3e-3], 16: [4e-3, 4e-3, 8e-3]},
        "dense_flops": 1e9,
        "dense": [0.1, 0.2],
        "copies": {1000: [1e-4], 2000: [2e-4]},
        "exchange": {1000: [1.1e-3], 9000: [1.9e-3]},
        "memory_bytes": 1e6,
        "memory": [1e-3, 2e-3, 4e-3],
        "product_alone": [1e-3],
        "exchange_alone": [2e-3],
        "together": [2.2e-3],
    }
    return Timings(**{**of, **changes})


@given(
    alpha=st.floats(0, 1e-3),
    beta=st.floats(1e-12, 1e-7),
    sizes=st.lists(st.integers(1 << 10, 1 << 28), min_size=2, max_size=8, unique=True),
)
def test_the_line_that_seconds_were_made_of_is_found(alpha, beta, sizes):
    fit = fit_link({size: [alpha + beta * size] * 3 for size in sizes}, "copies")
    assert fit.bytes == tuple(sorted(sizes))
    assert fit.error <= fit.worst < 1e-6
    expected = [alpha + beta * size for size in fit.bytes]
    assert [fit.link.seconds(size) for size in fit.bytes] == pytest.approx(expected, rel=1e-6)


@given(noise=st.lists(st.floats(0.7, 1.4), min_size=5, max_size=5), step=st.floats(-0.2, 0.2))
def test_no_other_line_is_closer(noise, step):
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
    seconds = (1e-5 + 1e-9 * sizes) * noise
    fit = fit_link({int(size): [s] for size, s in zip(sizes, seconds, strict=True)}, "copies")

    def error(alpha, beta):
        return np.sqrt(np.mean(((alpha + beta * sizes) / seconds - 1) ** 2))

    alpha, beta = fit.link.latency_seconds, 1 / fit.link.bytes_per_second
    assert fit.error == pytest.approx(error(alpha, beta))
    assert fit.error <= error(alpha * (1 + step), beta) + 1e-9
    assert fit.error <= error(alpha, beta * (1 + step)) + 1e-9
    assert alpha >= 0


def test_seconds_that_do_not_grow_are_no_link():
    with pytest.raises(
        EngineError, match=r"the exchange: seconds do not grow with bytes .*2,000 bytes 0.1 s.* try again"
    ):
        fit_link({1000: [2.0], 2000: [0.1]}, "the exchange")
    with pytest.raises(EngineError, match="do not grow"):
        fit_link({1000: [1.0]}, "copies")


def test_rates_are_flops_over_seconds_with_quartiles():
    [one, many] = gemm_rows({16: [4.0, 4.0, 8.0], 1: [1.0]}, experts=4, flops_per_row=10.0)
    assert (one.rows, one.flops_per_second, one.repetitions) == (1, Spread(median=40.0, low=40.0, high=40.0), 1)
    assert (many.rows, many.flops_per_second.median, many.repetitions) == (16, 160.0, 3)
    assert many.flops_per_second.low == (80 + 160) / 2


def test_a_rate_never_falls_in_the_table():
    rows = gemm_rows({1: [1.0], 2: [4.0], 3: [1.0]}, experts=1, flops_per_row=1.0)
    assert monotone_table(rows) == ((1, 1.0), (2, 1.0), (3, 3.0))


def test_what_was_measured_becomes_a_cluster(tmp_path):
    found = fit_cluster(timings(), MACHINE, SHAPE)
    cluster = found.cluster
    assert (cluster.label, cluster.num_nodes, cluster.ranks_per_node) == ("measured", 1, 2)
    assert cluster.intra == cluster.inter_send == cluster.inter_receive == found.exchange.link
    assert cluster.intra.latency_seconds == pytest.approx(1e-3)
    assert cluster.intra.bytes_per_second == pytest.approx(1e7)
    assert cluster.host.bytes_per_second == pytest.approx(1e7)
    assert cluster.peak_flops_per_second == pytest.approx(7.5e9)
    assert cluster.memory_bytes_per_second == pytest.approx(5e8)
    assert "links between nodes were not measured" in cluster.source
    # the table prices the work that it was made of: one expert of four, forward and backward
    flops = 3 * SHAPE.flops_per_token_slot
    assert cluster.gemm_seconds(np.array([0, 1, 16]), flops) == pytest.approx([0, 2e-3 / 4, 4e-3 / 4])
    write_cluster(tmp_path / "cluster.toml", cluster)
    assert open_cluster(str(tmp_path / "cluster.toml")) == cluster


def test_experts_faster_than_the_large_product_are_the_peak():
    found = fit_cluster(timings(dense=[1e3]), MACHINE, SHAPE)
    assert found.cluster.peak_flops_per_second == found.cluster.gemm_table[-1][1]
    assert found.cluster.efficiency == 1


def test_one_rank_takes_the_links_of_another_cluster():
    cited = cluster_preset("h100x8")
    found = fit_cluster(timings(exchange={}), replace(MACHINE, ranks=1), SHAPE, cited)
    assert found.exchange is None
    assert (found.cluster.label, found.cluster.intra) == ("model", cited.intra)
    assert (found.cluster.inter_send, found.cluster.inter_receive) == (cited.inter_send, cited.inter_receive)
    assert "those of h100x8 (model)" in found.cluster.source


@pytest.mark.parametrize(("size", "ranks", "sent"), [(1000, 2, 1000), (1000, 4, 996), (1, 8, 28)])
def test_bytes_are_shared_out_evenly_to_the_others(size, ranks, sent):
    assert measurement.bytes_to_others(size, ranks) == sent


def test_sizes_take_turns_and_slow_ones_are_repeated_less_often():
    orders = []

    def once(order):
        orders.append(order)
        return [float(n) for n in order]

    often = replace(SIZES, repetitions=4)
    assert measurement.repeat_in_turns(3, once, often, lambda _: False) == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert orders == [[0, 1, 2], [0, 1, 2], [2, 1, 0], [0, 1, 2], [2, 1, 0]]
    few = measurement.repeat_in_turns(3, once, often, lambda _: True)
    assert [len(seconds) for seconds in few] == [measurement.MIN_REPETITIONS] * 3


def test_a_cpu_is_two_ranks_and_never_one():
    assert measurement.choose_job(None, SHAPE).ranks == 2
    assert measurement.choose_job(3, SHAPE).ranks == 3
    with pytest.raises(ConfigError, match=r"--ranks 1: .* ask for 2 or more"):
        measurement.choose_job(1, SHAPE)


def test_gpus_are_one_rank_each(monkeypatch):
    monkeypatch.setattr(measurement.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measurement.torch.cuda, "device_count", lambda: 1)
    assert measurement.choose_job(None, SHAPE).ranks == 1
    with pytest.raises(ConfigError, match=r"this machine has 1 GPU\(s\)"):
        measurement.choose_job(2, SHAPE)


def dying(rank, job, folder):
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    measurement.measure_rank(rank, job, folder)


def failing(rank, job, folder):
    raise ClusterError(f"rank {rank} has no clock")


def sleeping(rank, job, folder):
    signal.pause()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "words"),
    [
        (dying, "rank 1 of the calibration failed: .*SIGKILL"),
        (failing, "of the calibration failed: .*has no clock; nothing was written"),
        (sleeping, "did not finish within 3 s"),
    ],
)
def test_a_rank_that_does_not_answer_ends_it_with_one_sentence(monkeypatch, work, words):
    monkeypatch.setattr(measurement, "measure_rank", work)
    with pytest.raises(EngineError, match=words) as raised:
        measurement.measure_machine(replace(JOB, timeout_seconds=3.0 if work is sleeping else 60.0))
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_two_processes_measure_a_plausible_cluster(tmp_path):
    command = [sys.executable, "-m", "relibra", "calibrate", "--quick", "--model", "32x16", "--json"]
    done = subprocess.run([*command, "-o", tmp_path / "c.toml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts, cluster = json.loads(done.stdout), open_cluster(str(tmp_path / "c.toml"))
    assert facts["exchange"]["error"] >= 0
    assert (cluster.label, cluster.num_ranks) == (facts["cluster"]["label"], 2) == ("measured", 2)
    assert [rows for rows, _ in cluster.gemm_table] == list(measurement.QUICK_SIZES.rows)
    rates = [rate for _, rate in cluster.gemm_table]
    assert rates == sorted(rates)
    assert 1e5 < rates[0] < rates[-1] <= cluster.peak_flops_per_second < 1e13
    assert 1e6 < cluster.intra.bytes_per_second < 1e12
    assert 1e7 < cluster.host.bytes_per_second < 1e12
    assert cluster.intra.latency_seconds < 1
    assert 1 << 26 < cluster.memory_bytes < 1 << 50
