"""Passes of a model over new tokens and a KV cache: `Forward`, and `Prefill`, which feeds prompts in pieces."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int
from numpy import ndarray
from torch import Tensor, nn
from transformers import PreTrainedConfig

from relibra.engine.kv_cache import Room, SlottedCache
from relibra.engine.sequence import Sequence
from relibra.replay import RoutingRecorder
from relibra.replay.forward_cache import CACHE_NAME


@runtime_checkable
class Forward(Protocol):
    """Runs a model."""

    def __call__(
        self, input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: SlottedCache, *, last: int = 1
    ) -> tuple[Float[Tensor, "B Z V"], Tensor | None]:
        """Return the logits of the last columns and the routes `[B * N, L, K]`; the cache has the tokens then.

        mask_BC   columns of the cache, and then of the input, that hold tokens
        last      columns of logits; 0: all
        """
        ...


def local_forward(model: nn.Module, recorder: RoutingRecorder | None) -> Forward:
    """Return the pass of a whole model in this process; without a recorder it returns no routes."""
    device = next(model.parameters()).device

    def forward(
        input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: SlottedCache, *, last: int = 1
    ) -> tuple[Float[Tensor, "B Z V"], Tensor | None]:
        logits_BZV = run_model(model, input_BN.to(device), mask_BC.to(device), cache, last)
        return logits_BZV, recorder.take()[0].cpu() if recorder else None

    return forward


def run_model(
    model: Any, input_BN: Int[Tensor, "B N"], mask_BC: Bool[Tensor, "B C"], cache: SlottedCache, last: int
) -> Float[Tensor, "B Z V"]:
    """Return the logits of the last columns."""
    position_BN = (mask_BC.cumsum(dim=1) - 1).clamp(min=0)[:, -input_BN.shape[1] :]
    output = model(
        input_ids=input_BN,
        attention_mask=mask_BC.long(),
        position_ids=position_BN,
        use_cache=True,
        logits_to_keep=last,
        **{CACHE_NAME: cache.for_model},
    )
    if not cache.can_join:
        cache.made_by_model = output[CACHE_NAME]
    return output.logits


MOST_SCORES = 1 << 26
"""Most logits (tokens x vocabulary) of a piece whose tokens are scored."""


class Prefill:
    """Prompts of one length class, fed together; each serves all sequences that begin with it.

    Several short prompts are padded in front to one width and fed in one piece. A prompt longer than a piece is fed
    alone, so that no piece is padding only.

    sequences   of all prompts
    prompt_of   row in the cache of each sequence's prompt
    width       tokens of the longest prompt
    """

    def __init__(
        self, sharing: Several[Several[Sequence]], config: PreTrainedConfig, pad_id: int, *, whole: bool
    ) -> None:
        """Begin with nothing fed.

        sharing   sequences of each prompt
        whole     prompts are fed in one piece; caches that cannot be joined need it
        """
        self.sequences = [sequence for group in sharing for sequence in group]
        self.prompt_of = [b for b, group in enumerate(sharing) for _ in group]
        prompts = [group[0].prompt for group in sharing]
        self.width = max(map(len, prompts))
        self.cache = SlottedCache(config, Room(len(prompts), self.width))
        self._sharing, self._whole, self._fed = sharing, whole, 0
        self._input_BN = torch.full((len(prompts), self.width), pad_id)
        self._mask_BN = torch.zeros((len(prompts), self.width), dtype=torch.bool)
        for b, tokens in enumerate(prompts):
            self._input_BN[b, self.width - len(tokens) :] = torch.tensor(tokens)
            self._mask_BN[b, self.width - len(tokens) :] = True
        self._scored = any(sequence.sampling.prompt_log_probs for sequence in self.sequences)
        self._most_scored = max(1, MOST_SCORES // config.get_text_config().vocab_size)

    @property
    def goes_on(self) -> bool:
        """Whether a sequence waits for it."""
        return any(sequence.finish is None for sequence in self.sequences)

    def feed(self, forward: Forward, most_tokens: int) -> Float[Tensor, "S V"] | None:
        """Feed a piece of at most `most_tokens`, or one column; after the last, return each sequence's last logits."""
        prompts, start = len(self._sharing), self._fed
        most = min(most_tokens, self._most_scored) if self._scored else most_tokens
        end = self.width if self._whole else min(self.width, start + max(1, most // prompts))
        piece = slice(start, end)
        logits_BZV, experts_YLK = forward(
            self._input_BN[:, piece], self._mask_BN[:, :end], self.cache, last=0 if self._scored else 1
        )
        experts_BNLK = None
        if experts_YLK is not None:
            experts_BNLK = experts_YLK.view(prompts, end - start, *experts_YLK.shape[1:]).numpy()
        token_BN = self._mask_BN[:, piece].numpy()
        for b, group in enumerate(self._sharing):
            fed = int(token_BN[b].sum())
            scores = self._scores(b, piece, logits_BZV[b]) if self._scored else None
            for sequence in group:
                sequence.fed += fed
                if sequence.sampling.routes and experts_BNLK is not None:
                    sequence.experts.append(experts_BNLK[b][token_BN[b]])
                if sequence.sampling.prompt_log_probs and scores is not None:
                    sequence.scores.append(scores)
        self._fed = end
        return logits_BZV[self.prompt_of, -1] if end == self.width else None

    def _scores(self, prompt: int, piece: slice, logits_NV: Float[Tensor, "N V"]) -> Float32[ndarray, " Z"]:
        """Return the log-probs of the tokens that follow those of a piece."""
        next_N = self._input_BN[prompt, piece.start + 1 : piece.stop + 1]
        known_N = self._mask_BN[prompt, piece][: len(next_N)]
        log_prob_NV = torch.log_softmax(logits_NV[: len(next_N)].float(), dim=-1)
        return log_prob_NV.gather(1, next_N[:, None])[:, 0][known_N].numpy()


def share_prompts(sequences: Several[Sequence]) -> list[list[Sequence]]:
    """Return sequences with equal prompts together, in the order of the first of each: their prompts are fed once."""
    by_prompt: dict[tuple[int, ...], list[Sequence]] = {}
    for sequence in sequences:
        by_prompt.setdefault(sequence.prompt, []).append(sequence)
    return list(by_prompt.values())


def group_prompts(lengths: Several[int], most_tokens: int) -> list[list[int]]:
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
