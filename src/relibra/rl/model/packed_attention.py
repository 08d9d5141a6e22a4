"""Attention over packed sequences, one at a time, without a mask over all pairs of tokens.

The mask that transformers makes for `sdpa` has an entry for each pair of tokens of a micro-batch, and most pairs are of
two sequences: with sequences of n tokens in a micro-batch of T, the work is T / n times the necessary work.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from relibra.rl.model.sequence_masks import logits_behind, mixes_sequences, same_logits

PACKED = "relibra_packed"
"""Name among the attention implementations of transformers."""

_lengths_of = WeakTensorKeyDictionary()
"""Cache of sequence lengths by position tensor: all layers share the tensor, and reading it synchronizes the GPU."""


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    position_ids: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence; for other inputs, the same as `sdpa`.

    query, key, value   `[1, heads, tokens, head size]`; keys and values may have fewer heads
    attention_mask      None if `packed_mask` omitted it
    position_ids        `[1, tokens]`, restart at 0 with each sequence
    returns             `[1, tokens, heads, head size]`, and no attention weights
    """
    special = settings.get("position_bias") is not None or settings.get("is_causal") is False
    one_row = query.shape[0] == 1 and query.shape[2] == key.shape[2]  # and no cache
    if attention_mask is not None or special or position_ids is None or not one_row:
        return sdpa_attention_forward(module, query, key, value, attention_mask, position_ids=position_ids, **settings)
    lengths = sequence_lengths(position_ids)
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    pieces = [
        nn.functional.scaled_dot_product_attention(
            *one, is_causal=True, dropout_p=settings.get("dropout", 0.0), scale=settings.get("scaling")
        )
        for one in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *arguments: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **settings: Any,
) -> Tensor | None:
    """Return the mask of `sdpa`, or None if `attend_packed` needs none: full causal attention of one row.

    Layers with sliding windows or chunks (`local_size`), and custom masks of a model (`use_vmap`), keep their mask.
    """
    if batch_size == 1 and q_length == kv_length and attention_mask is None and local_size is None and not use_vmap:
        return None
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        *arguments,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        **settings,
    )


def sequence_lengths(position_ids_1T: Tensor) -> list[int]:
    """Return the lengths of packed sequences, whose positions restart at 0."""
    lengths = _lengths_of.get(position_ids_1T)
    if lengths is None:
        starts = (position_ids_1T[0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], position_ids_1T.shape[1]]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        _lengths_of[position_ids_1T] = lengths
    return lengths


def can_attend_packed(model: nn.Module) -> bool:
    """Return whether a model has the same logits with `attend_packed`; it is not sharded, in evaluation mode.

    A family that does not pass positions on to its attention would attend across sequences.
    """
    loaded = cast(PreTrainedModel, model)
    if loaded.config._attn_implementation != "sdpa":
        return False  # attention sinks, soft caps and the like: the family does not use sdpa
    masked = logits_behind(model)
    loaded.set_attn_implementation(PACKED)
    kept_apart = (
        loaded.config._attn_implementation == PACKED
        and same_logits(model, masked, logits_behind(model))
        and not mixes_sequences(model)
    )
    loaded.set_attn_implementation("sdpa")
    return kept_apart


def use_packed_attention(model: nn.Module) -> None:
    """Make a model attend within each packed sequence; other inputs are unaffected."""
    cast(PreTrainedModel, model).set_attn_implementation(PACKED)


AttentionInterface.register(PACKED, attend_packed)
AttentionMaskInterface.register(PACKED, packed_mask)
