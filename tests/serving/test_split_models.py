"""A model whose experts are on other workers answers as the whole model does."""

import threading

import pytest

from relibra.engine.sequence import Sequence
from relibra.errors import ConfigError, EngineError, RelibraError
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout, split_experts
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
            counters = worker.counters()
            assert counters["staging_copies"] == counters["group_creations"] == 0
        for worker in served.experts:
            assert worker.inbox.counters.staging_copies == worker.inbox.counters.group_creations == 0


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


def test_a_family_with_experts_of_its_own_is_refused_by_name(tmp_path):
    tiny_causal_model("LongcatFlashForCausalLM").save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="LongcatFlashForCausalLM cannot be split"):
        read_structure(tmp_path)


@pytest.mark.parametrize(("layout", "named"), [({"experts": 63}, "--experts 63 is more"), ({}, "cannot be split")])
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


def test_experts_are_split_evenly():
    assert split_experts(8, 3) == ((0, 1, 2), (3, 4, 5), (6, 7))
    with pytest.raises(ConfigError, match="--experts 9"):
        split_experts(8, 9)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"micro_batches": 5}, "micro_batches is 5"),
        ({"attention": 0}, "attention is 0"),
        ({"timeout": 0.0}, "timeout is 0.0"),
        ({"max_length": 4096, "kv_tokens": 4096}, "--kv-tokens 4096"),
    ],
)
def test_layouts_out_of_range_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        WorkerLayout(**{"max_length": 16, "kv_tokens": 4096} | changes)


def test_the_cache_stays_within_its_bytes(tmp_path):
    """Rows begin and end all the time, and the places are few."""
    write_model("GptOssForCausalLM", tmp_path)
    requests = [greedy_request(number, 1 + 5 * number % 23, 3 + 7 * number % 31) for number in range(24)]
    layout = small_layout(micro_batches=1, max_batch=8, max_length=64, kv_tokens=160)
    with served_in_process(tmp_path, layout) as served:
        [worker] = served.attention
        seen, ended = [], threading.Event()

        def look() -> None:
            while not ended.wait(0.0005):
                counters = worker.counters()
                seen.append((counters["kv_cache_bytes"], counters["kv_cache_usage"]))

        looking = threading.Thread(target=look)
        looking.start()
        served.generate(requests)
        ended.set()
        looking.join()
    assert max(usage for _, usage in seen) <= 1
    assert 0.5 * worker.most_cache_bytes < max(held for held, _ in seen) <= 1.05 * worker.most_cache_bytes
