"""The engine with a local model: sequences in any company are those that run alone."""

import numpy as np
import pytest
import torch

from relibra.engine.engine import Engine, EngineLimits
from relibra.engine.forward import local_forward
from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.replay import record_routing
from tests.replay.model_zoo import tiny_causal_model
from tests.replay.tiny_models import tiny_model

MODELS = {}


def model_of(family):
    if family not in MODELS:
        MODELS[family] = tiny_model(family).eval().requires_grad_(False)
    return MODELS[family]


class Watched:
    """An engine over a model, and the shapes of what its forward passes were fed."""

    def __init__(self, family, **settings):
        limits = {"max_running": 8, "kv_tokens": 1024, "max_tokens": 16}
        exact = settings.pop("exact", False)
        self.fed, model = [], model_of(family)

        def watched(input_BN, mask_BC, cache, *, last=1):
            self.fed.append(tuple(input_BN.shape))
            with record_routing(model) as recorder:
                return local_forward(model, recorder)(input_BN, mask_BC, cache, last=last)

        self.engine = Engine(watched, model.config, EngineLimits(**limits | settings), pad_id=0, exact=exact)

    @torch.inference_mode()
    def run(self, sequences, after_step=lambda: None):
        """Sample until all have ended."""
        for sequence in sequences:
            self.engine.add(sequence)
        while any(sequence.finish is None for sequence in sequences):
            self.engine.step()
            after_step()
        return sequences


def sequence(number, prompt, limit=12, **settings):
    sampling = SamplingParameters(limit=limit, sample=number, routes=True, **settings)
    return Sequence(number=number, prompt=tuple(prompt), sampling=sampling)


def prompt_of(number, length):
    return [(7 * number + 3 * n) % 57 + 3 for n in range(length)]


def assert_same(one, other, rounding=2e-5):
    assert one.tokens == other.tokens
    assert np.abs(np.subtract(one.log_probs, other.log_probs)).max() <= rounding
    assert np.array_equal(one.routes, other.routes)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_sequences_in_company_equal_those_alone(family, exact):
    """More than run at once, with prompts of all lengths in pieces, some of them equal; windows slide in `gpt_oss`."""
    prompts = [prompt_of(number % 5, 2 + 9 * (number % 5)) for number in range(12)]
    alone = [Watched(family).run([sequence(n, prompt)])[0] for n, prompt in enumerate(prompts)]
    together = Watched(family, max_running=5, exact=exact)
    for one, other in zip(together.run([sequence(n, p) for n, p in enumerate(prompts)]), alone, strict=True):
        assert_same(one, other)
    assert max(rows for rows, _ in together.fed) <= 5


def test_a_prompt_is_fed_once_for_all_its_sequences():
    shared, apart = Watched("qwen3_moe", max_tokens=64), Watched("qwen3_moe", max_tokens=64, exact=True)
    for watched, rows in ((shared, 1), (apart, 4)):
        watched.run([sequence(n, prompt_of(0, 9)) for n in range(4)])
        assert watched.fed[0] == (rows, 9)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_later_sequence_reuses_the_prompt_of_a_running_one(family):
    watched, prompt = Watched(family), prompt_of(0, 9)
    first, later = sequence(0, prompt, 40), [sequence(n, prompt, limit) for n, limit in ((1, 7), (2, 1), (3, 40))]
    watched.engine.add(first)
    with torch.inference_mode():
        while len(first.tokens) < 3:
            watched.engine.step()
        passes = watched.engine.prefill_passes
    watched.run([*later, sequence(4, prompt_of(1, 5), 3)])
    assert watched.engine.reused_prompts == 3
    assert watched.engine.prefill_passes == passes + 1
    for one in later:
        assert_same(one, Watched(family).run([sequence(one.number, prompt, one.sampling.limit)])[0])


def test_scores_of_a_prompt_are_those_of_a_forward_pass():
    prompt = prompt_of(2, 40)
    [scored] = Watched("qwen3_moe").run([sequence(0, prompt, 2, prompt_log_probs=True)])
    with torch.inference_mode():
        expected = model_of("qwen3_moe")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
    assert np.abs(np.concatenate(scored.scores) - expected).max() <= 2e-5


def test_pieces_of_a_long_prompt_and_decode_steps_take_turns():
    watched = Watched("qwen3_moe", max_tokens=4)
    watched.run([sequence(0, prompt_of(0, 3), 20), sequence(1, prompt_of(1, 20), 20)])
    longest_wait = max(len(part) for part in "".join("d" if width == 1 else "p" for _, width in watched.fed).split("d"))
    assert longest_wait <= 2, "no decode step waits for more than the first pieces"


def test_the_cache_holds_no_more_than_its_tokens():
    """Sequences begin and end all the time, and the tokens are few."""
    watched, usages, held = Watched("gpt_oss", kv_tokens=160), [], []

    def look():
        usages.append(watched.engine.cache_usage)
        held.append(watched.engine.cache_bytes)

    numbers = range(24)
    watched.run([sequence(n, prompt_of(n, 1 + 5 * n % 23), 3 + 7 * n % 31) for n in numbers], look)
    assert 0.5 < max(usages) <= 1
    config = model_of("gpt_oss").config
    bytes_of_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert 0.5 * 160 * bytes_of_token < max(held) <= 1.05 * 160 * bytes_of_token
    assert watched.engine.cache_bytes == 0


def test_a_cancelled_sequence_leaves_at_once_wherever_it_is():
    watched = Watched("qwen3_moe", max_running=2, max_tokens=4)
    running, fed, waiting = sequence(0, prompt_of(0, 3), 40), sequence(1, prompt_of(1, 30), 40), sequence(2, [5], 40)
    with torch.inference_mode():
        for one in (running, fed, waiting):
            watched.engine.add(one)
        while not running.tokens:
            watched.engine.step()
        for one in (running, fed, waiting):
            one.finish = "cancelled"
        watched.engine.drop_finished()
        assert watched.engine.step() == []
    assert not any((watched.engine.running, watched.engine.waiting, watched.engine.prefills))
    assert_same(watched.run([sequence(3, [5, 6])])[0], Watched("qwen3_moe").run([sequence(3, [5, 6])])[0])


@pytest.mark.parametrize("name", ["MiniMaxForCausalLM", "Qwen3NextForCausalLM"])
def test_rows_leave_the_cache_that_a_model_makes_itself(name):
    """States of linear attention: rows with prompts of one length begin together and end one after another."""
    model = MODELS.setdefault(name, tiny_causal_model(name).requires_grad_(False))
    model.config.use_cache = True
    prompts, limits = [prompt_of(number, 9) for number in range(4)], (3, 24, 9, 16)
    together = Watched(name).run([sequence(n, prompt, limits[n]) for n, prompt in enumerate(prompts)])
    for n, (one, prompt) in enumerate(zip(together, prompts, strict=True)):
        assert_same(one, Watched(name).run([sequence(n, prompt, limits[n])])[0], rounding=1e-4)
