"""Made-up responses for tests of what is done with them after the rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relibra.rl.batch.schedule import Schedule
from relibra.rl.rollout.response import Response

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
