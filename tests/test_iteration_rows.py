"""Arithmetic of `relibra bench iteration`: ratios, settings of peers, samples with prompts once, repeated layers."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.simulation import iteration_rows
from benchmarks.simulation.iteration_cells import Cell, draw_demand, draw_lengths, matrix, quick, repeat_layers
from benchmarks.simulation.iteration_peers import PEER_SETTINGS
from benchmarks.simulation.iteration_rows import PEERS, RELIBRA, with_best_setting, with_moments
from relibra.simulation import SimulatedRollout, simulate_step
from relibra.simulation.training_passes import Iteration, Levers, TrainingPasses
from tests.simulation.steps import random_step
from tests.simulation.test_training_passes import made_step

CELL = Cell(ranks=8, dispatch="flat", skew=1.3, mini_batches=4, prompt=1024, response=3072)


def made_row(plan, seconds, *, peer="", fits=True, prompts="repeated"):
    words = {"passes": "none", "balancer": "live", "prompts": prompts}
    return {"plan": plan, "seconds": seconds, "peer": peer, "fits": fits, **words}


def test_the_best_setting_is_the_fastest_that_fits():
    rows = [made_row(RELIBRA, 2.0), made_row("a", 1.0, peer="a", fits=False), made_row("b", 3.0, peer="b")]
    rows += [made_row("c", 2.5, peer="c", prompts="once")]
    row = with_best_setting(rows)[0]
    assert (row["ratio_to_best_setting"], row["best_setting"]) == (1.25, "c: none, live")
    assert (row["ratio_to_best_repeating_setting"], row["best_repeating_setting"]) == (1.5, "b: none, live")


def test_every_peer_has_its_default_its_best_and_a_source():
    names = [one.name for one in PEER_SETTINGS if one.prompts == "repeated"]
    assert len(names) == 18
    assert all(names.count(name) == 2 for name in names)
    assert all("2026-11" in one.source and "/" in one.source and one.words for one in PEER_SETTINGS)


def test_prompts_once_leave_out_their_copies_only():
    repeated, once = (draw_demand(CELL, 16_384, once=it) for it in (False, True))
    responses, lengths = draw_lengths(CELL), repeated.length_S
    assert lengths.sum() == responses.sum() + CELL.prompt * len(responses)
    assert once.length_S.sum() == responses.sum() + CELL.prompt * len(once.length_S)
    assert len(once.length_S) < len(responses) / 3
    assert once.attention_S.sum() < repeated.attention_S.sum()
    for demand in (repeated, once):
        assert demand.sum_per_rank(demand.length_S).max() <= 16_384
        assert demand.group_M.tolist() == sorted(demand.group_M.tolist())
        assert demand.load_MLE.sum() == demand.counts_SLE.sum()


def test_repeated_layers_take_as_many_times_the_seconds():
    plan, demand, cluster, model = random_step(5, nodes=1, per_node=2, layers=2, slots=1, resident=False)
    model = replace(model, dense_layers=0, dense_width=0, shared_width=0, vocabulary=1)
    whole, scheduled = repeat_layers(plan, demand, 6)
    two, six = (
        simulate_step(one, of, cluster, replace(model, moe_layers=layers))
        for one, of, layers in ((plan, demand, 2), (whole, scheduled, 6))
    )
    for term in ("host", "exchange", "compute"):
        assert six.terms[term] == pytest.approx(3 * two.terms[term])


def test_a_peer_steps_moments_where_it_is_faster():
    terms = {"attention": 0.0, "optimizer": 1.0, "relocation": 0.0}
    update, kept = made_step(100.0, terms), made_step(60.0, terms)
    passes = TrainingPasses(
        update=update, all_kept=kept, forward=20.0, later=15.0, moment_seconds=0.0,
        parts={"weights": 60e9, "optimizer": 40e9}, layer_bytes=(1e9, 10e9), layers=4, room=100e9,
    )  # fmt: skip
    rollout = SimulatedRollout(decode=1.0, prefill=0.0, fed_again=0.0, tokens=1, idle=0.0)
    iteration = Iteration(rollout=rollout, rollout_beside=rollout, reward=0.0, sync=0.0)
    cluster = SimpleNamespace(ranks_per_node=8, host=SimpleNamespace(seconds=lambda size: size / 64e9))
    case = SimpleNamespace(cluster=cluster, cell=CELL)
    levers, peer = Levers(activations="kept"), PEER_SETTINGS[0]
    found = {
        place: with_moments(passes, levers, iteration, replace(peer, moments=place), case)
        for place in ("device", "cpu", "faster")
    }
    assert found["device"].training == 120.0, "no room to keep a layer"
    on_cpu = 4 * 30 * 5e9 * 8 / iteration_rows.HOST_MEMORY
    assert found["cpu"].training == pytest.approx(20.0 + 60.0 - 1.0 + on_cpu)
    assert found["faster"] == found["cpu"]


def test_cells_cover_the_matrix_once():
    assert len({cell.name for cell in matrix()}) == len(matrix()) == 3 * 3 * 2 * 2
    assert {cell.name for cell in quick()} < {cell.name for cell in matrix()}
    assert set(PEERS) >= {"eplb", "ultraep", "moonep", "live"}
