"""Answers of a deployment beside those of the whole model in one process: tokens and whole distributions."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.serving.launch import RunningWorkers
from relibra.serving.layout import WorkerLayout

VOCAB = 64
Prompt = Several[int]


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Experts of a tiny random Qwen3-MoE with two layers.

    one_expert   the router gives all tokens the same expert
    """

    experts: int = 8
    top_k: int = 2
    one_expert: bool = False

    def write(self, folder: Path) -> Any:
        """Write the model; return it whole."""
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=self.experts,
            num_experts_per_tok=self.top_k, norm_topk_prob=True, max_position_embeddings=512, pad_token_id=0,
            bos_token_id=None, eos_token_id=None, initializer_range=0.2,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).eval()
        if self.one_expert:
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.data.zero_()
        model.save_pretrained(folder)
        return model


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the log-probs of every token of the vocabulary at each of them."""

    tokens: list[int]
    log_prob_NV: np.ndarray


@torch.inference_mode()
def whole_answer(model: Any, prompt: Prompt, limit: int) -> Answer:
    """Return the answer of the whole model, decoded alone."""
    fed, cache, tokens, rows = torch.tensor([list(prompt)]), None, [], []
    for _ in range(limit):
        output = model(input_ids=fed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        log_prob_V = torch.log_softmax(output.logits[0, -1].float(), dim=-1)
        tokens.append(int(log_prob_V.argmax()))
        rows.append(log_prob_V.numpy())
        fed = torch.tensor([tokens[-1:]])
    return Answer(tokens, np.stack(rows))


def served_answers(workers: RunningWorkers, batch: Several[Prompt], limit: int) -> list[Answer]:
    """Return the answers of a deployment; requests go to its attention workers in turn."""
    controls = [worker.control for worker in workers.attention_workers]
    sampling = SamplingParameters(limit=limit, temperature=0.0, top_log_probs=VOCAB)
    for number, prompt in enumerate(batch):
        request = Sequence(number=number, prompt=tuple(prompt), sampling=sampling)
        controls[number % len(controls)].send({"generate": request})
    steps: list[list[dict]] = [[] for _ in batch]
    for first, control in enumerate(controls):
        left = len(range(first, len(batch), len(controls)))
        while left:
            frame: Any = control.receive()
            for step in frame["progress"]:
                assert not step.get("error"), step["error"]
                steps[step["number"]].append(step)
                left -= "finish" in step
    return [Answer([step["token"] for step in one], np.stack([_row(step) for step in one])) for one in steps]


def largest_difference(model: Any, folder: Path, layout: WorkerLayout, lengths: Several[int], limit: int) -> float:
    """Return the largest difference of log-probs to the whole model; infinite where greedy tokens differ."""
    batch = [[(7 * number + 3 * n) % (VOCAB - 4) + 3 for n in range(length)] for number, length in enumerate(lengths)]
    with RunningWorkers(folder, layout) as workers:
        found = served_answers(workers, batch, limit)
    expected = [whole_answer(model, prompt, limit) for prompt in batch]
    if any(one.tokens != other.tokens for one, other in zip(found, expected, strict=True)):
        return float("inf")
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(one.log_prob_NV - other.log_prob_NV).max()) for one, other in pairs)


def seconds_to_end_after(workers: RunningWorkers, harm: Callable[[], None], limit: int) -> tuple[float, str]:
    """Return the seconds from harm to the end of a request under way, and its sentence; empty: it was answered."""
    control = workers.attention_workers[0].control
    sampling = SamplingParameters(limit=limit, temperature=0.0)
    control.send({"generate": Sequence(number=0, prompt=(5, 6, 7), sampling=sampling)})
    control.receive()
    harm()
    began = time.perf_counter()
    while True:
        frame: Any = control.receive()
        ended = [step for step in frame["progress"] if "finish" in step]
        if ended:
            return time.perf_counter() - began, ended[0].get("error", "")


def _row(step: dict) -> np.ndarray:
    """Return the log-probs of a step by token."""
    row_V = np.full(VOCAB, -np.inf)
    for token, log_prob in step["top"]:
        row_V[token] = log_prob
    return row_V
