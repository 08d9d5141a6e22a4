"""What layers keep by plan: made once, for the run, and without a changed bit."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from relibra import cluster_preset, demo_demand
from relibra.errors import ConfigError
from relibra.planning.plan import StepPlan
from relibra.rl.batch.schedule import Schedule
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.config.run_config import load_config
from relibra.rl.memory.activation_memory import ActivationMemory
from relibra.rl.memory.estimate import ESTIMATE_FILE
from relibra.rl.model.sharding import decoder_layers, keep_activations
from relibra.rl.update import planned_activations
from relibra.rl.update.planned_activations import PlannedActivations
from relibra.simulation import model_shape
from tests.rl.ranks_at_work import assert_same_bits, assert_trained, outcome_of, run_alone, run_on_ranks

LAST_LAYER = {
    "token_bytes_L": [1e9, 1.0],
    "token_slot_bytes_L": [0.0, 0.0],
    "token_slots": 0,
    "loss_bytes": 0.0,
    "layer_bytes": 0.0,
    "room_bytes": 1e6,
}
"""Of a model of two layers: only the last fits."""


def with_figures(run, figures):
    run.mkdir(parents=True)
    (run / ESTIMATE_FILE).write_text(json.dumps({"activations": figures}))
    return run


def test_kept_activations_of_one_rank_change_no_bit(tmp_path):
    flags = []

    def note(model, _batch):
        flags.append([layer.gradient_checkpointing for layer in decoder_layers(model)])

    run = with_figures(tmp_path / "plan", LAST_LAYER)
    planned = outcome_of(run, [run_alone(("update.activations=plan", "run.steps=1"), run, note=note)])
    again = tmp_path / "recompute"
    recomputed = outcome_of(again, [run_alone(("update.activations=recompute", "run.steps=1"), again)])
    assert flags == [[True, False]]
    assert_same_bits(planned, recomputed)
    assert_trained(planned)


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["fast", "canonical"])
def test_kept_activations_of_two_ranks_change_no_bit(tmp_path, sums):
    copies = (f"plan.sums={sums}", "plan.balancer=relibra_paper_tokens")
    cases = {how: (f"update.activations={how}", *copies) for how in ("plan", "recompute", "keep")}
    with_figures(tmp_path / "plan", LAST_LAYER)
    found = run_on_ranks(2, cases, tmp_path)
    assert sum(row["replicas"] for row in found["plan"].rows) > 0
    assert_same_bits(found["plan"], found["recompute"])
    assert_same_bits(found["plan"], found["keep"])


@pytest.fixture
def planned(monkeypatch):
    """A choice for three layers of which the first is dense, without a model and other ranks."""
    monkeypatch.setattr(planned_activations, "broadcast_json", lambda value: value)
    kept = []
    monkeypatch.setattr(planned_activations, "keep_activations", lambda _model, option_L: kept.append(option_L))
    memory = ActivationMemory(
        token_bytes_L=[10.0] * 3,
        token_slot_bytes_L=[0.0, 1.0, 1.0],
        loss_bytes=5e5,
        layer_bytes=5e5,
        token_slots=8192,
        room_bytes=5.9e5,
    )
    chosen = PlannedActivations(memory, nn.Module(), cluster_preset("h100x8"), model_shape("qwen3-30b-a3b"))
    return SimpleNamespace(chosen=chosen, kept=kept, memory=memory)


def batch_of(rank_tokens, num_experts=128):
    demand = demo_demand(8, rank_tokens=rank_tokens, num_experts=num_experts)
    schedule = Schedule(**dict.fromkeys(("mini_batch_M", "micro_batch_S", "rank_S"), np.zeros(1, np.int32)))
    demand = replace(demand, layer_ids=demand.layer_ids + 1)
    return TrainingBatch(responses=[], micro_batches=[], schedule=schedule, demand=demand, plan=None)


def test_a_choice_is_kept_until_it_does_not_fit(planned):
    few, many = batch_of(1024), batch_of(8192)
    planned.chosen.prepare(few)
    assert planned.kept[0].count("all") >= 1
    line = planned.chosen.take_line()
    assert "GiB" in line
    assert planned.chosen.take_line() == ""
    planned.chosen.prepare(few)
    planned.chosen.prepare(batch_of(512))
    assert len(planned.kept) == 1, "it fits"
    planned.chosen.prepare(many)
    assert len(planned.kept) == 2
    assert planned.kept[1].count("all") < planned.kept[0].count("all")
    plan = StepPlan.static(many.demand, cluster_preset("h100x8").topology)
    assert planned.memory.fits(planned.kept[1], plan, many.demand, model_shape("qwen3-30b-a3b"))
    planned.chosen.prepare(replace(many, demand=None))
    assert len(planned.kept) == 2


def test_without_routes_nothing_can_be_planned():
    with pytest.raises(ConfigError, match=r"update\.activations"):
        load_config(None, ["update.activations=plan", "algorithm.replay=off"])
    with pytest.raises(ConfigError, match=r"update\.activations"):
        load_config(None, ["update.activations=plan", "plan.balancer=static", "parallel.ranks=2"])
    assert load_config(None, ["update.activations=plan", "parallel.ranks=2"]).update.activations == "plan"


def test_a_layer_without_a_flag_of_its_own_is_refused():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(1, 1)])
    with pytest.raises(ConfigError, match="GradientCheckpointingLayer"):
        keep_activations(model, ["all"])
