"""Commands that plan and simulate the step of a run have its mini-batches, assigned as `relibra train` does."""

import json
from dataclasses import replace

import numpy as np
import pytest

from relibra import write_trace
from relibra.planning.plan_files import read_plan
from relibra.rl.batch import step_plan
from relibra.rl.config.settings import UpdateSettings
from relibra.routing.demand_files import read_scheduled_demand
from relibra.routing.synthetic import TraceShape, domain_trace

RANKS, TOKENS, SEED = 4, 40, 7
MACHINE = ("--ranks", RANKS, "--ranks-per-node", "2")
CONFIG = {
    "run": {"seed": SEED},
    "update": {"mini_batches": 4, "micro_batch_tokens": TOKENS},
    "algorithm": {"preset": "grpo", "group_filter": "off"},
}


@pytest.fixture
def routes():
    """40 responses to 10 prompts, in the order in which two ranks wrote them."""
    lengths = np.random.default_rng(1).integers(3, 50, size=40).tolist()
    made = domain_trace(
        TraceShape(rows_per_sample=lengths, num_layers=2, num_experts=8, top_k=2), np.random.default_rng(0)
    )
    ids = np.concatenate([np.arange(20, 40), np.arange(20)]) + 400
    return replace(made, sample_ids=ids, group_ids=ids // 4, group_names=())


@pytest.fixture
def folder(tmp_path, routes):
    run = tmp_path / "runs" / "mine"
    write_trace(routes, run / "traces" / "step-00003")
    (run / "config.json").write_text(json.dumps(CONFIG))
    return run


def _trained(routes, monkeypatch, **update):
    """Return the schedule that training makes of these responses, in the order of the trace."""
    monkeypatch.setattr(step_plan.dist, "get_world_size", lambda: RANKS)
    order = np.argsort(routes.sample_ids)
    table = step_plan.ResponseTable(
        sample_id_S=routes.sample_ids[order],
        group_id_S=routes.group_ids[order],
        tokens_S=routes.rows_per_sample[order],
        prompt_S=routes.prompt_lengths[order],
        version_S=routes.weight_versions[order],
    )
    settings = UpdateSettings(**{**CONFIG["update"], **update})
    shares = settings.shared_prompts if "shared_prompts" in update else False
    made = step_plan.make_step_schedule(table, settings, by_group=True, seed=SEED, shares_prompts=shares)
    back = np.argsort(order)
    return made.mini_batch_M.tolist(), made.micro_batch_S[back].tolist(), made.rank_S[back].tolist()


def _planned(run, tmp_path, source, *more):
    words = ("--no-pack", "--balancer", "static", "-o", tmp_path / "p.safetensors", "--json", *more)
    code, out, err = run("plan", source, *MACHINE, *words)
    assert code == 0, err
    return read_scheduled_demand(tmp_path / "p.demand.safetensors"), json.loads(out)["cut"]


def test_the_step_of_a_run_is_scheduled_as_training_does(run, folder, routes, tmp_path, monkeypatch):
    mini_batch_M, micro_batch_S, rank_S = _trained(routes, monkeypatch)
    for source in (folder, folder / "traces" / "step-00003"):
        demand, cut = _planned(run, tmp_path, source)
        assert demand.group_M.tolist() == mini_batch_M
        assert demand.micro_batch_S.tolist() == micro_batch_S
        assert demand.rank_S.tolist() == rank_S
        assert read_plan(tmp_path / "p.safetensors").group_M.tolist() == mini_batch_M
        assert (cut["mini_batches"], cut["order"], cut["tokens_per_rank"]) == (4, "of the run", TOKENS)
    mini_batch_M, micro_batch_S, _ = _trained(routes, monkeypatch, mini_batches=2)
    demand, cut = _planned(run, tmp_path, folder, "--mini-batches", "2")
    assert demand.group_M.tolist() == mini_batch_M
    assert demand.micro_batch_S.tolist() == micro_batch_S
    assert cut["mini_batches"] == 2


def test_shared_prompts_are_scheduled_as_in_training(run, folder, routes, tmp_path, monkeypatch):
    prompts = np.minimum(routes.rows_per_sample, 2 + routes.group_ids % 3)
    routes = replace(routes, prompt_lengths=prompts)
    write_trace(routes, folder / "traces" / "step-00004")
    update = CONFIG["update"] | {"shared_prompts": True}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "update": update}))
    mini_batch_M, micro_batch_S, rank_S = _trained(routes, monkeypatch, shared_prompts=True)
    demand, _ = _planned(run, tmp_path, folder / "traces" / "step-00004")
    assert (demand.group_M.tolist(), demand.rank_S.tolist()) == (mini_batch_M, rank_S)
    assert demand.micro_batch_S.tolist() == micro_batch_S
    left_S = routes.rows_per_sample - demand.length_S
    assert set(left_S.tolist()) <= {0, 2, 3, 4}
    assert left_S.any()
    assert (demand.attention_S == routes.rows_per_sample**2 - left_S**2).all()
    assert ((left_S > 0) == (demand.piece_S != np.arange(routes.num_samples))).all()
    assert (routes.group_ids[demand.piece_S] == routes.group_ids).all()
    assert (demand.micro_batch_S[demand.piece_S] == demand.micro_batch_S).all()
    run("plan", folder / "traces" / "step-00004", *MACHINE, "-o", tmp_path / "packed.safetensors")
    packed = read_plan(tmp_path / "packed.safetensors")
    assert (packed.micro_batch_S[demand.piece_S] == packed.micro_batch_S).all(), (
        "whoever lacks a prompt stays behind it"
    )
    assert (packed.rank_S[demand.piece_S] == packed.rank_S).all()


def test_groups_that_the_run_may_not_have_trained_are_named(run, folder, tmp_path):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "algorithm": {"group_filter": "mixed"}}))
    assert _planned(run, tmp_path, folder)[1]["untrained_groups_included"]


def test_a_run_is_simulated_and_compared_in_its_mini_batches(run, folder):
    words = ("simulate", folder, *MACHINE, "--balancer", "static", "--json")
    one, four = (json.loads(run(*words, *more)[1]) for more in (("--mini-batches", "1"), ()))
    assert four["cut"]["mini_batches"] == 4
    assert four["terms"]["optimizer"] == pytest.approx(4 * one["terms"]["optimizer"])
    assert four["static_seconds"] > one["static_seconds"]
    for words in (("sweep",), ("compare",), ("compare", "--take", "all")):
        code, out, err = run(words[0], folder, *MACHINE, "--balancer", "static", *words[1:])
        assert code == 0, err
        assert "mini batches 4" in out


def test_mini_batches_of_a_trace_are_asked_for(run, routes, tmp_path):
    write_trace(routes, tmp_path / "t")
    demand, cut = _planned(run, tmp_path, tmp_path / "t", "--micro-batch-tokens", TOKENS)
    assert demand.group_M is None
    assert cut["mini_batches"] == 1
    demand, cut = _planned(run, tmp_path, tmp_path / "t", "--micro-batch-tokens", TOKENS, "--mini-batches", "3")
    mini_batch_S = demand.group_M[demand.micro_batch_S]
    assert (np.diff(mini_batch_S) >= 0).all()  # recorded order
    assert np.bincount(mini_batch_S).tolist() == [14, 13, 13]
    assert (cut["mini_batches"], cut["order"]) == (3, "recorded")
    shuffled, _ = _planned(run, tmp_path, tmp_path / "t", "--order", "shuffled", "--mini-batches", "3")
    assert (np.diff(shuffled.group_M[shuffled.micro_batch_S]) < 0).any()
    np.savez(tmp_path / "s.npz", micro_batch_S=np.zeros(40, int), rank_S=np.arange(40) % 4)
    words = ("--schedule", tmp_path / "s.npz", "--mini-batches", "2", "-o", tmp_path / "p")
    assert "leave out --mini-batches" in run("plan", tmp_path / "t", *MACHINE, *words)[2]
    words = ("--mini-batches", "41", "-o", tmp_path / "p")
    assert "fill at most 40" in run("plan", tmp_path / "t", *MACHINE, *words)[2]


def test_second_half_of_mini_batches_becomes_a_schedule(run, folder, tmp_path):
    out = tmp_path / "out.npz"
    _planned(run, tmp_path, folder, "--take", "second-half", f"--export=trainer={out}")
    assert np.load(out)["mini_batch_M"][0] == 0
