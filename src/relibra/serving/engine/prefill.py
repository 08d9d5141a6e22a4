"""`Prefill`: prompts that are fed in pieces, until the first token of each answer is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import Cache

from relibra.serving.engine.request import Progress
from relibra.serving.engine.running_batch import Forward, Row, RunningBatch, keep_unfinished, sample_rows


class Prefill:
    """Prompts of one length class, fed together.

    Several short prompts are padded in front to one width and fed in one piece. A prompt longer than a piece is fed
    alone, so that no piece is padding only.
    """

    def __init__(self, rows: Sequence[Row], cache: Cache | None, pad_id: int) -> None:
        """Begin with nothing fed.

        cache   empty; None: the model makes its own, and takes prompts whole
        """
        self.rows = list(rows)
        width = max(len(row.request.tokens) for row in rows)
        self._input_BN = torch.full((len(rows), width), pad_id)
        self._mask_BN = torch.zeros((len(rows), width), dtype=torch.bool)
        for b, row in enumerate(rows):
            first = width - len(row.request.tokens)
            self._input_BN[b, first:] = torch.tensor(row.request.tokens)
            self._mask_BN[b, first:] = True
        self._cache, self._fed = cache, 0

    def feed(self, forward: Forward, most_tokens: int) -> list[Progress] | None:
        """Feed a piece of at most so many tokens, or one column; return the first tokens after the last piece."""
        piece_columns = self._mask_BN.shape[1] if self._cache is None else max(1, most_tokens // len(self.rows))
        end = min(self._mask_BN.shape[1], self._fed + piece_columns)
        piece = slice(self._fed, end)
        logits_BV, experts_YLK, self._cache = forward(self._input_BN[:, piece], self._mask_BN[:, :end], self._cache)
        experts_BNLK = experts_YLK.view(len(self.rows), end - self._fed, *experts_YLK.shape[1:]).numpy()
        token_BN = self._mask_BN[:, piece].numpy()
        for b, row in enumerate(self.rows):
            row.fed += int(token_BN[b].sum())
            if row.request.sampling.routes:
                row.experts.append(experts_BNLK[b][token_BN[b]])
        self._fed = end
        return sample_rows(self.rows, logits_BV) if end == self._mask_BN.shape[1] else None

    def batch(self) -> RunningBatch | None:
        """Return the rows that go on after the last piece; None if all have ended."""
        assert self._cache is not None, "the last piece has been fed"
        return keep_unfinished(self.rows, torch.nn.functional.pad(self._mask_BN, (0, 1), value=True), self._cache)


def group_prompts(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Return groups of prompts to feed together, by falling length: padded, a group has at most `most_tokens`.

    Prompts of a group have at least half the length of its longest, so that little of it is padding.

    >>> group_prompts([3, 100, 4, 90], 256)
    [[1, 3], [2, 0]]
    """
    groups: list[list[int]] = []
    for index in np.argsort([-length for length in lengths], kind="stable").tolist():
        if groups:
            width = lengths[groups[-1][0]]
            if (len(groups[-1]) + 1) * width <= most_tokens and 2 * lengths[index] >= width:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups
