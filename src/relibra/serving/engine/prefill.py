"""`Prefill`: prompts that are fed in pieces, until the first token of each answer is sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32
from numpy import ndarray
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from relibra.serving.engine.request import Progress
from relibra.serving.engine.running_batch import Forward, Row, RunningBatch, join, sample_rows
from relibra.serving.engine.slotted_cache import Room, SlottedCache, cache_bytes

MOST_SCORES = 1 << 26
"""Logits of a piece whose tokens are scored."""


class Prefill:
    """Prompts of one length class, fed together; each serves all rows that begin with it.

    Several short prompts are padded in front to one width and fed in one piece. A prompt longer than a piece is fed
    alone, so that no piece is padding only.
    """

    def __init__(self, rows_of: Sequence[Sequence[Row]], config: PreTrainedConfig | None, pad_id: int) -> None:
        """Begin with nothing fed.

        rows_of   rows of each prompt
        config    of the model; None: it has states without slots, makes its own cache, and takes prompts whole
        """
        self.rows = [row for rows in rows_of for row in rows]
        self._rows_of = rows_of
        self._prompt_of_row = [b for b, rows in enumerate(rows_of) for _ in rows]
        prompts = [rows[0].request.tokens for rows in rows_of]
        width = max(map(len, prompts))
        self._input_BN = torch.full((len(prompts), width), pad_id)
        self._mask_BN = torch.zeros((len(prompts), width), dtype=torch.bool)
        for b, tokens in enumerate(prompts):
            self._input_BN[b, width - len(tokens) :] = torch.tensor(tokens)
            self._mask_BN[b, width - len(tokens) :] = True
        self._scored = any(row.request.sampling.prompt_log_probs for row in self.rows)
        self.room = Room(len(prompts), width)
        self._cache: Cache | None = None if config is None else SlottedCache(config, self.room)
        self._fed = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache now."""
        return cache_bytes(self._cache) if self._cache else 0

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(row.cancelled for row in self.rows)

    def feed(self, forward: Forward, most_tokens: int) -> list[Progress] | None:
        """Feed a piece of at most so many tokens, or one column; return the first tokens after the last piece."""
        width, prompts = self._mask_BN.shape[1], len(self._rows_of)
        end = width if self._cache is None else min(width, self._fed + max(1, most_tokens // prompts))
        piece = slice(self._fed, end)
        logits_BZV, experts_YLK, self._cache = forward(
            self._input_BN[:, piece], self._mask_BN[:, :end], self._cache, last=0 if self._scored else 1
        )
        experts_BNLK = experts_YLK.view(prompts, end - self._fed, *experts_YLK.shape[1:]).numpy()
        token_BN = self._mask_BN[:, piece].numpy()
        for b, rows in enumerate(self._rows_of):
            fed = int(token_BN[b].sum())
            routes = experts_BNLK[b][token_BN[b]] if any(row.request.sampling.routes for row in rows) else None
            scores = self._scores(b, piece, logits_BZV[b]) if self._scored else None
            for row in rows:
                row.fed += fed
                if row.request.sampling.routes and routes is not None:
                    row.experts.append(routes)
                if row.request.sampling.prompt_log_probs and scores is not None:
                    row.scores.append(scores)
        self._fed = end
        if end < width:
            return None
        return sample_rows(self.rows, logits_BZV[self._prompt_of_row, -1])

    def going_on(self, batch: RunningBatch | None, most_places: int) -> RunningBatch | None:
        """Return a batch with the rows that go on after the last piece behind those of a batch; None: none are left.

        most_places   that its cache may have
        """
        fresh = [(row, b) for row, b in zip(self.rows, self._prompt_of_row, strict=True) if row.goes_on]
        if not fresh:
            return batch
        rows, prompts = zip(*fresh, strict=True)
        if isinstance(self._cache, SlottedCache):
            return join(batch, rows, self._cache, prompts, most_places)
        assert self._cache is not None, "the last piece has been fed"
        assert batch is None, "states that have no slots are not joined"
        return RunningBatch(self.rows, self._cache).going_on()

    def _scores(self, prompt: int, piece: slice, logits_NV: Float[Tensor, "N V"]) -> Float32[ndarray, " Z"]:
        """Return the log-probs of the tokens that follow those of a piece."""
        next_N = self._input_BN[prompt, piece.start + 1 : piece.stop + 1]
        known_N = self._mask_BN[prompt, piece][: len(next_N)]
        log_prob_NV = torch.log_softmax(logits_NV[: len(next_N)].float(), dim=-1)
        return log_prob_NV.gather(1, next_N[:, None])[:, 0][known_N].numpy()


def share_prompts(rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows with equal prompts together, in the order of the first of each: their prompts are fed once."""
    by_prompt: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(row.request.tokens, []).append(row)
    return list(by_prompt.values())


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
