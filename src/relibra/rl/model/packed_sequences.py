"""Sequences packed end to end in one row: test whether a model separates them; attention one by one, or masks.

Most decoders of transformers 5.23 detect sequence borders from positions that restart at 0. Some do not pass positions
to their masks (gpt-oss, AFMoE): their tokens silently attend to the sequences before their own, so they get explicit
masks (`use_explicit_masks`).

The mask that transformers makes for `sdpa` has an entry for each pair of tokens of a micro-batch, and most pairs are of
two sequences: with sequences of n tokens in a micro-batch of T, the work is T / n times the necessary work. Where a
model allows it, sequences attend one by one instead (`use_packed_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate, sdpa_mask

from relibra.replay.forward_cache import CACHE_NAME

PACKED = "relibra_packed"
"""Name among the attention implementations of transformers."""

_lengths_of = WeakTensorKeyDictionary()
"""Cache of sequence lengths by position tensor: all layers share the tensor, and reading it synchronizes the GPU."""
LENGTH = 6
"""Tokens of a sequence to probe a model with."""
NOISE = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Largest change by rounding (other kernels, other rows in a group), relative to the logits' standard deviation."""


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
    row = ((0, range(LENGTH)), (2, range(LENGTH)))
    masked = last_logits(model, *row)
    loaded.set_attn_implementation(PACKED)
    try:
        kept_apart = (
            loaded.config._attn_implementation == PACKED
            and same_logits(model, masked, last_logits(model, *row))
            and not mixes_sequences(model)
        )
    except (TypeError, AttributeError):  # it reads the mask, as the indexer of DeepSeek-V3.2
        kept_apart = False
    loaded.set_attn_implementation("sdpa")
    return kept_apart


def use_packed_attention(model: nn.Module) -> None:
    """Make a model attend within each packed sequence; other inputs are unaffected."""
    cast(PreTrainedModel, model).set_attn_implementation(PACKED)


def mixes_sequences(model: nn.Module) -> bool:
    """Return whether a sequence changes the logits of the next one in its row; the model is not sharded."""
    one, other = (last_logits(model, (first, range(LENGTH)), (2, range(LENGTH))) for first in (0, 1))
    return not same_logits(model, one, other)


@torch.no_grad()
def last_logits(model: nn.Module, *sequences: tuple[int, Sequence[int]]) -> Tensor:
    """Return the logits `[tokens, vocabulary]` of the last of several sequences, packed in a row.

    sequences   number and positions of each
    """
    tokens_1T = probe_tokens(model, [number for number, _ in sequences])
    position_1T = torch.tensor([[position for _, positions in sequences for position in positions]])
    output = model(input_ids=tokens_1T, position_ids=position_1T.to(tokens_1T.device), use_cache=False)
    return output.logits[0, -LENGTH:].float()


def probe_tokens(model: nn.Module, numbers: Sequence[int]) -> Tensor:
    """Return the tokens `[1, T]` of sequences of `LENGTH`, each made from its number."""
    vocab_size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    tokens_1T = torch.cat([torch.arange(LENGTH) + number * LENGTH for number in numbers])[None] % vocab_size
    return tokens_1T.to(next(model.parameters()).device)


def same_logits(model: nn.Module, left_TV: Tensor, right_TV: Tensor) -> bool:
    """Return whether two logits of a model differ by no more than rounding in passes of several shapes."""
    return change_of(left_TV, right_TV) <= NOISE[model.dtype]  # type: ignore[index]


def change_of(left_TV: Tensor, right_TV: Tensor) -> float:
    """Return the change of the logits of a token, relative to their standard deviation."""
    change_T = (left_TV - right_TV).abs().amax(dim=1)
    # The median: a few tokens may change their expert by rounding, and then their logits.
    return float(change_T.median() / left_TV.std())


def use_explicit_masks(model: nn.Module, dtype: torch.dtype) -> None:
    """Add a hook that passes the decoder masks made from positions, unless the caller passes a mask or a cache.

    dtype    of the forward pass
    """

    def with_masks(_decoder: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        positions_BN, tokens_BN = named.get("position_ids"), named.get("input_ids", given[0] if given else None)
        unmasked = named.get("attention_mask") is None and named.get(CACHE_NAME) is None
        if positions_BN is None or tokens_BN is None or not unmasked:
            return None
        shape_only = torch.empty((*tokens_BN.shape, 0), dtype=dtype, device=tokens_BN.device)
        masks = create_masks_for_generate(model.config, shape_only, None, None, positions_BN)
        return given, {**named, "attention_mask": masks}

    decoder: Any = model.base_model
    decoder.register_forward_pre_hook(with_masks, with_kwargs=True)


AttentionInterface.register(PACKED, attend_packed)
AttentionMaskInterface.register(PACKED, packed_mask)
