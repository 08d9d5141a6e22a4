"""The embedded engine against teacher-forced passes of the same model over what it sampled."""

import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch
import transformers

from relibra.engine.engine import Engine
from relibra.engine.kv_cache import Room, SlottedCache
from relibra.errors import EngineError
from relibra.replay import record_routing
from relibra.replay.forward_cache import CACHE_NAME
from relibra.rl.rollout import embedded
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.response import Response, new_response
from relibra.rl.run.step_trace import trace_of
from tests.replay.tiny_models import tiny_model

VOCAB, STOP_IDS = 64, (7, 11, 40)
PROMPTS = [[3, 4, 5, 6, 2], [1], [8, 9], [3, 4, 5], [1], list(range(3, 30)), [9] * 12, [5, 4], [33]]
MODELS: dict[str, torch.nn.Module] = {}


def model_of(family: str) -> torch.nn.Module:
    """Return a tiny model.

    `gpt_oss` and `qwen3` (dense) slide their attention windows over 16 and 8 tokens; `qwen3_next` has linear attention.
    """
    if family not in MODELS:
        MODELS[family] = (_further_model(family) if family in FURTHER else tiny_model(family)).eval()
        MODELS[family].requires_grad_(False)
    return MODELS[family]


COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FURTHER = {
    "qwen3": (
        "Qwen3Config",
        {"num_hidden_layers": 3, "max_window_layers": 1, "use_sliding_window": True, "sliding_window": 8},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}


def _further_model(family: str) -> torch.nn.Module:
    name, settings = FURTHER[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**COMMON, **settings))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.2)
    return model


def engine(
    model, *, seed=0, stop_ids=STOP_IDS, temperature=1.0, max_batch=64, shortest=1, keeps=False
) -> EmbeddedEngine:
    return EmbeddedEngine(
        model=model,
        pad_id=0,
        stop_ids=stop_ids,
        temperature=temperature,
        seed=seed,
        max_batch=max_batch,
        record=model.config.model_type != "qwen3",
        shortest=shortest,
        keeps=keeps,
    )


def fresh(prompts=PROMPTS) -> list[Response]:
    return [new_response(10 + number, number, prompt) for number, prompt in enumerate(prompts)]


def roll_out(sampler, responses, *, window=24, max_response=24, version=4):
    """Generate one window each; return the extended responses and the cost."""
    windows, cost = sampler.generate(responses, window=window, max_response=max_response)
    extended = [
        response.extended(one, weight_version=version, max_response=max_response)
        for response, one in zip(responses, windows, strict=True)
    ]
    return extended, cost


def tokens_of(responses):
    return {response.sample_id: response.tokens_n.tolist() for response in responses}


@torch.inference_mode()
def check_against_forward_pass(model, response, temperature=1.0, *, start=0, experts=True, tolerance=2e-5):
    """Hold log-probs (from response token `start` on) and routes against one pass over the whole response."""
    tokens_1N = torch.from_numpy(response.tokens_n)[None]
    if experts:
        with record_routing(model) as recorder:
            logits = model(tokens_1N, use_cache=False).logits[0]
        [experts_TLK] = recorder.take()
        assert np.array_equal(response.experts_mLK, experts_TLK[:-1].numpy())
    else:
        logits = model(tokens_1N, use_cache=False).logits[0]
        assert response.experts_mLK is None
    log_prob_NV = torch.log_softmax(logits.float() / temperature, dim=-1)
    each_r = log_prob_NV[:-1].gather(1, tokens_1N[0, 1:, None])[response.prompt_length - 1 :, 0]
    np.testing.assert_allclose(response.log_probs_r[start:], each_r[start:].numpy(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("max_batch", [64, 3])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3", "qwen3_next"])
def test_log_probs_and_routes_equal_those_of_one_forward_pass(family, max_batch):
    """In one batch and with refills; attention windows slide; rows leave and join at different times."""
    model = model_of(family)
    responses, _ = roll_out(engine(model, temperature=0.8, max_batch=max_batch), fresh())
    assert len({response.length for response in responses}) > 3
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    tolerance = (
        5e-4 if family == "qwen3_next" else 2e-5
    )  # linear attention sums in chunks, and step by step in decoding
    for response in responses:
        check_against_forward_pass(model, response, 0.8, experts=family != "qwen3", tolerance=tolerance)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_continued_response_has_all_routes_of_its_last_weights(family):
    """Three windows under two sets of weights: log-probs stay those of the sampling weights, routes are all new."""
    old, new = model_of(family), tiny_model(family, seed=1).eval().requires_grad_(False)
    responses, _ = roll_out(engine(old, stop_ids=()), fresh(), window=8)
    assert all(response.finish_reason is None and response.length == 8 for response in responses)
    first = {response.sample_id: response.log_probs_r for response in responses}
    responses, cost = roll_out(engine(new, stop_ids=(), max_batch=4), responses, window=8, version=5)
    assert cost.prefilled_tokens == sum(len(prompt) + 8 for prompt in PROMPTS)
    for response in responses:
        assert np.array_equal(response.log_probs_r[:8], first[response.sample_id])
        assert response.versions_r.tolist() == [4] * 8 + [5] * 8
        assert (response.windows, response.window_length, response.finish_reason) == (2, 8, None)
        check_against_forward_pass(new, response, start=8)
    responses, _ = roll_out(engine(new, stop_ids=(), max_batch=4), responses, window=100, version=5)
    assert {response.finish_reason for response in responses} == {"length"}
    assert {response.length for response in responses} == {24}


def windows_of(sampler, calls, *, between=None):
    """Sample windows of five tokens in nine places, with new responses in free ones; return what ended, and costs."""
    starts, live, ended, costs = iter(fresh(PROMPTS * 9)), [], {}, []
    for call in range(calls):
        live += itertools.islice(starts, 9 - len(live))
        if between:
            between(call, live)
        responses, cost = roll_out(sampler, live, window=5, max_response=22, version=call)
        ended |= {one.sample_id: one for one in responses}
        live = [one for one in responses if one.finish_reason is None]
        costs.append(cost)
    return ended, costs


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3", "qwen3_next"])
def test_kept_responses_are_those_that_are_fed_again(family):
    """Weights stay: tokens, log-probs and routes; new responses join, others end; attention windows slide."""
    model = model_of(family)
    cut, again = windows_of(engine(model), 8)
    kept, costs = windows_of(engine(model, keeps=True), 8)
    assert tokens_of(kept.values()) == tokens_of(cut.values())
    assert {one.finish_reason for one in kept.values()} == {None, "stop", "length"}
    tolerance = 5e-4 if family == "qwen3_next" else 2e-5
    for sample, one in kept.items():
        assert one.windows == cut[sample].windows
        np.testing.assert_allclose(one.log_probs_r, cut[sample].log_probs_r, atol=tolerance)
        assert (one.experts_mLK is None) == (family == "qwen3")
        assert one.experts_mLK is None or np.array_equal(one.experts_mLK, cut[sample].experts_mLK)
    assert [one.decode_steps for one in costs] == [one.decode_steps for one in again]
    assert [one.busy_slot_steps for one in costs] == [one.busy_slot_steps for one in again]
    if family == "qwen3_next":  # its caches cannot be joined
        assert costs == again
        return
    assert sum(one.prefilled_tokens for one in costs) == sum(one.prompt_length for one in kept.values())
    assert sum(one.prefilled_tokens for one in again) > 2 * sum(one.prefilled_tokens for one in costs)
    assert sum(one.mixed_tokens for one in costs) == sum(one.length - min(one.length, 5) for one in kept.values())
    assert not any(one.mixed_tokens for one in again)


def test_what_is_not_kept_is_fed_again_and_the_same():
    """Some go to another rank and come back, all are lost with a checkpoint, and an evaluation comes between."""
    model, sampler = model_of("qwen3_moe"), engine(model_of("qwen3_moe"), keeps=True)
    other = engine(model_of("qwen3_moe"), keeps=True)

    def between(call, live):
        if call == 2:  # the other rank samples a window of three of them
            away = [one for one in live if one.windows][:3]
            responses, cost = roll_out(other, away, window=5, max_response=22, version=call)
            assert cost.prefilled_tokens == sum(len(one.tokens_n) for one in away)
            live[:] = [one for one in live if one not in away] + [one for one in responses if not one.finish_reason]
            ended.update({one.sample_id: one for one in responses})
        if call == 4:
            sampler.kept = None
        if call == 5:
            held = sampler.kept
            assert held is not None
            evaluated, _ = roll_out(sampler, fresh([[1, 2]]), window=22, max_response=22)
            assert tokens_of(evaluated) == tokens_of(roll_out(engine(model), fresh([[1, 2]]), max_response=22)[0])
            assert sampler.kept is held

    ended: dict = {}
    found, costs = windows_of(sampler, 7, between=between)
    for sample, one in (ended | found).items():
        start = new_response(sample, 0, one.tokens_n[: one.prompt_length].tolist())
        [alone], _ = roll_out(engine(model), [start], max_response=22)
        assert one.tokens_n.tolist() == alone.tokens_n[: len(one.tokens_n)].tolist()
        check_against_forward_pass(model, one)
    fed = [one.prefilled_tokens for one in costs]
    assert fed[4] > 1.5 * max(fed[3], fed[5])


@torch.inference_mode()
def test_kept_windows_attend_to_keys_of_the_old_weights():
    """Held against passes of single tokens over a plain cache that the old weights have begun."""
    old, new = tiny_model("qwen3_moe").eval(), tiny_model("qwen3_moe", seed=1).eval()
    sampler = engine(old, stop_ids=(), keeps=True)
    first, _ = roll_out(sampler, fresh(), window=8)
    sampler.model = new
    second, cost = roll_out(sampler, first, window=8, version=5)
    assert (cost.prefilled_tokens, cost.mixed_tokens) == (0, 8 * len(PROMPTS))
    for before, one in zip(first, second, strict=True):
        tokens_1N, cache = torch.from_numpy(one.tokens_n)[None], transformers.DynamicCache(config=new.config)
        fed = len(before.tokens_n) - 1  # the last one is fed by the new weights
        old(tokens_1N[:, :fed], **{CACHE_NAME: cache})
        rows = []
        with record_routing(new) as recorder:
            for t in range(fed, fed + 8):
                logits_V = new(tokens_1N[:, t : t + 1], **{CACHE_NAME: cache}).logits[0, -1]
                rows.append(torch.log_softmax(logits_V, dim=-1)[tokens_1N[0, t + 1]].item())
        np.testing.assert_allclose(one.log_probs_r[8:], rows, atol=2e-5)
        assert np.array_equal(one.experts_mLK[fed:], torch.cat(recorder.take()).numpy())
        assert np.array_equal(one.experts_mLK[:fed], before.experts_mLK)
        [again], _ = roll_out(engine(new, stop_ids=()), [before], window=8)
        assert np.abs(again.log_probs_r[8:] - one.log_probs_r[8:]).max() > 1e-3, "the keys make no difference"


def test_kept_routes_hold_no_rows_of_others():
    sampler = engine(model_of("qwen3_moe"), stop_ids=(), keeps=True)
    roll_out(sampler, fresh(), window=8)
    for sequence in sampler.kept.running:
        held = sum((piece if piece.base is None else piece.base).nbytes for piece in sequence.experts)
        assert held == sequence.routes.nbytes


def test_tokens_depend_on_seed_sample_and_place_alone():
    """Any order, any company, any number of places, any cut into windows: the same tokens."""
    model = model_of("qwen3_moe")
    expected = tokens_of(roll_out(engine(model), fresh())[0])
    assert expected != tokens_of(roll_out(engine(model, seed=1), fresh())[0])
    assert tokens_of(roll_out(engine(model, max_batch=2), fresh()[::-1])[0]) == expected
    for response in fresh()[:3]:
        assert tokens_of(roll_out(engine(model), [response])[0])[response.sample_id] == expected[response.sample_id]
    done, live = [], fresh()
    while live:
        responses, _ = roll_out(engine(model, max_batch=5), live, window=6)
        done += [response for response in responses if response.finish_reason]
        live = [response for response in responses if not response.finish_reason]
    assert tokens_of(done) == expected


def test_attention_windows_slide_in_these_tests():
    for family, window in (("gpt_oss", 16), ("qwen3", 8)):
        layers = transformers.DynamicCache(config=model_of(family).config).layers
        assert {getattr(layer, "sliding_window", None) for layer in layers} == {None, window}
        assert window < 24


def test_linear_attention_batches_follow_without_joined_caches():
    model, responses = model_of("qwen3_next"), fresh()
    assert not SlottedCache(model.config, Room(0, 0)).can_join
    responses, cost = roll_out(engine(model, max_batch=3), responses)
    lengths = [response.length for response in responses]
    assert cost.decode_steps == sum(max(lengths[i : i + 3]) for i in range(0, 9, 3))
    assert cost.busy_slot_steps == sum(lengths)


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    roll_out(engine(model_of("qwen3_moe")), fresh())
    assert torch.equal(before, torch.get_rng_state())


def test_prefill_in_pieces_changes_nothing(monkeypatch):
    model = model_of("gpt_oss")
    expected = roll_out(engine(model), fresh())[0]
    shapes = []
    monkeypatch.setattr(embedded, "PREFILL_TOKENS", 10)
    handle = model.register_forward_pre_hook(
        lambda _, _args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    responses, cost = roll_out(engine(model), fresh())
    handle.remove()
    assert cost.passes == len(shapes) > cost.decode_steps
    assert tokens_of(responses) == tokens_of(expected)
    assert shapes[:4] == [(1, 27), (1, 12), (2, 5), (5, 2)], "those of like length go together, ten tokens at once"
    for response in responses:
        check_against_forward_pass(model, response)


def test_responses_say_how_they_ended_and_what_they_cost():
    responses, cost = roll_out(engine(model_of("qwen3_moe")), fresh())
    lengths = [response.length for response in responses]
    assert (cost.decode_steps, cost.busy_slot_steps) == (max(lengths), sum(lengths))
    assert cost.slot_steps == max(lengths) * len(PROMPTS)
    assert cost.prefilled_tokens == sum(map(len, PROMPTS))
    for response, prompt in zip(responses, PROMPTS, strict=True):
        assert response.tokens_n[: len(prompt)].tolist() == prompt
        added = response.tokens_n[len(prompt) :].tolist()
        assert not set(STOP_IDS) & set(added[:-1])
        assert response.finish_reason == ("stop" if added[-1] in STOP_IDS else "length")
        assert response.finish_reason == "stop" or len(added) == 24
    trace = trace_of(responses, num_experts=8, layer_ids=range(3), source="test")
    assert trace.valid_T.sum() == trace.num_rows - len(responses)


def test_every_stop_token_stops_and_does_so_at_once():
    model = model_of("qwen3_moe")
    for max_batch in (1, 64):
        responses, cost = roll_out(engine(model, stop_ids=tuple(range(VOCAB)), max_batch=max_batch), fresh())
        assert {(response.length, response.finish_reason) for response in responses} == {(1, "stop")}
        places = min(max_batch, len(PROMPTS))
        steps = len(PROMPTS) // places
        assert (cost.decode_steps, cost.slot_steps, cost.busy_slot_steps) == (steps, steps * places, steps * places)


def test_no_response_exceeds_its_window_or_the_longest_allowed():
    model = model_of("qwen3_moe")
    responses, _ = roll_out(engine(model, stop_ids=()), fresh()[:3], window=3, max_response=9)
    assert [response.length for response in responses] == [3, 3, 3]
    mixed = [*responses, *fresh([[5], [6, 5]])]
    windows, _ = engine(model, stop_ids=()).generate(mixed, window=7, max_response=9)
    assert [len(window.tokens_w) for window in windows] == [6, 6, 6, 7, 7]


@pytest.mark.parametrize("spares", [False, True])
def test_no_responses_cost_nothing_and_begin_none(spares):
    spare = many() if spares else None
    windows, cost = engine(model_of("qwen3_moe")).generate([], window=4, max_response=4, spare=spare)
    assert windows == []
    assert set(asdict(cost).values()) == {0}


def test_broken_weights_are_told():
    model = tiny_model("qwen3_moe").eval().requires_grad_(False)
    model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match=r"sample 3: .* token 0 .* log-prob nan: its weights"):
        engine(model).generate([new_response(3, 0, [1, 2])], window=4, max_response=4)


def test_refill_keeps_places_busy_and_its_cost_adds_up(monkeypatch):
    """60 responses in 12 places; without joining, each batch waits for its longest."""
    model, prompts = model_of("qwen3_moe"), [[3 + n % 50] for n in range(60)]
    widths = []
    handle = model.register_forward_pre_hook(
        lambda _, _args, kwargs: widths.append(kwargs["attention_mask"].shape), with_kwargs=True
    )
    responses, cost = roll_out(engine(model, max_batch=12), fresh(prompts))
    handle.remove()
    lengths = np.array([response.length for response in responses])
    assert max(rows for rows, _ in widths) == 12
    assert max(columns for _, columns in widths) <= 1 + 24, "columns that are padding in all rows are cut off"
    assert cost.slot_steps == 12 * cost.decode_steps
    assert lengths.sum() - (60 - 12) <= cost.busy_slot_steps <= lengths.sum(), "a refill is no decode step"
    monkeypatch.setattr(Engine, "can_join", False)
    again, in_batches = roll_out(engine(model, max_batch=12), fresh(prompts))
    assert tokens_of(again) == tokens_of(responses)
    assert in_batches.decode_steps == sum(max(lengths[i : i + 12]) for i in range(0, 60, 12))
    idle, idle_in_batches = (1 - c.busy_slot_steps / c.slot_steps for c in (cost, in_batches))
    assert idle < 0.75 * idle_in_batches
    refills = len(widths) - cost.decode_steps
    assert 5 <= refills <= 48 / 3, "several places are filled at once"
    assert cost.decode_steps + refills < 0.9 * in_batches.decode_steps


def refilled(sampler, responses, spares, *, window, max_response=24):
    """Generate with spares; return the extended responses, those that began last, and the cost."""
    drawn = []

    def spare():
        for response in spares:
            drawn.append(response)
            yield response

    windows, cost = sampler.generate(responses, window=window, max_response=max_response, spare=spare())
    extended = [
        response.extended(one, weight_version=4, max_response=max_response)
        for response, one in zip([*responses, *drawn], windows, strict=True)
    ]
    return extended, cost


def many(first=100):
    return (new_response(first + n, n, [3 + n % 50, 2 + n % 7]) for n in itertools.count())


@pytest.mark.parametrize(("window", "places"), [(1, 3), (2, 9), (9, 1), (16, 4), (24, 9)])
def test_spares_fit_into_the_decode_steps_of_one_window(window, places):
    model = model_of("qwen3_moe")
    first = fresh()[:places]
    responses, cost = refilled(engine(model), first, many(), window=window)
    assert cost.decode_steps == window
    assert cost.slot_steps == window * places
    assert [response.sample_id for response in responses[places:]] == list(range(100, 100 + len(responses) - places))
    assert cost.prefilled_tokens == sum(response.prompt_length for response in responses)
    sampled = sum(response.length for response in responses)
    assert cost.busy_slot_steps <= cost.slot_steps
    refills = len(responses) - places
    assert sampled - refills <= cost.busy_slot_steps <= sampled, "a refill is no decode step"
    for response in responses:
        assert 1 <= response.length <= window
    unfinished = [response for response in responses if response.finish_reason is None]
    assert len(unfinished) <= places, "what goes on in the next step has its place there"
    again = {}
    for response in responses:  # what each would have said in a batch of its own
        start = new_response(response.sample_id, 0, response.tokens_n[: response.prompt_length].tolist())
        [alone], _ = roll_out(engine(model), [start], window=24)
        again[response.sample_id] = alone.tokens_n[: len(response.tokens_n)].tolist()
        check_against_forward_pass(model, response)
    assert tokens_of(responses) == again


def test_free_places_are_refilled_while_the_steps_left_repay_it():
    """24 places: with spares hardly any place is idle, but for the last steps and for waiting until it pays."""
    model, prompts = model_of("qwen3_moe"), [[3 + n % 50] for n in range(24)]
    passes = []
    handle = model.register_forward_pre_hook(
        lambda _, _args, kwargs: passes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    _, without = roll_out(engine(model), fresh(prompts), window=24, max_response=48)
    assert len(passes) == without.decode_steps
    passes.clear()
    responses, cost = refilled(engine(model), fresh(prompts), many(), window=24, max_response=48)
    handle.remove()
    idle, idle_without = (1 - one.busy_slot_steps / one.slot_steps for one in (cost, without))
    assert idle < 0.5 * idle_without
    rows = [shape[0] for shape in passes if shape[1] == 1]
    assert max(rows) <= 24
    lengths = [response.length for response in responses[24:] if response.finish_reason is None]
    assert min(lengths) >= 3, "nobody begins for a token or two: one decode step of all places costs as much"
    assert len(passes) - cost.decode_steps <= 24 / 3
    assert cost.passes == len(passes)


@pytest.mark.parametrize("shortest", [1, 3, 6, 12])
@pytest.mark.parametrize(("family", "places"), [("qwen3_moe", 1), ("qwen3_moe", 6), ("qwen3_next", 4)])
def test_nobody_begins_for_a_window_that_is_of_no_use(family, places, shortest):
    """Also where a batch is empty: the call ends then, before its last decode step."""
    model = model_of(family)
    sampler = engine(model, stop_ids=tuple(range(0, VOCAB, 4)), shortest=shortest)  # many end after a few tokens
    steps = []
    for first in range(0, 120, 20):
        responses, cost = refilled(sampler, fresh()[:places], many(1000 + first), window=12, max_response=48)
        cut = [response.length for response in responses[places:] if response.finish_reason is None]
        assert min(cut, default=shortest) >= shortest
        assert 12 - cost.decode_steps < shortest, "as long as there is time places are filled"
        assert cost.decode_steps <= 12
        steps.append(cost.decode_steps)
    if places == 1 and shortest > 1:
        assert min(steps) < 12


def test_models_without_joined_caches_refill_after_the_batch():
    model = model_of("qwen3_next")
    responses, cost = refilled(engine(model), fresh()[:1], many(), window=24)
    assert cost.decode_steps == cost.busy_slot_steps == sum(response.length for response in responses) == 24
    assert len(responses) > 1


def test_continued_responses_end_at_the_limit_and_free_places():
    model = model_of("qwen3_moe")
    responses, _ = roll_out(engine(model, stop_ids=()), fresh()[:4], window=7, max_response=9)
    responses, cost = refilled(engine(model, stop_ids=()), responses, many(), window=8, max_response=9)
    assert [response.length for response in responses[:4]] == [9, 9, 9, 9]
    assert [response.finish_reason for response in responses] == ["length"] * 4 + [None] * 4
    assert [response.length for response in responses[4:]] == [6, 6, 6, 6]
    assert (cost.decode_steps, cost.busy_slot_steps) == (8, 4 * 2 + 4 * 6)


def test_tokens_are_drawn_with_their_probabilities():
    """1,000 copies of one prompt: the share of each first token lies within five standard errors of its probability."""
    model = model_of("qwen3_moe")
    responses, _ = roll_out(engine(model, stop_ids=()), fresh([[1]] * 1000), window=1)
    expected = model(torch.tensor([[1]])).logits[0, -1].softmax(-1).numpy()
    share = np.bincount([response.tokens_n[1] for response in responses], minlength=VOCAB) / 1000
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / 1000) + 1e-3).all()
