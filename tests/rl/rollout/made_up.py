"""Responses without a model: random fields, and whole runs of windows."""

from __future__ import annotations

import numpy as np

from relibra.rl.rollout.response import Response, Window


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
