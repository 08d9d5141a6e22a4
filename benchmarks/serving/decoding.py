"""Decoding of a batch by worker processes, and by transformers' continuous batching on the same cores."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence as Several
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from numpy import ndarray
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig

from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.serving.launch import RunningWorkers

PROMPT, ANSWER = 32, 64
VOCAB = 2048


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """Sizes of a random Qwen3-MoE."""

    hidden: int = 512
    layers: int = 6
    experts: int = 16
    top_k: int = 2
    width: int = 256
    heads: int = 8

    def __str__(self) -> str:
        return (
            f"random Qwen3-MoE, float32: {self.layers} layers of {self.hidden}, {self.top_k} of {self.experts} experts "
            f"of {self.width}"
        )

    def write(self, folder: Path) -> None:
        """Write the model."""
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=self.hidden // self.heads,
            moe_intermediate_size=self.width,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=True,
            max_position_embeddings=4096,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def prompts(count: int) -> list[list[int]]:
    """Return prompts of one length that differ."""
    return [[(13 * i + 7 * j) % (VOCAB - 5) + 5 for j in range(PROMPT)] for i in range(count)]


@dataclass
class Round:
    """One batch, from the first request to the last token.

    seconds    of all
    tokens     answered
    gaps_ms    between tokens of a request that follow one another
    """

    seconds: float = 0.0
    tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)


class Driver:
    """Sends batches to the attention workers of a deployment, without HTTP."""

    def __init__(self, workers: RunningWorkers) -> None:
        """Use the connections of a deployment with one attention worker."""
        self.workers, self._number = workers, 0
        self._control = workers.attention_workers[0].control

    def seconds_of_layer(self, requests: int, layers: int) -> tuple[float, float]:
        """Return the seconds of one layer of a decode step in attention and in experts, without prompts and waits."""
        busy = []
        for answer in (1, ANSWER):
            before = self._busy()
            self.run(prompts(requests), answer)
            busy.append(self._busy() - before)
        attention, experts = (busy[1] - busy[0]) / (layers * (ANSWER - 1))
        return float(attention), float(experts)

    def _busy(self) -> Float64[ndarray, " 2"]:
        seconds = []
        for worker in (self.workers.attention_workers[0], self.workers.expert_workers[0]):
            worker.control.send({"counters": True})
            seconds.append(worker.control.receive(seconds=60.0)["counters"]["busy_seconds"])
        return np.array(seconds)

    def run(self, batch: Several[Several[int]], answer: int = ANSWER) -> Round:
        """Answer a batch greedily."""
        first, last, result = self._number, {}, Round(texts=[[] for _ in batch])
        began = time.perf_counter()
        for tokens in batch:
            sampling = SamplingParameters(limit=answer, temperature=0.0)
            self._control.send({"generate": Sequence(number=self._number, prompt=tuple(tokens), sampling=sampling)})
            self._number += 1
        left = len(batch)
        while left:
            frame: Any = self._control.receive()
            now = time.perf_counter()
            for step in frame["progress"]:
                number = step["number"] - first
                assert step.get("finish") != "error", step.get("error")
                if number in last:
                    result.gaps_ms.append(1e3 * (now - last[number]))
                last[number] = now
                result.texts[number].append(step["token"])
                left -= "finish" in step
        result.seconds, result.tokens = time.perf_counter() - began, sum(map(len, result.texts))
        return result


class ContinuousBatching:
    """transformers' own engine, in this process."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Load the whole model."""
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._settings = GenerationConfig(
            max_new_tokens=ANSWER, do_sample=False, eos_token_id=VOCAB + 1, pad_token_id=0
        )

    def run(self, batch: Several[Several[int]]) -> Round:
        """Answer a batch greedily."""
        began = time.perf_counter()
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            answers = self._model.generate_batch(
                [list(tokens) for tokens in batch], generation_config=self._settings, progress_bar=False
            )
        seconds = time.perf_counter() - began
        by_prompt = {tuple(one.prompt_ids): list(one.generated_tokens) for one in answers.values()}
        texts = [by_prompt[tuple(tokens)] for tokens in batch]
        return Round(seconds=seconds, tokens=sum(map(len, texts)), texts=texts)


def percentiles(rounds: Several[Round]) -> dict[str, float]:
    """Return median and 99th percentile of the time between tokens, of all rounds."""
    gaps = np.concatenate([one.gaps_ms for one in rounds])
    return {"p50_ms": float(np.median(gaps)), "p99_ms": float(np.quantile(gaps, 0.99))}
