"""What the tables of papers are made of: even routes, pairs, dealt sequences; and what their rows must hold."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.routing.demand import Demand
from relibra.routing.synthetic import TraceShape, domain_trace

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def small_demand(seed):
    rng = np.random.default_rng(seed)
    S, L, E, K = 12, 2, 8, 4
    counts_SLE = np.stack([rng.multinomial(K * (s + 1), rng.dirichlet(np.ones(E)), size=L) for s in range(S)])
    demand = Demand(
        counts_SLE=counts_SLE.astype(np.int32), layer_ids=np.arange(L, dtype=np.int32), sample_ids=np.arange(S), top_k=K
    )
    return demand.with_schedule(np.arange(S) % 3, np.arange(S) // 3 % 4, 4)


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_forced_balance_keeps_the_schedule_and_evens_experts(seed):
    from benchmarks.papers.steps import forced_balance

    demand = small_demand(seed)
    even = forced_balance(demand)
    assert (even.counts_SLE.sum(axis=2) == demand.counts_SLE.sum(axis=2)).all()
    assert (even.tokens_MLRE.sum(axis=3) == demand.tokens_MLRE.sum(axis=3)).all()
    assert np.ptp(even.counts_SLE.sum(axis=0), axis=1).max() <= 1


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_pairs_are_symmetric_and_bounded_by_counts(seed):
    from benchmarks.papers.steps import with_pairs

    demand = with_pairs(small_demand(seed))
    picked_LE = demand.counts_SLE.sum(axis=0)
    assert (demand.pairs_LEE == demand.pairs_LEE.swapaxes(1, 2)).all()
    assert (np.diagonal(demand.pairs_LEE, axis1=1, axis2=2) == picked_LE).all()
    assert (demand.pairs_LEE <= picked_LE[:, None, :]).all()


def test_drawn_tokens_have_the_counts_of_their_samples():
    from benchmarks.papers.tokens import draw_tokens

    shape = TraceShape(rows_per_sample=[5, 1, 12, 30], num_layers=2, num_experts=8, top_k=4)
    demand = Demand.from_trace(domain_trace(shape, np.random.default_rng(0), sigma=2.0))
    tokens = draw_tokens(demand)
    for s in range(len(demand.counts_SLE)):
        experts_tLK = tokens.experts_TLK[tokens.sample_T == s]
        for layer in range(experts_tLK.shape[1]):
            counts_E = np.bincount(experts_tLK[:, layer].ravel(), minlength=demand.num_experts)
            assert (counts_E == demand.counts_SLE[s, layer]).all()
    ordered_TLK = np.sort(tokens.experts_TLK, axis=2)
    assert (np.diff(ordered_TLK.astype(int), axis=2) > 0).all()


def test_drawn_tokens_pair_experts_as_often_as_assumed():
    from benchmarks.papers.steps import with_pairs
    from benchmarks.papers.tokens import draw_tokens

    S, E, K, length = 400, 8, 2, 40
    counts_SLE = np.tile(np.array([20, 10, 10, 10, 10, 8, 8, 4], np.int32), (S, 1, 1))
    demand = Demand(counts_SLE=counts_SLE, layer_ids=np.zeros(1, np.int32), sample_ids=np.arange(S), top_k=K)
    assert counts_SLE[0].sum() == K * length
    drawn_TK = draw_tokens(demand).experts_TLK[:, 0]
    pairs_EE = np.zeros((E, E), dtype=int)
    np.add.at(pairs_EE, (drawn_TK[:, 0], drawn_TK[:, 1]), 1)
    apart = ~np.eye(E, dtype=bool)
    found, assumed = (pairs_EE + pairs_EE.T)[apart], with_pairs(demand).pairs_LEE[0][apart]
    # Systematic draws pair a popular expert a little more often than the formula: the diagonal is not in it.
    assert np.corrcoef(found, assumed)[0, 1] > 0.97
    assert found.sum() == S * length * 2


def test_repeated_tokens_come_in_the_order_of_samples():
    from benchmarks.papers.tokens import repeated

    experts_TLK = np.arange(4, dtype=np.uint8).reshape(4, 1, 1)
    tokens = repeated(experts_TLK, np.array([1, -1, 0, 1]), 2)
    assert tokens.experts_TLK.ravel().tolist() == [2, 2, 0, 0, 3, 3]
    assert tokens.sample_T.tolist() == [0, 0, 1, 1, 1, 1]


def test_sequences_are_dealt_evenly_over_ranks():
    from benchmarks.papers.steps import deal_sequences

    length_S = np.random.default_rng(0).lognormal(7, 0.6, 64).astype(np.int64)
    micro_step_S = np.repeat(np.arange(2), 32)
    rank_S = deal_sequences(micro_step_S, length_S, 4)
    for step in range(2):
        tokens_R = np.bincount(rank_S[micro_step_S == step], length_S[micro_step_S == step])
        assert tokens_R.max() / tokens_R.mean() < 1.05


def test_a_cut_model_keeps_the_share_of_its_output_matrix():
    from benchmarks.papers.steps import cut_model
    from relibra.simulation import model_shape

    whole, cut = model_shape("qwen3-30b-a3b"), cut_model("qwen3-30b-a3b", small_demand(0))
    assert cut.moe_layers == 2
    assert cut.head_parameters / cut.layers == pytest.approx(whole.head_parameters / whole.layers, rel=1e-3)


def test_committed_rows_of_papers_explain_missed_goals():
    path = BENCHMARKS / "results" / "papers.json"
    rows = json.loads(path.read_text())
    for table in {row["table"] for row in rows}:
        assert len({row["label"] for row in rows if row["table"] == table}) == 1, f"{table} mixes labels"
    for row in rows:
        assert isinstance(row["cited"], str)
        assert row["ok"] == "" or row["why"], row["case"]
    for row in (row for row in rows if row["table"] == "throughput"):
        assert isinstance(row["ratio_to_static"], float)
        assert row["why"]
    judged = [row for row in rows if row["ok"]]
    assert len(judged) >= 8
    assert {row["load"].split(",")[0] for row in judged} >= {"domains", "domain_trace"}


@pytest.mark.slow
def test_quick_papers_say_aloud_what_they_skip(tmp_path):
    command = [sys.executable, str(BENCHMARKS), "papers", "--quick", "--json", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    assert {row["table"] for row in rows} >= {"throughput", "ablation", "skew", "planner", "straggler", "windows"}
    assert done.stderr.count("skipped: recorded routes of") == 2


@pytest.mark.slow
def test_quick_validation_predicts_every_run():
    command = [sys.executable, str(BENCHMARKS), "validation", "--quick", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [row["balancer"] for row in rows] == ["all_to_all", "eplb", "relibra", "relibra, homes stay"]
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated_seconds"] / row["measured_seconds"] - 1)
        assert sum(row["parts"].values()) == pytest.approx(row["simulated_seconds"])


@pytest.mark.slow
def test_runs_that_overlap_have_no_order():
    from benchmarks.simulation.validation import Pair, disagreements

    def pair(name, measured, simulated):
        return Pair(skew=1.5, balancer=name, measured=measured, simulated=simulated, parts={})

    fast, slow = pair("a", [1.0, 1.1], 1.3), pair("b", [1.2, 1.3], 1.2)
    assert disagreements([fast, slow]) == [(fast, slow)]
    assert disagreements([fast, pair("b", [1.05, 1.3], 1.2)]) == []
    assert disagreements([fast, pair("b", [1.2, 1.3], 1.4)]) == []


@pytest.mark.parametrize("width", [80, 120])
def test_tables_of_papers_are_readable_in_a_narrow_terminal(width, capsys, monkeypatch):
    from benchmarks.papers import papers

    monkeypatch.setenv("COLUMNS", str(width))
    rows = json.loads((BENCHMARKS / "results" / "papers.json").read_text())
    rows = rows["rows"] if isinstance(rows, dict) else rows
    for paper, kind in dict.fromkeys((row["paper"], row["table"]) for row in rows):
        papers.print_table(kind, [row for row in rows if (row["paper"], row["table"]) == (paper, kind)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    for row in rows:
        name = row["balancer"] if row["case"].endswith(f", {row['balancer']}") else row["case"]
        figures = [f"{row[key]:.3f}" for key in papers.FIGURES if isinstance(row.get(key), float)]
        assert any(name[:9] in line and all(one in line.split() for one in figures) for line in lines), row["case"]


def test_cited_words_stand_below_where_there_is_no_room(capsys, monkeypatch):
    from benchmarks.papers import papers

    row = dict.fromkeys(papers.FIGURES, 1.5) | {
        "case": "a model, EP 8, static", "balancer": "static", "cited": "[up] to 2", "unit": "times",
    }  # fmt: skip
    for width, below in ((80, True), (160, False)):
        monkeypatch.setenv("COLUMNS", str(width))
        papers.print_table("paper", [row])
        printed = capsys.readouterr().out
        assert ("cited for a model, EP 8, static: [up] to 2" in printed) is below
        assert "[up] to 2" in printed
        assert printed.startswith("paper; a model, EP 8\n")
