"""A model whose experts are on other workers answers as the whole model does."""

import numpy as np
import pytest

from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.errors import ConfigError, RelibraError
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import new_response
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.attention_worker import AttentionWorker
from relibra.serving.roles.checkpoint import read_structure
from tests.replay.model_zoo import tiny_causal_model
from tests.serving.in_process import served_in_process
from tests.serving.models import (
    SPLIT_MODELS,
    answer_of,
    assert_same,
    greedy_answer,
    greedy_request,
    write_model,
)

QUICK = ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM", "JambaForCausalLM")
LENGTHS = (5, 9, 20, 2, 7)


def small_layout(**changes):
    return WorkerLayout(**{"max_tokens": 16, "max_length": 96, "kv_tokens": 1024, "timeout": 20.0} | changes)


def assert_served_equals_whole(name, folder, layout, lengths=LENGTHS, limit=12):
    model = write_model(name, folder)
    requests = [greedy_request(number, length, limit) for number, length in enumerate(lengths)]
    expected = [greedy_answer(model, request.prompt, limit) for request in requests]
    assert_served_equals(folder, layout, requests, expected)


def assert_served_equals(folder, layout, requests, expected):
    requests = [Sequence(number=one.number, prompt=one.prompt, sampling=one.sampling) for one in requests]
    with served_in_process(folder, layout) as served:
        for answer, sequence in zip(expected, served.generate(requests), strict=True):
            assert_same(answer_of(sequence), answer)
        for worker in served.attention:
            assert worker.counters()["group_creations"] == 0
        for worker in served.experts:
            assert worker.inbox.counters.group_creations == 0


@pytest.mark.parametrize("name", QUICK)
def test_answers_equal_the_whole_model(name, tmp_path):
    assert_served_equals_whole(name, tmp_path, small_layout(attention=2, experts=3, micro_batches=2))


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_transports_and_fewer_requests_than_micro_batches(transport, micro_batches, tmp_path):
    layout = small_layout(experts=2, micro_batches=micro_batches, transport=transport)
    assert_served_equals_whole("Qwen3MoeForCausalLM", tmp_path, layout, lengths=(4, 11), limit=6)


def test_experts_without_rows_answer_too(tmp_path):
    assert_served_equals_whole(
        "MixtralForCausalLM", tmp_path, small_layout(experts=8, micro_batches=3), lengths=(1,), limit=4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT_MODELS)
def test_every_family_equals_the_whole_model_in_every_layout(name, tmp_path):
    model = write_model(name, tmp_path)
    requests = [greedy_request(number, length, 64) for number, length in enumerate(LENGTHS)]
    expected = [greedy_answer(model, request.prompt, 64) for request in requests]
    for attention, experts in ((1, 1), (2, 1), (1, 2), (2, 3)):
        for micro_batches in (1, 2, 3, 4):
            layout = small_layout(attention=attention, experts=experts, micro_batches=micro_batches)
            assert_served_equals(tmp_path, layout, requests, expected)


@pytest.mark.parametrize(
    ("layout", "named"), [({"experts": 63}, "--experts 63 is more"), ({}, "LongcatFlashForCausalLM cannot be split")]
)
def test_what_cannot_be_split_is_refused_before_processes_start(layout, named, tmp_path, monkeypatch):
    family = "Qwen3MoeForCausalLM" if layout else "LongcatFlashForCausalLM"
    tiny_causal_model(family).save_pretrained(tmp_path)
    monkeypatch.setattr(RunningWorkers, "_start", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(RelibraError, match=named):
        RunningWorkers(tmp_path, small_layout(**layout))


@pytest.mark.parametrize("dtype", ["int8", "Tensor"])
def test_only_types_that_hold_weights_are_taken(dtype, tmp_path):
    tiny_causal_model("Qwen3MoeForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(RelibraError, match=f"--dtype '{dtype}' is unknown"):
        read_structure(tmp_path, dtype)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"attention": 0}, "attention is 0"), ({"max_length": 4096, "kv_tokens": 4096}, "--kv-tokens 4096")],
)
def test_layouts_out_of_range_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        WorkerLayout(**{"max_length": 16, "kv_tokens": 4096} | changes)


def test_the_bytes_of_a_full_cache_are_known_before_requests(tmp_path):
    config = write_model("GptOssForCausalLM", tmp_path).config
    worker = AttentionWorker(tmp_path, small_layout(kv_tokens=192), 0)
    bytes_of_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert worker.most_cache_bytes == 192 * bytes_of_token


SEED, TEMPERATURE, LIMIT = 5, 0.7, 24
STOPS = (11, 12, 13)
PROMPTS = [tuple((7 * s + 3 * n) % 57 + 3 for n in range(3 + 4 * s)) for s in range(5)]


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_sampled_answers_equal_the_embedded_engine(name, tmp_path):
    model = write_model(name, tmp_path)
    engine = EmbeddedEngine(model=model, pad_id=0, stop_ids=STOPS, temperature=TEMPERATURE, seed=SEED, max_batch=8)
    responses = [new_response(s, s, prompt) for s, prompt in enumerate(PROMPTS)]
    windows, _ = engine.generate(responses, window=LIMIT, max_response=LIMIT)
    requests = [
        Sequence(
            number=s,
            prompt=prompt,
            sampling=SamplingParameters(
                limit=LIMIT, temperature=TEMPERATURE, seed=SEED, sample=s, stop_ids=STOPS, routes=True
            ),
        )
        for s, prompt in enumerate(PROMPTS)
    ]
    layout = WorkerLayout(experts=2, micro_batches=2, max_tokens=32, max_length=64, kv_tokens=1024, timeout=20.0)
    with served_in_process(tmp_path, layout) as served:
        answers = list(map(answer_of, served.generate(requests)))
    assert any(window.stopped for window in windows)
    for window, answer in zip(windows, answers, strict=True):
        assert answer.tokens == window.tokens_w.tolist()
        assert np.abs(answer.log_probs - window.log_probs_w).max() <= 1e-5
        assert (answer.routes == window.experts_mLK).all()
