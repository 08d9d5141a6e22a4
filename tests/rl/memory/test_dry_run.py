"""Dry runs of a small model: no waits between layers, no tensors of two devices, parts as arithmetic says."""

import json
import os
import subprocess
import sys

import pytest
from transformers import Qwen3MoeConfig

from relibra.rl.model.token_scores import CHUNK_BYTES

RANKS, LAYERS, HIDDEN, WIDTH, EXPERTS, VOCABULARY = 4, 2, 256, 128, 16, 151_936
PROMPT, RESPONSE, RESPONSES = 64, 449, 4
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32
EXPERT_PARAMETERS = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH
OTHER_PARAMETERS = 2 * VOCABULARY * HIDDEN + LAYERS * (
    HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + HIDDEN * EXPERTS + 2 * HIDDEN + 2 * HEAD_DIM
)
SHARD = 4 * (EXPERT_PARAMETERS + OTHER_PARAMETERS) / RANKS
SERVED = ("rollout.engine=vllm", "rollout.url=http://127.0.0.1:1", "rollout.server_weights=/tmp")
WAITS = {
    ("optimizer", "item", "rl/model/optimizer.py clip_gradients"),
    ("recompute", "synchronize", "replay/device_copies.py wait_for_copies"),
    ("update", "tolist", "replay/routers.py read"),
    ("update", "tolist", "rl/algorithms/loss.py read_numbers"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, num_experts=EXPERTS, num_experts_per_tok=4,
        moe_intermediate_size=WIDTH, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def dry(folder, *settings):
    """Return what a dry run counted, in a process of its own: a device cannot be removed."""
    sizes = (
        *(f"model.path={folder}", f"parallel.ranks={RANKS}", "plan.cluster=h100x8", "plan.slots=2"),
        *(f"rollout.max_prompt={PROMPT}", f"rollout.max_response={RESPONSE}", "update.micro_batch_tokens=2048"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.rl.memory.dry_process", str(LAYERS), *sizes, *settings],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def at_peak(found, phase):
    """Return the parts of a phase at its largest sum."""
    return max(found["device"][phase].values(), key=lambda parts: sum(parts.values()))


def waits(found, *, inside):
    """Return what the host waits for, between layers and in backward passes, or elsewhere."""
    phases = ("recompute", "update", "optimizer")
    named = [(phase, kind, line) for kind, line, phase, within, _ in found["waits"] if within == inside]
    return {one for one in named if one[0] in phases}


@pytest.fixture(scope="module")
def served(folder):
    return dry(folder, *SERVED)


def test_a_planned_pass_never_waits_between_layers(served):
    assert not waits(served, inside=True)


def test_waits_outside_of_layers_are_those_of_a_list(served):
    assert waits(served, inside=False) == WAITS


def test_no_operation_mixes_devices(served):
    assert not served["mixed"]


def test_parts_are_as_arithmetic_says(served):
    optimizer, update = (at_peak(served, phase) for phase in ("optimizer", "update"))
    assert optimizer["weights"] == pytest.approx(SHARD, rel=0.01)
    assert optimizer["moments"] == pytest.approx(2 * SHARD, rel=0.01)
    assert optimizer["gradients"] == pytest.approx(SHARD, rel=0.01)
    assert "copy" not in update
    chunk = 4 * VOCABULARY * (CHUNK_BYTES // (4 * VOCABULARY))
    assert update["logits"] == pytest.approx(3.5 * chunk, rel=0.01)


@pytest.mark.slow
def test_an_estimate_is_what_two_processes_take():
    """The ledger of the dry run against the same one around tensors of two processes."""
    command = [sys.executable, "-m", "benchmarks", "memory", "--quick", "--cases", "full", "kept by plan"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
