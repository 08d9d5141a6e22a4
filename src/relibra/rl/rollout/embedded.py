"""The embedded engine: batched sampling with a KV cache inside the training process, routes recorded on the way.

It knows token ids only, no text. Every rank holds a full copy of the policy and samples its own share of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from relibra.replay import RoutingRecorder, record_routing
from relibra.rl.rollout.sample import RolloutSample


@dataclass(frozen=True, kw_only=True)
class EmbeddedEngine:
    """Samples from a model that is already in this process.

    model            full copy of the policy, in evaluation mode
    weight_version   of the weights it holds; the trainer replaces the engine at every weight sync
    """

    model: nn.Module
    weight_version: int
    pad_id: int
    stop_id: int
    max_new_tokens: int
    temperature: float

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sample_ids: Sequence[int],
        group_ids: Sequence[int],
        generator: torch.Generator,
    ) -> list[RolloutSample]:
        """Sample one response per prompt, all in one batch; finished responses leave it.

        generator   decides every token; the same one over the same prompts gives the same samples
        """
        if not prompts:
            return []
        with record_routing(self.model) as recorder:
            rows = self._decode(prompts, recorder, generator)
        return [
            RolloutSample(
                sample_id=sample_id,
                group_id=group_id,
                tokens_n=np.array([*prompt, *row.tokens], dtype=np.int64),
                prompt_length=len(prompt),
                log_probs_r=np.array(row.log_probs, dtype=np.float32),
                experts_nLK=_routes(row.experts),
                weight_version=self.weight_version,
                finish_reason="stop" if row.tokens[-1] == self.stop_id else "length",
            )
            for prompt, row, sample_id, group_id in zip(prompts, rows, sample_ids, group_ids, strict=True)
        ]

    def _decode(
        self, prompts: Sequence[Sequence[int]], recorder: RoutingRecorder, generator: torch.Generator
    ) -> list[_Row]:
        device = next(self.model.parameters()).device
        rows = [_Row() for _ in prompts]
        input_BN, mask_BN = _left_pad(prompts, self.pad_id)
        input_BN, mask_BN = input_BN.to(device), mask_BN.to(device)
        active = list(range(len(prompts)))
        cache = DynamicCache(config=self.model.config)
        prefill = True
        for _ in range(self.max_new_tokens):
            position_BN = (mask_BN.cumsum(dim=1) - 1).clamp(min=0)[:, -input_BN.shape[1] :]
            logits_BV = self.model(
                input_ids=input_BN,
                attention_mask=mask_BN.long(),
                position_ids=position_BN,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            [experts_TLK] = recorder.take()
            experts_BNLK = experts_TLK.view(*input_BN.shape, *experts_TLK.shape[1:]).cpu().numpy()
            kept_BN = mask_BN.cpu().numpy() if prefill else np.ones((len(active), 1), dtype=bool)
            token_B, log_prob_B = _sample(logits_BV, self.temperature, generator)
            for b, (token, log_prob) in enumerate(zip(token_B.tolist(), log_prob_B.tolist(), strict=True)):
                rows[active[b]].add(token, log_prob, experts_BNLK[b][kept_BN[b]])
            going_B = token_B != self.stop_id
            if not going_B.any():
                break
            mask_BN = torch.cat([mask_BN, torch.ones_like(mask_BN[:, :1])], dim=1)
            if not going_B.all():
                cache.batch_select_indices(going_B)
                mask_BN, token_B = mask_BN[going_B], token_B[going_B]
                active = [row for row, going in zip(active, going_B.tolist(), strict=True) if going]
            input_BN, prefill = token_B[:, None], False
        return rows


@dataclass
class _Row:
    """A response under way: its tokens, their log-probs, and the routes of each position fed so far."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)

    def add(self, token: int, log_prob: float, experts_nLK: np.ndarray) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.experts.append(experts_nLK)


def _routes(pieces: list[np.ndarray]) -> np.ndarray:
    """Join the routes of the positions fed and add a row of legal ids for the last token, which never was."""
    *_, L, K = pieces[0].shape
    filler_1LK = np.broadcast_to(np.arange(K, dtype=pieces[0].dtype), (1, L, K))
    return np.concatenate([*pieces, filler_1LK])


def _left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "B N"], Bool[Tensor, "B N"]]:
    width = max(map(len, prompts))
    input_BN = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask_BN = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts])
    return input_BN, mask_BN


def _sample(
    logits_BV: Float[Tensor, "B V"], temperature: float, generator: torch.Generator
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Draw one token per row and return it with its log-probability.

    The uniform draws are made on the generator's device, so that CPU and GPU runs consume the same numbers.
    """
    log_prob_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    uniform_B1 = torch.rand(len(logits_BV), 1, generator=generator, dtype=torch.float64).to(logits_BV.device)
    cumulative_BV = log_prob_BV.double().exp().cumsum(dim=-1)
    token_B = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True).squeeze(1)
    token_B = token_B.clamp(max=logits_BV.shape[1] - 1)
    return token_B, log_prob_BV.gather(1, token_B[:, None]).squeeze(1)
