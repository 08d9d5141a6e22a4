"""Every reader gives back the routes of payloads that `recordings` builds as the released code builds them."""

import dataclasses
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from typer.testing import CliRunner

from relibra.cli.main import app
from relibra.errors import TraceError
from relibra.routing.readers.formats import Format, ImportRules, ShortRows, ZeroRows, import_samples
from relibra.routing.readers.formats.normalise import ImportCounts, iterate_pieces
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_files import read_trace
from tests.routing import recordings as made
from tests.routing.recordings import read, write

SIZES = ((4, 3), (1, 5), (6, 2))
"""Tokens of prompt and response of the samples."""


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def samples(rng):
    return [(made.routes(rng, prompt + new - 1), prompt, new) for prompt, new in SIZES]


def assert_same(trace, samples, prompts=True):
    """Compare valid rows with the routes of the samples; the last token of each has a row without a route."""
    assert trace.num_samples == len(samples)
    for s, (ids, prompt, new) in enumerate(samples):
        rows = trace.sample_rows(s)
        valid = trace.valid_T[rows]
        assert len(valid) == prompt + new
        assert valid[: len(ids)].all()
        assert not valid[len(ids) :].any()
        np.testing.assert_array_equal(trace.experts_TLK[rows][: len(ids)], ids)
        assert trace.prompt_lengths[s] == (prompt if prompts else 0)


def prompts_apart(ids, prompt, new):
    return made.vllm_answer(ids[prompt:], prompt, new) | {"prompt_routed_experts": made.npy_base64(ids[:prompt])}


def beside_choices(ids, prompt, new):
    usage = {"prompt_tokens": prompt, "completion_tokens": new}
    return {"choices": [{"index": 0}], "usage": usage, "sglext": {"routed_experts": made.raw_base64(ids)}}


def packed_answer(ids, prompt, new):
    answer = made.vllm_answer(ids, prompt, new)
    answer["choices"][0]["routed_experts"] = made.packed(ids.astype(np.uint8))
    return answer


def two_turns(ids, prompt, new):
    return made.gym_result([(ids[:1].astype(np.int8), 1, 1), (ids.astype(np.int8), prompt, new)])


def jagged(samples):
    rows = [np.concatenate([ids, np.zeros((1, *ids.shape[1:]), ids.dtype)]) for ids, _, _ in samples]
    offsets, prompts = np.cumsum([0, *map(len, rows)]), np.array([prompt for _, prompt, _ in samples])
    return {"routed_experts": np.concatenate(rows).astype(np.int16), "offsets": offsets, "prompt_lengths": prompts}


def verl(samples):
    return made.verl_batch(samples, prompt_width=8, response_width=7)


def skyrl(samples):
    return made.skyrl_batch(samples, padding=2)


def slime(wrap):
    return lambda samples: {"rollout_id": 0, "samples": made.slime_samples(samples, wrap)}


def prime(pad):
    def make(samples):
        full = [(np.concatenate([ids, ids[-1:]]).astype(np.uint8), True) for ids, _, _ in samples]
        return made.prime_batches([full[:1], [(full[0][0], False)], full[1:]], pad)

    return make


def each(answer, dtype=np.int32):
    """Return what makes a list of answers."""
    return lambda samples: [answer(ids.astype(dtype), prompt, new) for ids, prompt, new in samples]


@pytest.mark.parametrize(
    ("format", "name", "make"),
    [
        (Format.ANSWERS, "a.jsonl", each(made.vllm_answer)),
        (Format.ANSWERS, "a.json", each(made.vllm_answer, np.uint8)),
        (Format.ANSWERS, "a.json", each(made.vllm_answer, np.uint16)),
        (Format.ANSWERS, "a.json", each(prompts_apart)),
        (Format.ANSWERS, "a.json", each(made.sglang_answer)),
        (Format.ANSWERS, "a.json", each(beside_choices)),
        (Format.ANSWERS, "a.json", each(packed_answer)),
        (Format.ANSWERS, "a.jsonl", each(made.megatron_answer)),
        (Format.ANSWERS, "a.jsonl", each(two_turns)),
        (Format.VERL, "b.safetensors", verl),
        (Format.VERL, "b.npz", verl),
        (Format.VERL, "b.pt", lambda samples: made.tensors(verl(samples))),
        (Format.VERL, "b.npz", jagged),
        (Format.SKYRL, "b.safetensors", skyrl),
        (Format.SKYRL, "b.pt", lambda samples: made.tensors(skyrl(samples))),
        (Format.SKYRL, "b.pkl", lambda samples: made.skyrl_pickle(skyrl(samples))),
        (Format.NEMO_RL, "b.npz", made.nemo_batch),
        (Format.SLIME, "0.pt", slime(made.tensor)),
        (Format.SLIME, "0.pt", slime(np.asarray)),
        (Format.SLIME, "0.pt", slime(np.ndarray.tolist)),
        (Format.PRIME_RL, "rank_0.bin", prime(0)),
        (Format.PRIME_RL, "rank_0.bin", prime(3)),
    ],
)
def test_every_form_gives_back_its_routes(tmp_path, samples, format, name, make):
    samples *= 20 if format is Format.PRIME_RL else 1  # lists and arrays of MessagePack have heads of several lengths
    trace = read(write(tmp_path / name, make(samples)), format, recorded_layers=3, top_k=2)
    assert_same(trace, samples, prompts=format not in (Format.NEMO_RL, Format.PRIME_RL))
    if format is Format.SLIME:
        assert trace.sample_ids.tolist() == [10, 11, 12]
        assert trace.group_ids.tolist() == [0, 0, 1]
        assert trace.weight_versions.tolist() == [4] * 3


def test_several_choices_of_one_answer_need_token_ids(tmp_path, samples):
    answer = made.vllm_answer(samples[0][0], 4, 3)
    answer["choices"] *= 2
    answer["usage"]["completion_tokens"] = 6
    assert_same(read(write(tmp_path / "a.json", answer), Format.ANSWERS), [samples[0]] * 2)
    for choice in answer["choices"]:
        choice.pop("token_ids", None)
    with pytest.raises(TraceError, match="return_token_ids=true"):
        read(write(tmp_path / "a.json", answer), Format.ANSWERS)
    answer = beside_choices(*samples[0])
    answer["choices"] *= 2
    with pytest.raises(TraceError, match=r"token ids|n=1"):
        read(write(tmp_path / "a.json", answer), Format.ANSWERS, recorded_layers=3, top_k=2)


def test_answers_of_sglang_need_their_shape(tmp_path, samples):
    path = write(tmp_path / "a.json", [made.sglang_answer(*one) for one in samples])
    with pytest.raises(TraceError, match="--recorded-layers"):
        read(path, Format.ANSWERS)
    assert read(path, Format.ANSWERS, recorded_layers=3, top_k=2).weight_versions.tolist() == [7] * 3
    with pytest.raises(TraceError, match="no multiple of"):
        read(path, Format.ANSWERS, recorded_layers=5, top_k=2)


@pytest.mark.parametrize("engine", ["sglang", "prime-rl"])
def test_rows_from_a_start_on(tmp_path, samples, engine):
    ids, prompt, new = samples[0]
    answer = made.sglang_answer(ids[2:], prompt, new, start=2)
    if engine == "prime-rl":
        answer = made.vllm_answer(ids, prompt, new)
        answer["choices"][0]["routed_experts"] = made.packed(ids[2:].astype(np.uint8), start=2)
    trace = read(write(tmp_path / "a.json", answer), Format.ANSWERS, recorded_layers=3, top_k=2)
    assert trace.valid_T.tolist() == [False] * 2 + [True] * 4 + [False]
    np.testing.assert_array_equal(trace.experts_TLK[2:-1], ids[2:])


def test_missing_rows_of_nemo_are_rows_without_a_route(tmp_path, samples):
    cut = [(ids[:-1].astype(np.int8), prompt, new) for ids, prompt, new in samples]
    assert_same(read(write(tmp_path / "a.jsonl", [made.gym_result([one]) for one in cut]), Format.ANSWERS), cut)
    assert_same(read(write(tmp_path / "b.npz", made.nemo_batch(cut)), Format.NEMO_RL), cut, prompts=False)


def test_traces_of_megatron(tmp_path, rng):
    steps = [[made.routes(rng, 5)], [made.routes(rng, 4), made.routes(rng, 6)]]
    trace = read(write(tmp_path / "router_trace_rank0.jsonl", made.megatron_lines(steps)), Format.MEGATRON)
    passes = [ids for step in steps for ids in step]
    assert trace.rows_per_sample.tolist() == [5, 4, 6]
    assert trace.valid_T.all()
    np.testing.assert_array_equal(trace.experts_TLK, np.sort(np.concatenate(passes), axis=-1))
    lines = made.megatron_lines(steps).splitlines(keepends=True)
    with pytest.raises(TraceError, match="through layer 0"):
        read(write(tmp_path / "router_trace_rank1.jsonl", b"".join(lines[:4] + lines[5:])), Format.MEGATRON)


def test_recorded_indices_of_router_replay(tmp_path, rng):
    ids = made.routes(rng, 7, dtype=np.int64)
    trace = read(write(tmp_path / "r.pt", [made.tensor(ids[:, layer]) for layer in range(3)]), Format.MEGATRON)
    np.testing.assert_array_equal(trace.experts_TLK, ids)


def test_recorder_files_of_sglang_hold_physical_ids(tmp_path, rng):
    passes = [made.routes(rng, 5), made.routes(rng, 3)]
    slots = np.stack(
        [rng.permutation(np.r_[np.arange(made.EXPERTS), rng.integers(made.EXPERTS, size=4)]) for _ in range(3)]
    )
    path = write(tmp_path / "r.pt", made.recorder_dump(passes, slots, made.tensor))
    trace = read(path, Format.SGLANG_RECORDER)
    np.testing.assert_array_equal(trace.experts_TLK, np.concatenate(passes))
    path = write(tmp_path / "d.pt", made.recorder_dump(passes, slots, made.tensor, dense=(0,)))
    with pytest.raises(TraceError, match="--layers 1-2"):
        read(path, Format.SGLANG_RECORDER)
    trace = read(path, Format.SGLANG_RECORDER, layers=(1, 2))
    np.testing.assert_array_equal(trace.experts_TLK, np.concatenate(passes)[:, 1:])
    assert trace.layer_ids.tolist() == [1, 2]
    counts = {
        "rank": 0,
        "logical_count": made.tensor(np.zeros((1, 3, made.EXPERTS), np.int32)),
        "average_utilization_rate_over_window": None,
    }
    with pytest.raises(TraceError, match="per_token"):
        read(write(tmp_path / "s.pt", counts), Format.SGLANG_RECORDER)


def test_layers_without_experts_are_named_not_guessed(tmp_path, rng):
    ids = made.routes(rng, 6, layers=4)
    ids[:, 0] = 0
    path = write(tmp_path / "a.json", made.vllm_answer(ids, 3, 4))
    with pytest.raises(TraceError, match=r"layers \[0\] are zero in every row.*--layers 1-3"):
        read(path, Format.ANSWERS)
    trace = read(path, Format.ANSWERS, layers=(1, 2, 3))
    assert trace.layer_ids.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(trace.experts_TLK[:-1], ids[:, 1:])
    np.testing.assert_array_equal(read(path, Format.ANSWERS, layers=(1, 3)).experts_TLK[:-1], ids[:, [1, 3]])
    moe_only = write(tmp_path / "b.json", made.vllm_answer(ids[:, 1:], 3, 4))
    assert read(moe_only, Format.ANSWERS, layers=(1, 2, 3)).layer_ids.tolist() == [1, 2, 3]
    with pytest.raises(TraceError, match="layer axis holds either"):
        read(path, Format.ANSWERS, layers=(1, 2, 3, 4, 5))


def test_zero_rows_are_counted_and_a_choice(tmp_path, samples):
    ids = samples[0][0].copy()
    ids[:2] = 0
    answers = [made.vllm_answer(ids, 4, 3), made.vllm_answer(*samples[1])]
    path = write(tmp_path / "a.jsonl", answers)
    with pytest.raises(TraceError, match=r"2 of 6 rows are zero in every layer.*--zero-rows missing"):
        read(path, Format.ANSWERS)
    counts = ImportCounts()
    trace = read(path, Format.ANSWERS, counts, zero_rows=ZeroRows.MISSING)
    assert trace.valid_T[:7].tolist() == [False, False, True, True, True, True, False]
    assert (counts.zero_rows, counts.dropped_samples, counts.missing_rows) == (2, 0, 4)
    counts = ImportCounts()
    assert_same(read(path, Format.ANSWERS, counts, zero_rows=ZeroRows.DROP_SAMPLE), samples[1:2])
    assert (counts.zero_rows, counts.dropped_samples, counts.samples) == (2, 1, 1)
    nothing = write(tmp_path / "b.json", made.vllm_answer(ids * 0, 4, 3))
    with pytest.raises(TraceError, match="captured nothing"):
        read(nothing, Format.ANSWERS)
    with pytest.raises(TraceError, match="left out"):
        read(nothing, Format.ANSWERS, zero_rows=ZeroRows.DROP_SAMPLE)


def test_with_one_choice_zeros_are_routes(tmp_path, rng):
    ids = np.zeros((4, 3, 1), np.uint8)
    assert read(write(tmp_path / "a.json", made.vllm_answer(ids, 3, 2)), Format.ANSWERS).valid_T.sum() == 4


def test_short_samples_are_a_choice(tmp_path, samples):
    ids, prompt, new = samples[0]
    path = write(tmp_path / "a.json", made.vllm_answer(ids[2:], prompt, new))
    with pytest.raises(TraceError, match="--short-rows first"):
        read(path, Format.ANSWERS)
    first = read(path, Format.ANSWERS, short_rows=ShortRows.FIRST)
    assert first.valid_T.tolist() == [False] * 2 + [True] * 4 + [False]
    np.testing.assert_array_equal(first.experts_TLK[2:-1], ids[2:])
    last = read(path, Format.ANSWERS, short_rows=ShortRows.LAST)
    np.testing.assert_array_equal(last.experts_TLK[:4], ids[2:])
    too_many = write(tmp_path / "b.json", made.vllm_answer(np.concatenate([ids] * 2), prompt, new))
    with pytest.raises(TraceError, match="another sample"):
        read(too_many, Format.ANSWERS, short_rows=ShortRows.LAST)


@pytest.mark.parametrize("change", ["range", "twice", "negative", "other layers"])
def test_illegal_ids_are_refused(tmp_path, samples, change):
    ids = samples[0][0].copy()
    if change == "range":
        ids[3, 1, 0] = made.EXPERTS
    elif change == "twice":
        ids[3, 1] = 5
    elif change == "negative":
        ids[3, 1] = -1
    answers = [
        made.vllm_answer(ids, 4, 3),
        made.vllm_answer(samples[1][0][:, : 2 if change == "other layers" else 3], 1, 5),
    ]
    with pytest.raises(TraceError, match=r"row 3|one model"):
        read(write(tmp_path / "a.jsonl", answers), Format.ANSWERS)


def test_a_pickle_does_not_act(tmp_path):
    """What a file names is not called: neither in a torch archive, nor in a pickle."""

    class Act:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "acted"),))

    torch.save({"samples": [Act()]}, tmp_path / "a.pt")
    with pytest.raises(TraceError, match="expected a dictionary"):
        read(tmp_path / "a.pt", Format.SLIME)
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Act()))
    with pytest.raises(TraceError, match="no TensorBatch"):
        read(tmp_path / "a.pkl", Format.SKYRL)
    assert not (tmp_path / "acted").exists()


def large_files(folder, rng):
    """Return a file of each format, of some megabytes; ids have as many bytes as the framework writes."""
    base = made.routes(rng, 511, layers=24, experts=64, top_k=8, dtype=np.uint8)
    ids = np.tile(base, (20, 1, 1))
    parts = [(ids[:4000].astype(np.int16), 3000, 1001), (ids[:3000].astype(np.int16), 2000, 1001)]
    slots = np.stack([rng.permutation(64) for _ in range(24)])
    small = [ids[:600].astype(np.int16), ids[:500].astype(np.int16)]
    return {
        Format.ANSWERS: write(folder / "a.jsonl", [made.vllm_answer(ids, 9000, len(ids) + 1 - 9000)] * 2),
        Format.VERL: write(folder / "v.safetensors", made.verl_batch(parts, 3000, 1001)),
        Format.SKYRL: write(folder / "k.safetensors", made.skyrl_batch(parts)),
        Format.NEMO_RL: write(folder / "n.safetensors", made.nemo_batch(parts)),
        Format.SLIME: write(folder / "s.pt", {"samples": made.slime_samples(parts, made.tensor)}),
        Format.PRIME_RL: write(
            folder / "rank_0.bin", made.prime_batches([[(one[0].astype(np.uint8), True)] for one in parts])
        ),
        Format.MEGATRON: write(folder / "m.pt", [made.tensor(ids[:, layer].astype(np.int64)) for layer in range(24)]),
        Format.SGLANG_RECORDER: write(folder / "r.pt", made.recorder_dump(small, slots, made.tensor)),
    }


def test_reading_takes_at_most_twice_the_payload(tmp_path, rng):
    rules = ImportRules(num_experts=64)
    peaks = {}
    for format, path in large_files(tmp_path, rng).items():
        for traced in (False, True):  # kernels are compiled at the first time
            if traced:
                tracemalloc.start()
            found = import_samples([path], format, rules)
            rows = sum(one.num_rows for one in iterate_pieces(found, rules, ImportCounts(), source="x"))
            peaks[format] = tracemalloc.get_traced_memory()[1] / path.stat().st_size
            tracemalloc.stop()
        assert rows > 1000
    assert peaks.keys() == set(Format)
    assert {format: peak for format, peak in peaks.items() if peak > 2} == {}


def test_a_command_imports_and_says_what_was_missing(tmp_path, samples):
    ids = samples[0][0].copy()
    ids[:2] = 0
    path = write(tmp_path / "a.jsonl", [made.vllm_answer(ids, 4, 3), made.vllm_answer(*samples[1])])
    command = ["trace", "import", str(path), "--format", "answers", "--num-experts", "16", "--to", str(tmp_path / "t")]
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, TraceError)
    done = CliRunner().invoke(app, [*command, "--zero-rows", "missing", "--layers", "3-5", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert {key: facts[key] for key in ("samples", "rows", "missing_rows", "zero_rows")} == {
        "samples": 2, "rows": 13, "missing_rows": 4, "zero_rows": 2,
    }  # fmt: skip
    trace = read_trace(tmp_path / "t")
    assert trace.layer_ids.tolist() == [3, 4, 5]
    assert_same(trace.select([1]), samples[1:2])
    again = CliRunner().invoke(app, [*command, "--zero-rows", "missing"])
    assert "already holds a trace" in str(again.exception)


@given(
    st.recursive(
        st.none() | st.text(max_size=5) | st.integers() | st.floats(),
        lambda x: st.lists(x) | st.dictionaries(st.text('\\"[{:', max_size=3), x),
        max_leaves=8,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_what_else_an_answer_holds_changes_nothing(tmp_path_factory, rest, indent, escaped):
    """Also texts that look like keys, and what only Python writes: NaN, halves of surrogate pairs."""
    ids = np.arange(12).reshape(2, 3, 2)
    answer = made.vllm_answer(ids, 2, 1)
    answer["choices"][0] |= {"logprobs": {"content": rest}, "a": rest}
    answer = {"b": ["routed_experts", '"routed_experts": "', rest], "c": "\ud800", **answer, "d": rest}
    text = json.dumps(answer, indent=indent)
    path = tmp_path_factory.mktemp("answers") / "a.json"
    path.write_text(text.replace("/", "\\/") if escaped else text)
    np.testing.assert_array_equal(read(path, Format.ANSWERS).experts_TLK[:2], ids)


@given(
    hnp.arrays(
        np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 8])), elements=st.integers(0, 12)
    )
)
def test_rows_are_legal_where_a_slow_check_says_so(ids):
    valid = np.arange(len(ids)) % 3 != 2
    legal = all(len({*row}) == len(row) and max(row) < 12 for t in np.flatnonzero(valid) for row in ids[t].tolist())
    trace = RoutingTrace.from_samples([np.zeros((1, 1, 1), int)], num_experts=1)
    T, L = ids.shape[:2]
    whole = dataclasses.replace(
        trace,
        experts_TLK=ids,
        valid_T=valid,
        offsets=np.array([0, T]),
        layer_ids=np.arange(L, dtype=np.int32),
        num_experts=12,
    )
    if legal:
        whole.validate()
    else:
        with pytest.raises(TraceError):
            whole.validate()
