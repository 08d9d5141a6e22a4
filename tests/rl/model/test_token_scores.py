"""Scores in chunks equal those of whole logits, values and gradients; no tensor has the size of whole logits."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from relibra.rl.model import token_scores as module
from relibra.rl.model.token_scores import LogitChange, learn_logits, score_logits, score_rows, token_scores
from tests.gpu.steps_in_threads import on_threads
from tests.parallel.steps import step
from tests.replay.model_zoo import tiny_causal_model
from tests.replay.tiny_models import VOCAB, random_tokens, tiny_model
from tests.rl.joined import policy_of, tiny_config

TOKENS = 12
ROW_X = torch.tensor([1, 2, 3, 5, 8, 9, 11])
TARGET_X = random_tokens(1, len(ROW_X), seed=3)[0]
POSITION_1T = torch.tensor([[*range(5), *range(7)]])


@pytest.fixture(autouse=True)
def _chunks_of_three_rows(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 3 * 4 * VOCAB)


def inputs_of(rank=0):
    return random_tokens(1, TOKENS, seed=rank), POSITION_1T, ROW_X, TARGET_X


def by_whole_logits(model, temperature, rank=0):
    """Return log-probs and entropies as formulas write them; the reference."""
    tokens_1T, position_1T, row_X, target_X = inputs_of(rank)
    logits_1XV = model(input_ids=tokens_1T, position_ids=position_1T, use_cache=False, logits_to_keep=row_X).logits
    log_probs_XV = (logits_1XV[0].float() / temperature).log_softmax(-1)
    return log_probs_XV.gather(-1, target_X[:, None])[:, 0], -(log_probs_XV.exp() * log_probs_XV).sum(-1)


def in_chunks(model, temperature, rank=0):
    scores = token_scores(model, *inputs_of(rank), temperature)
    return scores.log_probs_X, scores.entropy_X


def scores_and_gradients(score, model, temperature, rank=0, *, entropy=True):
    """Return scores, and the gradients of a weighted sum of them by parameter."""
    model.zero_grad()  # before the forward pass: after it FSDP shows gathered parameters
    scores, weight_X = score(model, temperature, rank), torch.linspace(-1, 2, len(ROW_X))
    loss = (weight_X * scores[0]).sum()
    (loss + (weight_X.flip(0) * scores[1]).sum() if entropy else loss).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    return scores, {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def assert_equal_to_whole_logits(model, temperature, *, entropy=True):
    assert_same(
        *(scores_and_gradients(one, model, temperature, entropy=entropy) for one in (in_chunks, by_whole_logits))
    )


def assert_same(chunks, whole, atol=1e-6):
    """Compare scores and gradients; of narrow types, gradients to their rounding."""
    for one, other in zip(chunks[0], whole[0], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert chunks[1].keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        found, scale = chunks[1][name], max(1, float(gradient.abs().max()))
        assert found.dtype == gradient.dtype
        torch.testing.assert_close(found, gradient, atol=atol * scale, rtol=0, msg=name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_equal_whole_logits(temperature, tied, entropy):
    model = tiny_model(tie_word_embeddings=tied).train()
    assert learn_logits(model) == LogitChange()
    assert_equal_to_whole_logits(model, temperature, entropy=entropy)


def test_a_frozen_head_has_no_gradient_and_passes_one_on():
    model = tiny_model()
    model.lm_head.requires_grad_(False)
    learn_logits(model)
    assert_equal_to_whole_logits(model, 0.7)
    assert model.lm_head.weight.grad is None


def test_a_head_may_have_a_bias():
    model = tiny_model()
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    assert learn_logits(model) == LogitChange()
    assert_equal_to_whole_logits(model, 1.0)


@pytest.mark.parametrize("change", [LogitChange(), LogitChange(factor=0.4, cap=2.0)])
def test_gradients_equal_differences(change):
    generator = torch.Generator().manual_seed(0)
    hidden_XH, weight_VH, bias_V = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in ((5, 3), (7, 3), (7,))
    )
    target_X = torch.tensor([0, 6, 2, 2, 5])
    torch.autograd.gradcheck(lambda *leaves: score_rows(*leaves, target_X, change, 0.7), (hidden_XH, weight_VH, bias_V))


FAMILIES = {
    "GraniteMoeForCausalLM": ({"logits_scaling": 6.0}, LogitChange(factor=1 / 6)),
    "Cohere2MoeForCausalLM": ({"logit_scale": 0.25}, LogitChange(factor=0.25)),
    "Gemma4ForCausalLM": ({"final_logit_softcapping": 1.5}, LogitChange(cap=1.5)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_families_do_to_logits_is_learned(name):
    settings, expected = FAMILIES[name]
    model = tiny_causal_model(name)
    for key, value in settings.items():
        setattr(model.config, key, value)
        if hasattr(model, key):
            setattr(model, key, value)
    found = learn_logits(model)
    assert found.factor == pytest.approx(expected.factor, rel=1e-6)
    assert found.cap == expected.cap
    assert_equal_to_whole_logits(model, 0.7)


class Shifting(nn.Module):
    """What no `LogitChange` is: some logits are shifted."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.shift_V = model, model.config, torch.linspace(0, 1, VOCAB)

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, **inputs):
        return SimpleNamespace(logits=self.model(**inputs).logits + self.shift_V)


def test_another_change_is_computed_from_whole_logits():
    model = Shifting(tiny_model())
    assert learn_logits(model) is None
    assert_equal_to_whole_logits(model, 0.7)


def test_bfloat16_gets_scores_in_float32():
    model = tiny_model(dtype=torch.bfloat16)
    learn_logits(model)
    assert_same(*(scores_and_gradients(one, model, 0.7) for one in (in_chunks, by_whole_logits)), atol=0.02)


def test_scores_of_logits_are_those_of_a_model_with_them():
    logits_XV = torch.randn(6, 5, dtype=torch.bfloat16)
    scores = score_logits(logits_XV, torch.arange(5).repeat(2)[:6], 0.5)
    expected_XV = (logits_XV.double() / 0.5).log_softmax(-1)
    entropy_X = -(expected_XV.exp() * expected_XV).sum(-1)
    assert scores.log_probs_X.tolist() == pytest.approx([expected_XV[x, x % 5].item() for x in range(6)], abs=1e-6)
    assert scores.entropy_X.tolist() == pytest.approx(entropy_X.tolist(), abs=1e-6)


class LargestTensor(TorchDispatchMode):
    """Keeps the largest number of values that a tensor had."""

    values = 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, torch.Tensor):
                self.values = max(self.values, one.numel())
        return found


def test_no_tensor_has_the_size_of_whole_logits(monkeypatch):
    model = tiny_model(vocab_size=5000, num_hidden_layers=1)
    learn_logits(model)
    rows = 200
    row_X = torch.arange(rows)
    monkeypatch.setattr(module, "CHUNK_BYTES", 20 * 4 * 5000)
    with LargestTensor() as largest:
        scores = token_scores(model, row_X[None] % 50, row_X[None], row_X, row_X, 1.0)
        (scores.log_probs_X.sum() + scores.entropy_X.sum()).backward()
    assert largest.values <= max(20 * 5000, 5000 * 32), "a chunk, or the weight of the head"


def both_ways(model, _case):
    """Return the scores and the whole gradients of a rank in chunks, and from whole logits."""
    assert learn_logits(model) == LogitChange()
    return [scores_and_gradients(one, model, 0.7, dist.get_rank()) for one in (in_chunks, by_whole_logits)]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fsdp_gathers_the_head_on_two_ranks(checkpointing):
    for found in on_threads(step(follow_plan=False, checkpointing=checkpointing), both_ways):
        assert_same(*found, atol=2e-6)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_policy_scores_in_chunks(tmp_path, tied):
    tiny_model(tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    settings = (f"model.path={tmp_path / 'model'}", "model.dtype=bfloat16", "algorithm.replay=off")
    model = policy_of(tiny_config(*settings), tmp_path).trained
    assert_same(*(scores_and_gradients(one, model, 0.7) for one in (in_chunks, by_whole_logits)), atol=0.02)
