"""Top-k, top-p and temperature 0 choose what their definitions say."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from relibra.engine.forward import group_prompts
from relibra.engine.sampling import kept_tokens, sample_tokens
from relibra.engine.sequence import SamplingParameters


def kept_slowly(probabilities, top_k, top_p):
    """Go through the tokens by falling probability, ties by id."""
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    order = order[: top_k or len(order)]
    total, kept, reached = sum(probabilities[token] for token in order), set(), 0.0
    for token in order:
        if reached >= top_p:
            break
        kept.add(token)
        reached += probabilities[token] / total
    return kept


@given(
    counts=st.lists(st.integers(1, 50), min_size=2, max_size=12),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from(
        [0.0507, 0.3141, 0.5003, 0.7717, 0.9903, 1.0]  # on no sum of such counts, where rounding decides
    ),
)
def test_top_k_and_top_p_keep_what_the_slow_rule_keeps(counts, top_k, top_p):
    probabilities = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    kept = set(kept_tokens(probabilities, top_k, top_p).nonzero().flatten().tolist())
    assert kept == kept_slowly(probabilities.tolist(), top_k, top_p)


def test_temperature_0_takes_the_first_of_the_most_likely():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 1.0]])
    parameters = [SamplingParameters(limit=1, temperature=0.0)] * 2
    tokens, log_probs = sample_tokens(logits, parameters, np.array([0.99, 0.99]))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(log_probs, torch.log_softmax(logits, dim=-1))


def test_log_probs_are_of_the_distribution_that_is_drawn_from():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 4)
    parameters = [
        SamplingParameters(limit=1, temperature=0.5),
        SamplingParameters(limit=1, temperature=0.5, top_k=2),
        SamplingParameters(limit=1, temperature=2.0, top_p=0.5),
        SamplingParameters(limit=1, temperature=0.0, top_k=1),
    ]
    tokens, log_probs = sample_tokens(logits, parameters, np.full(4, 0.001))
    plain = np.exp(2 * np.arange(4)) / np.exp(2 * np.arange(4)).sum()
    warm = np.exp(np.arange(4) / 2) / np.exp(np.arange(4) / 2).sum()
    assert warm[3] < 0.5 < warm[2:].sum(), "so top-p keeps two"
    expected = [
        plain,
        plain * [0, 0, 1, 1] / plain[2:].sum(),
        warm * [0, 0, 1, 1] / warm[2:].sum(),
        np.exp(np.arange(4)) / np.exp(np.arange(4)).sum(),
    ]
    assert np.allclose(log_probs.double().exp().numpy(), expected, atol=1e-6)
    assert tokens.tolist() == [0, 2, 2, 3]


def test_a_row_does_not_depend_on_the_others():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    parameters = [
        SamplingParameters(limit=1),
        SamplingParameters(limit=1, temperature=0.5, top_p=0.6),
        SamplingParameters(limit=1, top_k=3),
        SamplingParameters(limit=1, temperature=0.0),
    ]
    uniform = np.array([0.1, 0.9, 0.5, 0.3])
    together, _ = sample_tokens(logits, parameters, uniform)
    alone = [sample_tokens(logits[b : b + 1], parameters[b : b + 1], uniform[b : b + 1])[0].item() for b in range(4)]
    assert together.tolist() == alone


@given(lengths=st.lists(st.integers(1, 100), max_size=20), most=st.integers(1, 200))
def test_prompts_are_grouped_within_the_limit(lengths, most):
    groups = group_prompts(lengths, most)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[index] for index in group)
        assert len(group) == 1 or len(group) * width <= most
        assert all(2 * lengths[index] >= width for index in group)
