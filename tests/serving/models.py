"""Checkpoints of tiny models for tests of serving."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.replay import record_routing
from relibra.replay.forward_cache import CACHE_NAME
from tests.replay.model_zoo import CAUSAL_MODELS, tiny_causal_model

SPLIT_MODELS = tuple(name for name in CAUSAL_MODELS if name != "LongcatFlashForCausalLM")
"""Families that can be served with their experts apart: LongCat's experts run code of their own."""


def write_model(name: str, folder: Path) -> nn.Module:
    """Write a tiny model whose answers do not end by themselves; return it whole, as transformers loads it."""
    model = tiny_causal_model(name)
    model.config.use_cache = True
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


class Answer(NamedTuple):
    """Tokens of an answer, their log-probs, and the routes of every token fed."""

    tokens: list[int]
    log_probs: np.ndarray
    routes: np.ndarray


@torch.inference_mode()
def greedy_answer(model: nn.Module, prompt: tuple[int, ...], limit: int) -> Answer:
    """Return the answer to one prompt, decoded alone with the whole model and its own cache."""
    tokens, log_probs, cache = [], [], None
    with record_routing(model) as recorder:
        fed = torch.tensor([prompt])
        for _ in range(limit):
            output = model(input_ids=fed, use_cache=True, **{CACHE_NAME: cache})
            cache = output[CACHE_NAME]
            log_prob_V = torch.log_softmax(output.logits[0, -1].float(), dim=-1)
            tokens.append(int(log_prob_V.argmax()))
            log_probs.append(float(log_prob_V[tokens[-1]]))
            fed = torch.tensor([tokens[-1:]])
        routes = torch.cat(recorder.take()).numpy()
    return Answer(tokens, np.array(log_probs), routes)


def greedy_request(number: int, length: int, limit: int) -> Sequence:
    """Return a request whose prompt follows from its number."""
    tokens = tuple((7 * number + 3 * n) % 57 + 3 for n in range(length))
    sampling = SamplingParameters(limit=limit, temperature=0.0, routes=True)
    return Sequence(number=number, prompt=tokens, sampling=sampling)


def answer_of(sequence: Sequence) -> Answer:
    """Return the answer of a request that has ended."""
    assert sequence.finish in ("length", "stop"), sequence.error
    assert sequence.routes is not None
    return Answer(sequence.tokens, np.array(sequence.log_probs), sequence.routes)


def assert_same(got: Answer, expected: Answer, tolerance: float = 1e-5) -> None:
    assert got.tokens == expected.tokens
    assert np.abs(got.log_probs - expected.log_probs).max() <= tolerance
    assert got.routes.shape == expected.routes.shape
    assert (got.routes == expected.routes).all()
