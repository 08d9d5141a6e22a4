"""The embedded engine against a teacher-forced pass of the same model over what it sampled."""

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from relibra.replay import record_routing
from relibra.rl.config import ModelSettings
from relibra.rl.losses import token_log_probs
from relibra.rl.policy import model_config
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.rollout.sample import trace_of

VOCAB, STOP_ID, NEVER = 12, 7, 99
PROMPTS = [[3, 4, 5, 6, 2], [1], [8, 9], [3, 4, 5], [1]]


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(model_config(ModelSettings(num_layers=2, hidden_size=32, num_experts=8), VOCAB))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.3)
    return model.eval().requires_grad_(False)


def sample(model, prompts=PROMPTS, *, seed=0, stop_id=STOP_ID, max_new_tokens=20, temperature=1.0):
    engine = EmbeddedEngine(
        model=model,
        weight_version=4,
        pad_id=0,
        stop_id=stop_id,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
    )
    return engine.generate(
        prompts,
        sample_ids=range(len(prompts)),
        group_ids=[7] * len(prompts),
        generator=torch.Generator().manual_seed(seed),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_routes_are_those_of_a_forward_pass_over_the_whole_response(model, temperature):
    samples = [s for seed in range(4) for s in sample(model, seed=seed, temperature=temperature)]
    lengths = {len(s.log_probs_r) for s in samples}
    assert len(lengths) > 4, "rows have to leave the batch at different times for this test to mean something"
    for one in samples:
        tokens_1N = torch.from_numpy(one.tokens_n)[None]
        with record_routing(model) as recorder:
            logits = model(tokens_1N, use_cache=False).logits
        [experts_TLK] = recorder.take()
        expected = token_log_probs(logits, tokens_1N, temperature)[0, one.prompt_length :]
        np.testing.assert_allclose(one.log_probs_r, expected.numpy(), atol=1e-5, rtol=0)
        assert np.array_equal(one.experts_nLK[:-1], experts_TLK[:-1].numpy())


def test_samples_say_where_they_come_from_and_how_they_ended(model):
    samples = sample(model)
    for number, (one, prompt) in enumerate(zip(samples, PROMPTS, strict=True)):
        assert (one.sample_id, one.group_id, one.weight_version, one.prompt_length) == (number, 7, 4, len(prompt))
        assert one.tokens_n[: len(prompt)].tolist() == prompt
        response = one.tokens_n[len(prompt) :].tolist()
        assert len(response) == len(one.log_probs_r) <= 20
        assert STOP_ID not in response[:-1]
        assert one.finish_reason == ("stop" if response[-1] == STOP_ID else "length")
        assert len(one.experts_nLK) == len(one.tokens_n)
        assert one.finish_reason == "stop" or len(response) == 20
    trace = trace_of(samples, num_experts=8, layer_ids=range(2), source="test")
    assert trace.valid_T.sum() == trace.num_rows - len(samples)


def test_responses_are_cut_at_the_longest_allowed(model):
    for allowed in (1, 3):
        for one in sample(model, stop_id=NEVER, max_new_tokens=allowed):
            assert len(one.log_probs_r) == allowed
            assert one.finish_reason == "length"


def test_a_response_may_stop_at_once(model):
    first = sample(model, [[1]])[0].tokens_n[1]
    [one] = sample(model, [[1]], stop_id=int(first))
    assert one.tokens_n.tolist() == [1, first]
    assert one.finish_reason == "stop"


def test_no_prompts_give_no_samples(model):
    assert sample(model, []) == []


def test_the_generator_decides_every_token(model):
    before = torch.get_rng_state()
    tokens = [[one.tokens_n.tolist() for one in sample(model, seed=seed)] for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert torch.equal(before, torch.get_rng_state())


def test_tokens_are_drawn_with_their_probabilities(model):
    """400 copies of one prompt: the share of each first token lies within four standard errors of its probability."""
    draws = [one.tokens_n[1] for one in sample(model, [[1]] * 400, stop_id=NEVER, max_new_tokens=1)]
    expected = model(torch.tensor([[1]])).logits[0, -1].softmax(-1).numpy()
    share = np.bincount(draws, minlength=VOCAB) / 400
    assert (np.abs(share - expected) <= 4 * np.sqrt(expected * (1 - expected) / 400) + 1e-3).all()


def test_neighbours_in_the_batch_do_not_change_a_distribution(model):
    """Second tokens after a fixed start: as likely when other rows stop early as when the row is alone."""
    crowd = sample(model, [[1], [3, 4, 5], [8, 9]] * 3, seed=3)
    for one in crowd:
        prompt, response = one.tokens_n[: one.prompt_length], one.tokens_n[one.prompt_length :]
        for t in range(len(response)):
            alone = model(torch.from_numpy(np.concatenate([prompt, response[:t]]))[None]).logits[0, -1]
            expected = alone.log_softmax(-1)[response[t]]
            assert float(one.log_probs_r[t]) == pytest.approx(float(expected), abs=1e-5)
