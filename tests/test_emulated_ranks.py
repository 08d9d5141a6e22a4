"""The arithmetic behind the measured straggler: counts of rows per rank, ratios of seconds, and what may be timed."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.recorded_cuts import cut_recorded
from relibra import Budget, ConfigError, cluster_preset, plan_step
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.routing.synthetic import TraceShape, domain_trace

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
CPU = torch.device("cpu")
SHAPE = ExpertShape(hidden=32, width=16)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def demand():
    shape = TraceShape(rows_per_sample=[64] * 32, num_layers=2, num_experts=16, top_k=2)
    return cut_recorded(domain_trace(shape, np.random.default_rng(0), sigma=1.2), 512, 8)


@pytest.mark.parametrize("balancer", ["static", "lplb", "ultraep", "balanced", "relibra"])
def test_counts_are_those_of_the_plan(demand, balancer):
    from benchmarks.runtime.emulated_ranks import planned_counts

    plan = plan_step(demand, cluster_preset("h100x8", 8), Budget(slots=1), balancer, never_worse=False)
    scheduled = plan.scheduled(demand)
    for m in range(4):
        for layer in range(2):
            counts = planned_counts(plan, scheduled, m, layer)
            assert [sum(of_rank) for of_rank in counts] == plan.rank_load(scheduled)[m, layer].tolist()
            assert sum(map(sum, counts)) == scheduled.load_MLE[m, layer].sum() == 512 * 2
            replicas_R = (plan.replica_MLRB[m, layer] >= 0).sum(axis=1)
            assert [len(of_rank) for of_rank in counts] == (2 + replicas_R).tolist()


def test_static_ranks_get_the_load_of_their_own_experts(demand):
    from benchmarks.runtime.emulated_ranks import rank_works

    pairs = [(0, 1), (3, 0)]
    static, equal = rank_works(demand, 8, SHAPE, pairs, balancers=("static",))
    for (m, layer), ranks in zip(pairs, static.counts, strict=True):
        assert ranks == demand.load_MLE[m, layer].reshape(8, 2).tolist()
    assert (static.load_PR.sum(axis=1) == equal.load_PR.sum(axis=1)).all()


def test_equal_counts_are_equal():
    from benchmarks.runtime.emulated_ranks import busiest_over_mean, equal_counts

    assert equal_counts(96, 16, 8) == [[6, 6]] * 8
    assert busiest_over_mean(np.array([[sum(c) for c in equal_counts(96, 16, 8)]])) == 1
    for token_slots in (0, 5, 1000, 1023):
        counts = equal_counts(token_slots, 32, 8)
        loads = [sum(of_rank) for of_rank in counts]
        assert sum(loads) == token_slots
        assert max(loads) - min(loads) <= 1
        assert all(max(of_rank) - min(of_rank) <= 1 for of_rank in counts)


def test_busiest_over_mean_weighs_pairs_by_their_load():
    from benchmarks.runtime.emulated_ranks import busiest_over_mean

    assert busiest_over_mean(np.array([[3, 1], [10, 10]])) == (3 + 10) / (2 + 10)


def test_pairs_differ_and_repeat(demand):
    from benchmarks.runtime.emulated_ranks import choose_pairs

    pairs = choose_pairs(demand, 5)
    assert len(set(pairs)) == 5
    assert pairs == choose_pairs(demand, 5) == sorted(pairs)
    assert choose_pairs(demand, 100) == [(m, layer) for m in range(4) for layer in range(2)]


def test_time_in_proportion_to_rows_gives_the_skew_of_the_rows(demand, monkeypatch):
    """With a clock that counts rows, the measured straggler is the token skew and ratios are ratios of loads."""
    from benchmarks.runtime import emulated_ranks as emulated
    from relibra.calibration.grouped_experts import GroupedExperts

    works = emulated.rank_works(demand, 8, SHAPE, [(0, 0), (1, 1)], balancers=("static", "relibra_paper_tokens"))
    order = []

    def count_rows(works, device):
        order.append(tuple(works))
        return [float(rows) for rows in works]

    monkeypatch.setattr(emulated, "seconds_each", count_rows)
    monkeypatch.setattr(GroupedExperts, "work", lambda _, counts_E: sum(counts_E))
    none_EXH, none_TH = torch.zeros(0, 2, 1), torch.zeros(0, 1)
    experts = GroupedExperts(gate_up_EXH=none_EXH, down_EHF=none_EXH[:, :1], rows_TH=none_TH, gradient_TH=none_TH)
    seconds = emulated.measured_seconds(works, experts, repetitions=2)
    turns = [order[i : i + 2] for i in range(0, 18, 2)]  # two pairs each, three balancers, a warm-up and two rounds
    assert turns[0:3] == turns[6:9] == turns[5:2:-1]
    assert turns[0] != turns[2]
    rows = {row["balancer"]: row for row in emulated.result_rows(works, seconds, "here", repetitions=2)}
    for work in works:
        row = rows[work.balancer]
        assert row["straggler"] == pytest.approx(row["token_skew"])
        assert row["busiest ms"] == 1000 * work.load_PR.max(axis=1).mean()
    assert rows["equal counts"]["straggler"] == 1
    assert rows["static"]["time / static"] == rows["equal counts"]["time / equal"] == 1
    assert rows["static"]["time / equal"] == pytest.approx(rows["static"]["token_skew"])
    assert rows["relibra_paper_tokens"]["time / static"] < 1
    noise = np.random.default_rng(0)
    noisy = {name: found[:1] * noise.lognormal(0, 0.5, (9, *found.shape[1:])) for name, found in seconds.items()}
    for row in emulated.result_rows(works, noisy, "here", repetitions=9):
        assert row["busiest ms low"] < row["busiest ms"] < row["busiest ms high"]


def test_what_does_not_fit_is_halved_or_skipped(monkeypatch, capsys):
    from benchmarks.runtime import emulated_ranks as emulated
    from benchmarks.runtime import gpu

    def two_micro_batches(ranks, tokens):
        shape = TraceShape(rows_per_sample=[tokens] * 2 * ranks, num_layers=1, num_experts=16, top_k=2)
        return cut_recorded(domain_trace(shape, np.random.default_rng(0)), ranks * tokens, ranks)

    monkeypatch.setattr(emulated, "rank_works", partial(emulated.rank_works, balancers=("static", "balanced")))
    setting = gpu.Setting(source="here", shape=SHAPE, tokens=4, demand=two_micro_batches)
    tokens, works = gpu.fitting(setting, 8, 2, 1 << 30)
    assert tokens == 4
    assert {work.load_PR.sum() for work in works} == {2 * 8 * 4 * 2}
    groups, most = emulated.sizes_needed(works)
    assert groups == 16 // 8 + 1
    assert most >= 4 * 2
    needed = gpu.bytes_needed(groups, most, SHAPE.hidden, SHAPE.width, torch.bfloat16)
    tokens, fewer = gpu.fitting(setting, 8, 2, needed - 1)
    assert tokens == 2
    assert {work.load_PR.sum() for work in fewer} == {2 * 8 * 2 * 2}
    capsys.readouterr()
    assert gpu.fitting(setting, 8, 2, 1) is None
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["here, EP 8"] * 3 + ["skipped"]


def test_hidden_fraction():
    from benchmarks.runtime.gpu import hidden_fraction

    assert hidden_fraction(copy=2.0, compute=5.0, together=5.0) == 1
    assert hidden_fraction(copy=2.0, compute=5.0, together=7.0) == 0
    assert hidden_fraction(copy=2.0, compute=5.0, together=6.5) == 0.25


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: this is about machines without")
def test_without_a_gpu_it_says_so_and_writes_nothing(monkeypatch, capsys, tmp_path):
    from benchmarks.runtime import gpu

    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path)])
    gpu.main()
    assert "skipped: torch sees no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_real_sizes_are_refused_on_a_cpu(monkeypatch):
    from benchmarks.runtime import gpu

    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    with pytest.raises(ConfigError, match="add --quick"):
        gpu.main()


def executor_rows(data):
    from benchmarks.runtime import gpu

    return list(gpu.executor_rows(data, gpu.QUICK, CPU, 1 << 30))


def test_the_executors_path_is_timed_part_by_part(capsys):
    """Toy experts; without recordings only the model whose routes are made up."""
    from benchmarks.runtime.layer_parts import PARTS

    static, planned = executor_rows(Path("nowhere"))
    assert [line.split(" for")[0] for line in capsys.readouterr().err.splitlines()] == [
        "skipped: recorded routes of gpt-oss-20b",
        "skipped: recorded routes of DeepSeek-V2-Lite",
    ]
    assert planned["token_skew"] < static["token_skew"]
    assert static["layer / static"] == 1
    for row in (static, planned):
        assert row["ok"] == (abs(row["straggler"] / row["token_skew"] - 1) <= row["target"] == 0.15)
        for part in ("prepare", *PARTS):
            assert row[f"{part} ms"] > 0
            assert len(row["ms of ranks"][part]) == row["ep"] == 8
        assert row["error"] < 1e-2


def test_emulated_ranks_prepare_the_rows_of_real_ranks():
    """Every rank computes what the plan gives it, from rows that their source sends: each token-slot once."""
    from benchmarks.runtime import executor_path

    shape = TraceShape(rows_per_sample=[32] * 8, num_layers=2, num_experts=16, top_k=2)
    trace = domain_trace(shape, np.random.default_rng(0), sigma=1.2)
    step = executor_path.cut_step(trace, 32, 4, layers=2, micro_batches=2)
    assert step.demand.tokens_MLRE.shape == (2, 2, 4, 16)
    plan = plan_step(step.demand, cluster_preset("h100x8", 4, 4), Budget(slots=1), "relibra_paper_tokens")
    layers = executor_path.prepared_layers(plan, step, 1, 0, pinned=False)
    lists_R = [one.rows.lists_on(CPU, None)[0] for one in layers]
    experts_RTK = [step.trace.experts_TLK[step.trace.sample_rows(4 + rank)][:, 0] for rank in range(4)]
    computed = []
    for rank, lists in enumerate(lists_R):
        receive_R = lists.tokens.hops[0].sizes.receive_R
        ends_R = np.cumsum(receive_R)
        source_Y = np.searchsorted(ends_R, lists.tokens.arrived_Y.numpy(), side="right")
        for source, arrived, slot in zip(source_Y, lists.tokens.arrived_Y.tolist(), lists.slot_Y.tolist(), strict=True):
            sent = lists_R[source].tokens.hops[0]
            sent_Z = sent.index_X.split(sent.sizes.send_R)[rank]
            token = int(sent_Z[arrived - (ends_R[source] - receive_R[source])])
            homes = plan.physical_to_logical_map[0][4 * rank : 4 * rank + 4]
            expert = homes[slot] if slot < 4 else plan.replica_MLRB[1, 0, rank, slot - 4]
            assert expert in experts_RTK[source][token]
            computed.append((source, token, int(expert)))
    assert len(set(computed)) == len(computed) == 4 * 32 * 2


def _rows_of(program, *options):
    command = [sys.executable, "-W", "error", str(BENCHMARKS), program, "--quick", "--json", "--data", "nowhere"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "skipped: recorded routes" in done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "options", "settings"), [("emulated_ranks", (), 1), ("gpu", ("--device", "cpu"), 3)]
)
def test_programs_run_on_made_up_routes(tmp_path, program, options, settings):
    from benchmarks.runtime import emulated_ranks as emulated
    from benchmarks.runtime import executor_path

    rows = _rows_of(program, "--output", str(tmp_path), *options)
    executed = [row for row in rows if "ms of ranks" in row]
    rows = [row for row in rows if row not in executed]
    assert [row["balancer"] for row in executed] == [*executor_path.BALANCERS] * (program == "gpu")
    names = [*emulated.BALANCERS, emulated.EQUAL]
    assert [row["balancer"] for row in rows] == names * settings
    for row in rows:
        assert row["straggler"] >= 1
        assert row["busiest ms"] > 0
    assert all(row["token_skew"] < 1.01 for row in rows if row["balancer"] == emulated.EQUAL)
    assert not list(tmp_path.iterdir()), "--quick writes no rows"
