"""The last step of a run, planned again: whose sizes it is simulated with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relibra.cluster import cluster_preset
from relibra.planning.budget import DEFAULT_MODEL
from relibra.reporting.data.planned_step import default_model, plan_last_step
from relibra.reporting.data.recording import open_recording
from relibra.simulation import model_shape

CONFIG = {
    "model_type": "mine", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_experts": 8,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip


def write_config(run_folder: Path, config: object) -> None:
    (run_folder / "policy").mkdir(exist_ok=True)
    (run_folder / "policy" / "config.json").write_text(json.dumps(config))


def test_sizes_are_those_of_the_policy(run_folder: Path) -> None:
    recording = open_recording(run_folder)
    assert default_model(recording.path).name == DEFAULT_MODEL
    write_config(run_folder, CONFIG)
    shape = default_model(recording.path)
    assert shape is not None
    assert (shape.name, shape.hidden) == ("this run’s policy (mine)", 64)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"layer_types": 3},
        {"mlp_only_layers": 2},
        {"kv_lora_rank": 8, "q_lora_rank": "a", "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        {"hidden_size": None},
    ],
)
def test_damaged_sizes_are_none(run_folder: Path, change: dict[str, object]) -> None:
    write_config(run_folder, CONFIG | change)
    assert default_model(run_folder).name == DEFAULT_MODEL


def test_few_recorded_layers_are_a_part_of_a_large_model(run_folder: Path) -> None:
    step, about = plan_last_step(
        open_recording(run_folder), cluster=cluster_preset("h100x8"), model=model_shape("gpt-oss-20b")
    )
    layers = len(step.after.plan.layer_ids)
    assert layers < 12
    assert (step.model.layers, step.model.part_of) == (layers, 24)
    assert "planned here again, on 2 ranks" in about
