"""Sequences packed end to end in one row: test whether a model separates them, and masks for models that do not.

Most decoders of transformers 5.23 detect sequence borders from positions that restart at 0. Some do not pass positions
to their masks (gpt-oss, AFMoE): their tokens silently attend to the sequences before their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

_LENGTH = 6
_NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Largest change by rounding (other kernels, other rows in a group), relative to the logits' standard deviation."""


def mixes_sequences(model: nn.Module) -> bool:
    """Return whether a sequence changes the logits of the next one in its row; the model is not sharded."""
    return not same_logits(model, logits_behind(model, first=0), logits_behind(model, first=1))


@torch.no_grad()
def logits_behind(model: nn.Module, first: int = 0) -> Tensor:
    """Return the logits `[tokens, vocabulary]` of a short sequence packed behind another; `first`: which of two."""
    vocab_size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    device = next(model.parameters()).device
    tokens_3N = torch.arange(3 * _LENGTH).view(3, _LENGTH) % vocab_size
    tokens_1T = torch.cat([tokens_3N[first], tokens_3N[2]])[None]
    position_1T = torch.arange(_LENGTH).repeat(2)[None]
    output = model(input_ids=tokens_1T.to(device), position_ids=position_1T.to(device), use_cache=False)
    return output.logits[0, _LENGTH:].float()


def same_logits(model: nn.Module, left_TV: Tensor, right_TV: Tensor) -> bool:
    """Return whether two logits of a model differ by no more than rounding."""
    change_T = (left_TV - right_TV).abs().amax(dim=1)
    # The median: a few tokens may change their expert by rounding, and then their logits.
    return bool(change_T.median() <= _NOISE[model.dtype] * left_TV.std())  # type: ignore[index]


def use_explicit_masks(model: nn.Module, dtype: torch.dtype) -> None:
    """Add a hook that passes the decoder masks made from positions, unless the caller passes a mask or a cache.

    dtype    of the forward pass
    """

    def with_masks(_decoder: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        positions_BN, tokens_BN = named.get("position_ids"), named.get("input_ids", given[0] if given else None)
        unmasked = named.get("attention_mask") is None and named.get("past_key_values") is None
        if positions_BN is None or tokens_BN is None or not unmasked:
            return None
        shape_only = torch.empty((*tokens_BN.shape, 0), dtype=dtype, device=tokens_BN.device)
        masks = create_masks_for_generate(model.config, shape_only, None, None, positions_BN)
        return given, {**named, "attention_mask": masks}

    decoder: Any = model.base_model
    decoder.register_forward_pre_hook(with_masks, with_kwargs=True)
