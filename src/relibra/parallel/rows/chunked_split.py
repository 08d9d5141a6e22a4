"""Token split in whole chunks, for canonical sums (after UniEP, arXiv 2604.19241).

The token-slots of an expert in a micro-batch are numbered by (source rank, position). Chunk `c` holds numbers `c C` to
`(c + 1) C - 1` under every plan. A plan only decides which instance computes which chunks. Each instance takes
consecutive ones, so that its rows, in the order of computation, are its chunks one after another.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.planning.traffic.split import TokenSplit


def chunked_split(split: TokenSplit, chunk: int) -> TokenSplit:
    """Return the split with each instance's share rounded to whole chunks; the last chunk of an expert may be short.

    chunk   token-slots per chunk, C
    """
    tokens_RI = np.zeros_like(split.tokens_RI)
    for expert in np.unique(split.expert_I):
        own = np.flatnonzero(split.expert_I == expert)
        tokens_RI[:, own] = _in_chunks(split.tokens_RI[:, own], chunk)
    return replace(split, tokens_RI=tokens_RI)


def _in_chunks(tokens_RI: Int64[ndarray, "R I"], chunk: int) -> Int64[ndarray, "R I"]:
    supply_R = tokens_RI.sum(axis=1)
    total = int(supply_R.sum())
    end_I = np.minimum(np.cumsum(_chunks_per_instance(tokens_RI.sum(axis=0), chunk)) * chunk, total)
    start_I = np.concatenate([[0], end_I[:-1]])
    end_R = np.cumsum(supply_R)[:, None]
    start_R = end_R - supply_R[:, None]
    return np.maximum(0, np.minimum(end_R, end_I) - np.maximum(start_R, start_I))


def _chunks_per_instance(quota_I: Int64[ndarray, " I"], chunk: int) -> Int64[ndarray, " I"]:
    """Return the chunks of each instance, by largest remainder; ties go to the earlier instance, the home first."""
    total = -(-int(quota_I.sum()) // chunk)
    chunks_I = quota_I // chunk
    by_remainder = np.argsort(-(quota_I - chunks_I * chunk), kind="stable")
    chunks_I[by_remainder[: total - int(chunks_I.sum())]] += 1
    return chunks_I
