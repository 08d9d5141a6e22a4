"""`relibra serve`: what a start refuses, tells, and derives from the model."""

import socket
import subprocess
import sys

import pytest
from transformers import DbrxConfig, GptOssConfig, Llama4Config, Qwen3MoeConfig

from relibra.planning.deployment.deployment_files import write_expert_placement
from relibra.planning.deployment.expert_placement import ExpertPlacement
from relibra.serving.roles.checkpoint import count_positions

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (Qwen3MoeConfig(max_position_embeddings=1024), 1024),
        (Qwen3MoeConfig(max_position_embeddings=1024, rope_parameters=YARN), 2048),
        (Qwen3MoeConfig(max_position_embeddings=4096, rope_parameters=YARN), 4096),
        (GptOssConfig(), 131_072),
        (DbrxConfig(max_seq_len=512), 512),
        (Llama4Config(text_config={"max_position_embeddings": 99}), 99),
    ],
    ids=lambda one: type(one).__name__,
)
def test_positions_are_those_of_the_configuration(config, positions):
    assert count_positions(config) == positions


@pytest.mark.parametrize(
    ("positions", "asked", "longest", "told"),
    [(1024, [], 1024, False), (1 << 20, [], 4096, False), (1024, [900], 900, False), (1024, [1500], 1500, True)],
)
def test_the_longest_request_is_what_the_model_has_positions_for(
    run, tmp_path, monkeypatch, positions, asked, longest, told
):
    Qwen3MoeConfig(max_position_embeddings=positions).save_pretrained(tmp_path)
    layouts = []
    monkeypatch.setattr("relibra.serving.server.serve.serve", lambda _model, layout, *_, **__: layouts.append(layout))
    code, _, err = run("serve", tmp_path, *(["--max-length", *asked] if asked else []))
    assert code == 0
    assert [layout.max_length for layout in layouts] == [longest]
    assert ("1,024 positions" in err) == told


def test_a_failed_start_ends_with_1_while_standard_input_is_open(tmp_path):
    Qwen3MoeConfig().save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "relibra", "serve", str(tmp_path), "--until-eof", "--port", port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            said = process.stderr.read()
            assert process.wait(60) == 1
            process.stdin.close()
    assert f"--port {port}" in said
    assert len(said.splitlines()) == 1


def test_a_placement_brings_its_workers_copies_and_cap(run, tmp_path, monkeypatch):
    Qwen3MoeConfig().save_pretrained(tmp_path)
    placement = ExpertPlacement(layer_ids=(0,), holders=(((0,), (1, 0), (1,)),), workers=2, cap=1.2)
    write_expert_placement(tmp_path / "placement.json", placement)
    started = []
    monkeypatch.setattr(
        "relibra.serving.server.serve.serve", lambda _model, layout, *_, **given: started.append((layout, given))
    )
    options = ("serve", tmp_path, "--placement", tmp_path / "placement.json")
    assert run(*options)[0] == 0
    [(layout, given)] = started
    assert (layout.experts, layout.spare_experts, layout.cap) == (2, 1, 1.2)
    assert given["placement"] == placement
    code, _, err = run(*options, "--experts", 3)
    assert code == 1
    assert "--experts 3" in err
