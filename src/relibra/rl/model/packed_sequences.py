"""Sequences packed end to end in one row: test whether a model separates them; attention one by one, or masks.

Responses may share their prompt: where positions fall back to p > 0, a response begins that sees the first p tokens of
the sequence before it, and no other response. Positions alone say so (`find_segments`).

Most decoders of transformers 5.23 detect sequence borders from positions that restart at 0. Some do not pass positions
to their masks (gpt-oss, AFMoE): their tokens silently attend to the sequences before their own, so they get explicit
masks (`use_explicit_masks`).

The mask that transformers makes for `sdpa` has an entry for each pair of tokens of a micro-batch, and most pairs are of
two sequences: with sequences of n tokens in a micro-batch of T, the work is T / n times the necessary work. Where a
model allows it, sequences attend one by one instead (`use_packed_attention`). Families with attention sinks have no
`sdpa`, and make all scores of all heads: they get a function of their own (`attention_sinks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.bias import causal_lower_right
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import create_masks_for_generate, eager_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from relibra.replay.device_copies import upload
from relibra.replay.forward_cache import CACHE_NAME
from relibra.rl.model.attention_sinks import Segment, SegmentRows, attend_with_sinks
from relibra.rl.run.ranks import gather_json

PACKED, PACKED_SINKS = "relibra_packed", "relibra_packed_sinks"
"""Names among the attention implementations of transformers."""

_segments_of = WeakTensorKeyDictionary()
"""Cache of segments by position tensor: all layers share the tensor, and reading it synchronizes the GPU."""
_rows_of = WeakTensorKeyDictionary()
"""Cache of where segments begin, and of the keys that they see, on the device, by position tensor."""
BLOCK = 128
"""Most queries behind a shared prompt that a CPU attends at once; a mask costs as much for keys that it hides."""
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
    position_ids        `[1, tokens]`, restart at 0 with each sequence, and fall back to p > 0 with each response behind
                        a shared prompt of p tokens
    returns             `[1, tokens, heads, head size]`, and no attention weights
    """
    special = settings.get("position_bias") is not None or settings.get("is_causal") is False
    one_row = query.shape[0] == 1 and query.shape[2] == key.shape[2]  # and no cache
    if attention_mask is not None or special or position_ids is None or not one_row:
        return sdpa_attention_forward(module, query, key, value, attention_mask, position_ids=position_ids, **settings)
    segments = segments_of(position_ids)
    groups = query.shape[1] // key.shape[1]
    # Of the kernels of a GPU only flash attention shares keys and values, for narrow types and heads up to 256.
    shared = query.is_cpu or (query.itemsize == 2 and query.shape[-1] <= 256)
    if not shared:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    attend = partial(
        nn.functional.scaled_dot_product_attention,
        dropout_p=settings.get("dropout", 0.0),
        scale=settings.get("scaling"),
        enable_gqa=shared and groups > 1,
    )
    lengths = [segment.length for segment in segments]
    own = list(zip(*(one.split(lengths, 2) for one in (query, key, value)), strict=True))
    prompts: dict[tuple[int, int], list[Tensor]] = {}
    pieces = list[Tensor]()
    for rows, (_, source, prompt) in zip(own, segments, strict=True):
        if not prompt:
            pieces.append(attend(*rows, is_causal=True))
            continue
        if (source, prompt) not in prompts:
            prompts[source, prompt] = [one[:, :, :prompt] for one in own[source][1:]]
        keys, values = (torch.cat(both, dim=2) for both in zip(prompts[source, prompt], rows[1:], strict=True))
        pieces += _attend_behind(rows[0], keys, values, attend)
    return torch.cat(pieces, dim=2).transpose(1, 2).contiguous(), None


def _attend_behind(query: Tensor, key: Tensor, value: Tensor, attend: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Yield causal attention of queries that stand at the last keys, in blocks.

    `is_causal` would let the first query see the first key alone.
    """
    length, before = query.shape[2], key.shape[2] - query.shape[2]
    if not query.is_cpu:
        yield attend(query, key, value, attn_mask=causal_lower_right(length, before + length))
        return
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        mask = torch.ones(end - start, before + end, dtype=torch.bool).tril(before + start)
        yield attend(query[:, :, start:end], *(one[:, :, : before + end] for one in (key, value)), attn_mask=mask)


def attend_packed_with_sinks(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    s_aux: Tensor,
    position_ids: Tensor | None = None,
    scaling: float,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **_settings: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence, with sinks; with a mask, attend to what it shows, and make all scores.

    s_aux            sink of each head. A family that passes none raises TypeError, and keeps its own attention
    sliding_window   tokens that a token sees, itself included; None: all before it
    """
    if attention_mask is None:
        if softcap or position_ids is None or dropout:
            raise TypeError("attention with sinks needs positions, and has no soft cap and no dropout")
        output_HTD = attend_with_sinks(
            query[0],
            key[0],
            value[0],
            s_aux,
            segments=segments_of(position_ids),
            rows=segment_rows(position_ids),
            window=sliding_window,
            scale=scaling,
        )
        return output_HTD.transpose(0, 1)[None].contiguous(), None
    groups = query.shape[1] // key.shape[1]
    score_BHTN = (query @ repeat_kv(key, groups).mT).float() * scaling + attention_mask
    lse_BHT = torch.logaddexp(score_BHTN.logsumexp(-1), s_aux.float()[:, None])
    share_BHTN = nn.functional.dropout((score_BHTN - lse_BHT[..., None]).exp(), dropout).to(value.dtype)
    return (share_BHTN @ repeat_kv(value, groups)).transpose(1, 2).contiguous(), None


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *arguments: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    sinks: bool = False,
    **settings: Any,
) -> Tensor | None:
    """Return the mask of `sdpa`, or None if `attend_packed` needs none: full causal attention of one row.

    Layers with sliding windows or chunks (`local_size`), and custom masks of a model (`use_vmap`), keep their mask.

    sinks   return the mask for `attend_packed_with_sinks`: eager attention's, or None. A window needs none, as layers
            pass it to their attention; float32 on a GPU needs one, as the kernel does not take it
    """
    one_row = batch_size == 1 and q_length == kv_length and attention_mask is None and not use_vmap
    on_cpu = torch.device(settings.get("device", "cpu")).type == "cpu"
    if one_row and ((on_cpu or settings.get("dtype") != torch.float32) if sinks else local_size is None):
        return None
    return (eager_mask if sinks else sdpa_mask)(
        batch_size,
        q_length,
        kv_length,
        *arguments,
        attention_mask=attention_mask,
        local_size=local_size,
        use_vmap=use_vmap,
        **settings,
    )


def find_segments(position_T: Sequence[int] | np.ndarray) -> list[Segment]:
    """Cut a row into sequences, and responses behind the first tokens of one.

    >>> find_segments([0, 1, 2, 3, 2, 3, 4])  # a prompt of two tokens and a response, and a response behind it
    [Segment(length=4, source=0, prompt=0), Segment(length=3, source=0, prompt=2)]
    """
    position_T = np.asarray(position_T)
    starts = [0, *(np.flatnonzero(np.diff(position_T) <= 0) + 1).tolist()]
    segments, source = list[Segment](), 0
    for number, (start, end) in enumerate(pairwise([*starts, len(position_T)])):
        prompt = int(position_T[start]) if number else 0
        source = source if prompt else number
        segments.append(Segment(end - start, source, prompt))
    return segments


def segments_of(position_ids_1T: Tensor) -> list[Segment]:
    """Return the segments of a row; they are read from the device unless the host has them (`keep_segments`)."""
    segments = _segments_of.get(position_ids_1T)
    if segments is None:
        segments = find_segments(position_ids_1T[0].tolist())
        keep_segments(position_ids_1T, segments)
    return segments


def segment_rows(position_ids_1T: Tensor) -> SegmentRows:
    """Return where the segments of a row and the keys that they see begin, on the device of the positions."""
    rows = _rows_of.get(position_ids_1T)
    if rows is None:
        rows = SegmentRows.of_segments(segments_of(position_ids_1T), partial(upload, device=position_ids_1T.device))
        _rows_of[position_ids_1T] = rows
    return rows


def keep_segments(position_ids_1T: Tensor, segments: list[Segment]) -> None:
    """Remember the segments of a row that the host knows, so that no pass reads them from the device."""
    _segments_of[position_ids_1T] = segments


def sequence_of_each_token(position_ids: Tensor) -> Tensor | None:
    """Return a number for each token, equal within a sequence, for masks; None: the row is one sequence.

    To tell, transformers reads from the device once per pass; here nothing is read where the segments are known.
    With shared prompts: `[1, T, 3]`, of each token its segment, and the first and the end of the prompt rows it sees.
    """
    segments = _segments_of.get(position_ids)
    if segments is None:
        return _sequence_read(position_ids)
    if any(segment.prompt for segment in segments):
        first = np.cumsum([0, *(segment.length for segment in segments)])
        facts = [(n, first[one.source], first[one.source] + one.prompt) for n, one in enumerate(segments)]
        facts_T3 = np.repeat(np.array(facts), [segment.length for segment in segments], axis=0)
        return upload(torch.from_numpy(facts_T3), position_ids.device)[None]
    return (position_ids == 0).cumsum(-1) if len(segments) > 1 else None


def sees_sequence(sequence: Tensor) -> Any:
    """Return the mask function that shows a token its own sequence, and the prompt that it shares.

    sequence   by `sequence_of_each_token`. transformers' own function would cut responses off their prompt in silence
    """
    if sequence.ndim == 2:
        return _sees_own_sequence(sequence)
    segment_T, first_T, end_T = sequence[0].unbind(1)

    def sees(_batch: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        own = segment_T[query] == segment_T[key]
        return own | ((first_T[query] <= key) & (key < end_T[query]))

    return sees


_sees_own_sequence = masking_utils.packed_sequence_mask_function
_sequence_read = masking_utils.find_packed_sequence_indices


def can_attend_packed(model: nn.Module) -> bool:
    """Return whether `use_packed_attention` keeps what layers compute, also of a sequence behind another; collective.

    In evaluation mode. A family that does not pass positions on to its attention would attend across sequences.
    """
    loaded = cast(PreTrainedModel, model)
    own, packed = loaded.config._attn_implementation, packed_implementation(loaded)
    if own != {PACKED: "sdpa", PACKED_SINKS: "eager"}[packed]:
        return False
    with _layer_passes(loaded) as passes:
        last_logits(model, (2, range(LENGTH)))
    loaded.set_attn_implementation(packed)
    try:
        with _layer_passes(loaded, passes) as again:
            last_logits(model, (2, range(LENGTH)))
        rows = ((2, range(LENGTH)),), ((0, range(LENGTH)), (2, range(LENGTH)))
        changes = [_change_of_layer(*both) for both in zip(passes, again, strict=True)]
        kept_apart = (
            loaded.config._attn_implementation == packed
            and max(gather_json(max(changes))) <= NOISE[compute_dtype(model)]
            and same_logits(model, *(last_logits(model, *row) for row in rows))
            and not mixes_sequences(model)
        )
    except (TypeError, AttributeError, AssertionError):  # the mask is read (DeepSeek-V3.2), or there are no sinks
        kept_apart = False
    loaded.set_attn_implementation(own)
    return kept_apart


@contextmanager
def _layer_passes(
    model: PreTrainedModel, given: Sequence[tuple[Tensor, Tensor]] = ()
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield hidden states `[1, T, H]` before and after each decoder layer in a pass; of a model without them, logits.

    given   of another pass, whose inputs are fed to the layers: rounding would grow from layer to layer, to any size
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)] or [model]
    passes = list[tuple[Tensor, Tensor]]()

    def feed(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (given[len(passes)][0], *inputs[1:]) if given and inputs else None

    def keep(_layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        passes.append((inputs[0] if inputs else torch.zeros_like(first), first))

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(feed))
            hooks.enter_context(layer.register_forward_hook(keep))
        yield passes


def _change_of_layer(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Return the change of what a layer adds to a token, relative to its size: the median over tokens."""
    (before, after), (_, again) = one, other
    added_1T = (after - before).float().norm(dim=-1).clamp_min(1e-12)
    return float(((again - after).float().norm(dim=-1) / added_1T).median())


def use_packed_attention(model: nn.Module) -> None:
    """Make a model attend within each packed sequence; other inputs are unaffected."""
    loaded = cast(PreTrainedModel, model)
    loaded.set_attn_implementation(packed_implementation(loaded))


def packed_implementation(model: PreTrainedModel) -> str:
    """Return the attention that may replace a model's own.

    A family without `sdpa` that can use flash attention passes windows and, if it has any, sinks to its attention.
    """
    return PACKED_SINKS if model._supports_flash_attn and not model._supports_sdpa else PACKED


def can_share_prompts(model: nn.Module) -> bool:
    """Return whether a response has the same logits behind a prompt that others share as behind its own; collective.

    Not so where rows see each other by their place: state, convolutions, biases, masks of a family's own.
    """
    prompt, positions = (0, range(LENGTH)), range(LENGTH, 2 * LENGTH)
    apart = last_logits(model, prompt, (2, positions))
    beside = [last_logits(model, prompt, (other, positions), (2, positions)) for other in (1, 3)]
    return all(same_logits(model, apart, one) for one in beside)


def mixes_sequences(model: nn.Module) -> bool:
    """Return whether a sequence changes the logits of the next one in its row; collective."""
    one, other = (last_logits(model, (first, range(LENGTH)), (2, range(LENGTH))) for first in (0, 1))
    return not same_logits(model, one, other)


@torch.no_grad()
def last_logits(model: nn.Module, *sequences: tuple[int, Sequence[int]]) -> Tensor:
    """Return the logits `[tokens, vocabulary]` of the last of several sequences, packed in a row.

    sequences   number and positions of each
    """
    tokens_1T = probe_tokens(model, [number for number, _ in sequences])
    positions = [position for _, positions in sequences for position in positions]
    position_1T = torch.tensor([positions], device=tokens_1T.device)
    keep_segments(position_1T, find_segments(positions))
    output = model(input_ids=tokens_1T, position_ids=position_1T, use_cache=False)
    return output.logits[0, -LENGTH:].float()


def probe_tokens(model: nn.Module, numbers: Sequence[int]) -> Tensor:
    """Return the tokens `[1, T]` of sequences of `LENGTH`, each made from its number."""
    vocab_size = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    tokens_1T = torch.cat([torch.arange(LENGTH) + number * LENGTH for number in numbers])[None] % vocab_size
    return tokens_1T.to(next(model.parameters()).device)


def same_logits(model: nn.Module, left_TV: Tensor, right_TV: Tensor) -> bool:
    """Return whether the logits of two passes of a model differ by no more than rounding; collective."""
    return change_of(left_TV, right_TV) <= NOISE[compute_dtype(model)]


def change_of(left_TV: Tensor, right_TV: Tensor) -> float:
    """Return the change of the logits of a token, relative to their standard deviation, the largest of all ranks.

    Collective: all ranks then decide the same, and so run the same passes of a sharded model.
    """
    change_T = (left_TV - right_TV).abs().amax(dim=1)
    # The median: a few tokens may change their expert by rounding, and then their logits.
    return float(np.max(gather_json(float(change_T.median() / left_TV.std()))))


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's forward pass, which mixed precision of FSDP makes narrower than its weights."""
    narrow = model._get_fsdp_state()._mp_policy.param_dtype if isinstance(model, FSDPModule) else None
    return narrow or cast(PreTrainedModel, model).dtype


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


masking_utils.find_packed_sequence_indices = sequence_of_each_token
masking_utils.packed_sequence_mask_function = sees_sequence
AttentionInterface.register(PACKED, attend_packed)
AttentionMaskInterface.register(PACKED, packed_mask)
AttentionInterface.register(PACKED_SINKS, attend_packed_with_sinks)
AttentionMaskInterface.register(PACKED_SINKS, partial(packed_mask, sinks=True))
