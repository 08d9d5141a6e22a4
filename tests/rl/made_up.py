"""Made-up responses and windows, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relibra.rl.batch.schedule import Schedule
from relibra.rl.rollout.response import Response, Window

LAYERS, EXPERTS, TOP_K = 3, 8, 2
"""As of `tests.replay.tiny_models.tiny_model()`."""


def response_of(
    sample_id: int,
    *,
    prompt: int = 3,
    earlier: int = 0,
    length: int = 5,
    finished: bool = True,
    reward: float | None = 1.0,
    group: int | None = None,
    version: int = 0,
    routed: bool = True,
) -> Response:
    """Return a response whose last window has `length` tokens, behind `earlier` ones of windows before."""
    rng = np.random.default_rng([sample_id, prompt, earlier, length])
    r = earlier + length
    n = prompt + r
    keys = rng.random((n, LAYERS, EXPERTS))
    return Response(
        sample_id=sample_id,
        group_id=sample_id if group is None else group,
        tokens_n=rng.integers(3, 60, n),
        prompt_length=prompt,
        log_probs_r=-rng.random(r, dtype=np.float32),
        versions_r=np.repeat(np.array([version - 1, version], dtype=np.int32), [earlier, length]),
        values_r=np.full(r, np.nan, dtype=np.float32),
        experts_mLK=keys.argsort(-1)[:-1, :, :TOP_K].astype(np.uint8) if routed else None,
        windows=1 + (earlier > 0),
        window_length=length,
        finish_reason="stop" if finished else None,
        reward=reward if finished else None,
    )


def responses_of(lengths: Sequence[int], **common: object) -> list[Response]:
    """Return responses of these lengths to prompts of different lengths."""
    return [
        response_of(s, **{"prompt": 1 + s % 4, "length": length, **common})  # type: ignore[arg-type]
        for s, length in enumerate(lengths)
    ]


def of_rank(schedule: Schedule, rank: int) -> list[np.ndarray]:
    """Return the responses that a rank trains in each micro-batch."""
    return [
        np.flatnonzero((schedule.micro_batch_S == m) & (schedule.rank_S == rank))
        for m in range(schedule.num_micro_batches)
    ]


def mini_batch_of(schedule: Schedule) -> np.ndarray:
    """Return the mini-batch of each response."""
    return schedule.mini_batch_M[schedule.micro_batch_S]


def window_of(length: int, *, rows: int | None, stopped: bool, seed: int = 0, experts: int = 8) -> Window:
    """Return a window of random tokens; `rows` of routes, None: no experts."""
    rng = np.random.default_rng(seed)
    return Window(
        tokens_w=rng.integers(3, 60, length),
        log_probs_w=-rng.random(length, dtype=np.float32),
        experts_mLK=None if rows is None else rng.integers(0, experts, (rows, 2, 3)).astype(np.uint8),
        stopped=stopped,
    )


def random_response(sample_id: int, seed: int, *, dtype: str | None = "uint8", longest: int = 30) -> Response:
    """Return a response with every field random; dtype None: no experts."""
    rng = np.random.default_rng([sample_id, seed])
    prompt, added = int(rng.integers(1, longest)), int(rng.integers(0, longest))
    n, layers, choices = prompt + added, int(rng.integers(1, 4)), int(rng.integers(1, 4))
    values_r = rng.standard_normal(added).astype(np.float32)
    values_r[rng.random(added) < 0.5] = np.nan
    return Response(
        sample_id=sample_id,
        group_id=int(rng.integers(0, 1 << 40)),
        tokens_n=rng.integers(0, 1 << 20, n),
        prompt_length=prompt,
        log_probs_r=rng.standard_normal(added).astype(np.float32),
        versions_r=rng.integers(0, 1 << 30, added).astype(np.int32),
        values_r=values_r,
        experts_mLK=None if dtype is None else rng.integers(0, 100, (n - 1, layers, choices)).astype(dtype),
        windows=int(rng.integers(0, 5)),
        window_length=int(rng.integers(0, added + 1)),
        finish_reason=[None, "stop", "length"][int(rng.integers(3))],
        reward=[None, float(rng.standard_normal()), 0.0][int(rng.integers(3))],
    )


def same(one: Response, other: Response) -> bool:
    """Compare all fields bit by bit, types and shapes included."""
    for name, value in vars(one).items():
        twin = getattr(other, name)
        if isinstance(value, np.ndarray) or isinstance(twin, np.ndarray):
            if value is None or twin is None or value.dtype != twin.dtype or value.shape != twin.shape:
                return False
            if value.tobytes() != twin.tobytes():
                return False
        elif value != twin or type(value) is not type(twin):
            return False
    return True
