"""`sample_tokens`: the next token of each sequence from its logits, with temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from numpy import ndarray
from torch import Tensor

from relibra.engine.philox import uniform_numbers_of_keys
from relibra.engine.sequence import SamplingParameters, Sequence


def sample_next(sequences: Several[Sequence], logits_BV: Float[Tensor, "B V"]) -> None:
    """Sample the next token of each sequence and append it; randomness depends on seed, sample and position alone."""
    parameters = [sequence.sampling for sequence in sequences]
    uniform_B = uniform_numbers_of_keys(
        np.array([sequence.key for sequence in sequences], dtype=np.uint64).T,
        np.array([one.sample for one in parameters]),
        np.array([one.position + len(sequence.tokens) for one, sequence in zip(parameters, sequences, strict=True)]),
    )
    token_B, log_prob_BV = sample_tokens(logits_BV, parameters, uniform_B)
    log_prob_B = log_prob_BV.gather(1, token_B[:, None]).squeeze(1)
    for sequence, token, log_prob in zip(sequences, token_B.tolist(), log_prob_B.tolist(), strict=True):
        sequence.add(token, log_prob)
    for b, (sequence, one) in enumerate(zip(sequences, parameters, strict=True)):
        if one.top_log_probs:
            values, ids = log_prob_BV[b].topk(min(one.top_log_probs, log_prob_BV.shape[1]))
            sequence.top = list(zip(ids.tolist(), values.tolist(), strict=True))


def sample_tokens(
    logits_BV: Float[Tensor, "B V"], parameters: Several[SamplingParameters], uniform_B: Float64[ndarray, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"]]:
    """Return the token of each row and the log-probs of the distribution that it was drawn from.

    That is vLLM's "processed_logprobs": after temperature, top-k and top-p; minus infinity for tokens left out.
    A token is where the cumulative distribution passes the row's uniform number. Rows of temperature 0 take the most
    likely token, the first of equals; their log-probs are those of temperature 1, of all tokens.
    """
    device = logits_BV.device
    temperature_B = torch.tensor([one.temperature or 1.0 for one in parameters], dtype=torch.float32, device=device)
    log_prob_BV = torch.log_softmax(logits_BV.float() / temperature_B[:, None], dim=-1)
    probability_BV = log_prob_BV.double().exp()
    for b, one in enumerate(parameters):
        if one.temperature and (one.top_k or one.top_p < 1.0):
            kept_V = kept_tokens(probability_BV[b], one.top_k, one.top_p)
            probability_BV[b] *= kept_V
            log_prob_BV[b] = torch.log_softmax(log_prob_BV[b].masked_fill(kept_V == 0, -torch.inf), dim=-1)
    cumulative_BV = probability_BV.cumsum(dim=-1)
    uniform_B1 = torch.from_numpy(uniform_B).to(device)[:, None]
    token_B = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True).squeeze(1)
    token_B = token_B.clamp(max=logits_BV.shape[1] - 1)
    greedy = [not one.temperature for one in parameters]
    if any(greedy):
        token_B = torch.where(torch.tensor(greedy, device=device), logits_BV.argmax(dim=-1), token_B)
    return token_B, log_prob_BV


def kept_tokens(probability_V: Float[Tensor, " V"], top_k: int, top_p: float) -> Float[Tensor, " V"]:
    """Return 1 for tokens that top-k and then top-p keep, 0 for others; at least one is kept, ties by id.

    top_k   0: all
    top_p   of what top-k keeps
    """
    sorted_V, order_V = probability_V.sort(descending=True, stable=True)
    kept_V = torch.ones_like(sorted_V)
    if top_k:
        kept_V[top_k:] = 0
    if top_p < 1.0:
        reached_V = (sorted_V * kept_V / (sorted_V * kept_V).sum()).cumsum(dim=0)
        kept_V[1:] *= reached_V[:-1] < top_p
    return torch.zeros_like(kept_V).scatter(0, order_V, kept_V)
