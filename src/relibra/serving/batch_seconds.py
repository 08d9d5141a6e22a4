"""Seconds of attention, experts and messages in decode steps of batches, measured on two worker processes."""

from __future__ import annotations

from collections.abc import Sequence as Several
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.errors import EngineError
from relibra.field_checks import build
from relibra.planning.deployment.measured_seconds import MeasuredSeconds
from relibra.serving.launch import RunningWorkers, Worker
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.checkpoint import read_config, read_structure
from relibra.timeline import Event

ROWS_PER_EXPERT = (1, 2, 4, 8, 12, 16, 24, 32)
"""Mean rows of an expert in each batch that is measured."""
TOKENS, ROUNDS, WAIT_SECONDS, SEED = 24, 3, 600.0, 0
"""Steps in which all requests of a batch decode, turns of each batch, longest wait for a step, seed of prompts."""


def measure_batches(folder: Path, *, context: int, dtype: str = "auto") -> MeasuredSeconds:
    """Return what decode steps of several batches take on one attention and one expert worker with a thread each.

    There is one micro-batch, so nothing overlaps; each figure is the median, over turns, of a turn's mean step.

    context    tokens of a request, prompt included, when half of its answer is there; more than TOKENS / 2
    raises     as `RunningWorkers` does; EngineError where a worker ends, or larger batches take no longer
    """
    structure, rng = read_structure(folder, dtype), np.random.default_rng(SEED)
    E, K, row_bytes = structure.num_experts, structure.top_k, structure.hidden * structure.dtype.itemsize
    batches = sorted({-(-rows * E // K) for rows in ROWS_PER_EXPERT})
    vocabulary, most = read_config(folder).get_text_config().vocab_size, batches[-1]
    prompt, max_tokens = context - TOKENS // 2, max(512, 4 * most)
    # Prompts are fed in pieces while earlier requests decode: a token more per piece, so that all share TOKENS steps.
    tokens = {requests: TOKENS + -(-requests * prompt // max_tokens) for requests in batches}
    layout = WorkerLayout(
        micro_batches=1, max_batch=most, max_length=prompt + tokens[most], max_tokens=max_tokens,
        kv_tokens=most * (prompt + tokens[most]),
    )  # fmt: skip
    found: dict[int, list[Float64[ndarray, "3 S"]]] = {requests: [] for requests in batches}
    with RunningWorkers(folder, layout, dtype=dtype, timeline=True) as workers:
        for requests in [most, *ROUNDS * batches]:
            answer(workers, rng.integers(0, vocabulary, (requests, prompt)).tolist(), tokens[requests])
            found[requests].append(step_seconds(workers, len(structure.experts), requests * row_bytes))
    # Means of steps, since throughput is of all steps; medians of turns, since a turn may meet a slow moment.
    turns_X = [[turn_3S.mean(axis=1) for turn_3S in found[requests]] for requests in batches]
    seconds_X3 = np.array([np.median(turns, axis=0) for turns in turns_X])
    amounts_X3 = np.outer(batches, (1, K / E, 2 * K * structure.hidden))  # requests, rows of an expert, bytes
    table_3X2 = np.stack([amounts_X3, seconds_X3 / (1, E, 1)], axis=2).transpose(1, 0, 2)  # seconds of one expert
    names = ("attention", "expert", "message")
    return build(MeasuredSeconds, dict(zip(names, table_3X2.tolist(), strict=True)), str(folder), EngineError)


def answer(workers: RunningWorkers, prompts: Several[Several[int]], tokens: int) -> None:
    """Let the only attention worker answer prompts at once, greedily; raises EngineError where a worker ends."""
    control, left = workers.attention_workers[0].control, len(prompts) + 1
    try:
        for number, prompt in enumerate(([0], *prompts)):  # request 0 holds back what cannot join: that begins together
            sampling = SamplingParameters(limit=tokens + len(prompts[0]) - len(prompt), temperature=0.0)
            control.send({"generate": Sequence(number=number, prompt=tuple(prompt), sampling=sampling)})
        control.send({"cancel": 0})
        while left:
            for step in control.receive(seconds=WAIT_SECONDS)["progress"]:
                if step.get("finish") in ("error", "lost"):
                    raise EngineError(step["error"])
                left -= "finish" in step
    except OSError as error:
        raise EngineError(f"a worker has ended or hangs ({error}): look at what it printed") from error


def step_seconds(workers: RunningWorkers, layers: int, num_bytes: int) -> Float64[ndarray, "3 S"]:
    """Return seconds of attention, experts and one message per layer; of steps of `num_bytes` that such a step follows.

    A message takes half of the wait for experts beyond their own seconds, attention all the rest of the step.
    """
    waits_3LS = _layer_events(workers.attention_workers[0], "await experts", layers)
    experts_3LS = _layer_events(workers.expert_workers[0], "experts", layers)
    steps = min(waits_3LS.shape[2], experts_3LS.shape[2])
    (start_LS, wait_LS, _), (_, busy_LS, bytes_LS) = waits_3LS[..., -steps:], experts_3LS[..., -steps:]
    whole_S = (bytes_LS == num_bytes).all(axis=0)
    wait_S, busy_S = wait_LS.sum(axis=0)[:-1], busy_LS.sum(axis=0)[:-1]
    message_S = np.maximum(0.0, wait_S - busy_S) / 2
    parts_3S = np.stack([np.diff(start_LS[0]) - busy_S - 2 * message_S, busy_S, message_S])
    return parts_3S[:, whole_S[:-1] & whole_S[1:]] / layers


def _layer_events(worker: Worker, stage: str, layers: int) -> Float64[ndarray, "3 L S"]:
    """Return start, seconds and bytes of a stage in each layer, of the whole steps that the worker still keeps."""
    worker.control.send({"timeline": True})
    events = [Event(*one) for one in worker.control.receive(seconds=WAIT_SECONDS)["timeline"]["events"]]
    kept = [(event.start, event.seconds, event.bytes) for event in events if event.stage == stage]
    return np.array(kept[len(kept) % layers :], dtype=np.float64).reshape(-1, layers, 3).T
