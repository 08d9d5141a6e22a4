"""Attention with sinks (gpt-oss) over packed sequences: a learned score of each head takes weight and has no value.

With `lse`, the log-sum-exp of a query's scores, and the sink s of the head, L = log(exp(lse) + exp(s)): the output is
that of attention without sinks times exp(lse - L). Flash attention returns output and lse. Its backward pass makes
probabilities exp(score - L) from whatever it gets as lse, so given the scaled output and L it returns the gradients of
attention with sinks. That of s is -sum exp(s - L) (dy . y) over the queries, with y the output and dy its gradient.
No scores are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 512
"""Most tokens of a block. CPU kernels have no windows: sequences longer than one, or with a shared prompt, are cut."""
_aten = torch.ops.aten


class Segment(NamedTuple):
    """Consecutive rows of packed sequences: one sequence, or a response behind a shared prompt.

    length   rows
    source   number of the segment whose first rows are this one's prompt; its own number: it begins a sequence
    prompt   rows of that prompt; 0: it begins a sequence
    """

    length: int
    source: int
    prompt: int


class SegmentRows(NamedTuple):
    """Where segments are, on the device.

    offsets        int32 `[segments + 1]`: where each begins, and T
    key_offsets    where the keys of each begin (its prompt's, then its own), and how many there are
    key_rows       int64, row of each such key; None: every segment sees its own rows alone
    """

    offsets: Tensor
    key_offsets: Tensor
    key_rows: Tensor | None

    @classmethod
    def of_segments(cls, segments: Sequence[Segment], put: Callable[[Tensor], Tensor]) -> SegmentRows:
        """Return the rows of segments.

        put   copies a tensor to the device
        """
        starts = [0, *accumulate(segment.length for segment in segments)]
        offsets = put(torch.tensor(starts, dtype=torch.int32))
        if not any(segment.prompt for segment in segments):
            return cls(offsets, offsets, None)
        rows = [
            torch.cat([torch.arange(one.prompt) + starts[one.source], torch.arange(one.length) + start])
            for one, start in zip(segments, starts, strict=False)
        ]
        ends = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32)
        return cls(offsets, put(ends), put(torch.cat(rows)))


def attend_with_sinks(
    query_HTD: Tensor,
    key_GTD: Tensor,
    value_GTD: Tensor,
    sink_H: Tensor,
    *,
    segments: Sequence[Segment],
    rows: SegmentRows,
    window: int | None,
    scale: float,
) -> Tensor:
    """Return causal attention `[H, T, D]` within each segment; each head of keys is for H / G heads of queries.

    On a GPU in half precision, with D = 8, 16, ... 256.

    segments   T rows together
    rows       of the segments; read on a GPU only
    window     tokens that a query sees, its own included; None: all up to its own
    """
    lengths = [segment.length for segment in segments]
    longest = max(segment.prompt + segment.length for segment in segments)
    window = longest if window is None else min(window, longest)
    if query_HTD.device.type != "cpu":
        kernel = _GpuKernel(
            sequences=(rows.offsets, rows.key_offsets, max(lengths), longest, 0.0, window == longest),
            settings={
                "scale": scale,
                "window_size_left": -1 if window == longest else window - 1,
                "window_size_right": 0,
            },
        )
        if rows.key_rows is not None:
            key_GTD, value_GTD = key_GTD[:, rows.key_rows], value_GTD[:, rows.key_rows]
        return _SinkAttention.apply(query_HTD, key_GTD, value_GTD, sink_H, kernel)
    groups, parts = query_HTD.shape[0] // key_GTD.shape[0], list[Tensor]()
    all_HTD = (query_HTD, *(one.repeat_interleave(groups, 0) for one in (key_GTD, value_GTD)))
    apart = list(zip(*(one.split(lengths, 1) for one in all_HTD), strict=True))
    for own, (length, source, prompt) in zip(apart, segments, strict=True):
        block = length if length <= window and not prompt else min(window, BLOCK)
        blocks, before = list(zip(*(one.split(block, 1) for one in own), strict=True)), -(-(window - 1) // block)
        shown = list(zip(*(one[:, :prompt].split(block, 1) for one in apart[source]), strict=True)) if prompt else []
        before += prompt % block > 0  # the last block of the prompt may be smaller
        for i, (query_HnD, _, _) in enumerate(blocks, start=len(shown)):  # each sees itself and `before` blocks
            seen = [*shown, *blocks][max(0, i - before) : i + 1]
            key_HnD, value_HnD = (torch.cat([one[j] for one in seen], 1) for j in (1, 2))
            mask = _window_mask(query_HnD.shape[1], key_HnD.shape[1], window, query_HnD.dtype) if i else None
            parts.append(_SinkAttention.apply(query_HnD, key_HnD, value_HnD, sink_H, _CpuKernel(mask, scale)))
    return torch.cat(parts, dim=1)


def _window_mask(queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores `[queries, keys]`, which end at the same token: 0, or -inf for unseen keys."""
    before = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(before).triu(before - window + 1)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(~seen, float("-inf"))


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor, kernel: _CpuKernel | _GpuKernel
    ) -> Tensor:
        out, lse_HT, *ctx.random_state = kernel.attend(query, key, value)
        total_HT = torch.logaddexp(lse_HT, sink_H.float()[:, None])
        out.mul_((lse_HT - total_HT).exp()[..., None])
        ctx.save_for_backward(query, key, value, out, total_HT, sink_H)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total_HT, sink_H = ctx.saved_tensors
        share_HT = (sink_H.float()[:, None] - total_HT).exp()
        sink_grad_H = -(share_HT * (grad.float() * out).sum(-1)).sum(1).to(sink_H.dtype)
        grads = ctx.kernel.gradients(grad, query, key, value, out, total_HT, *ctx.random_state)
        return *grads, sink_grad_H, None


class _CpuKernel(NamedTuple):
    """Attention of one sequence: causal, or with a mask that is added to the scores."""

    mask: Tensor | None
    scale: float

    def attend(self, *inputs: Tensor) -> list[Tensor]:
        return self._call(_aten._scaled_dot_product_flash_attention_for_cpu, inputs)

    def gradients(self, *inputs: Tensor) -> list[Tensor]:
        return self._call(_aten._scaled_dot_product_flash_attention_for_cpu_backward, inputs)

    def _call(self, kernel: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        batch = (one[None] for one in inputs)
        return [one[0] for one in kernel(*batch, 0.0, self.mask is None, attn_mask=self.mask, scale=self.scale)]


class _GpuKernel(NamedTuple):
    """Attention of all sequences; tokens come before heads."""

    sequences: tuple[Any, ...]
    settings: dict[str, Any]

    def attend(self, *inputs: Tensor) -> list[Tensor]:
        rows = (one.transpose(0, 1) for one in inputs)
        out, *others = _aten._flash_attention_forward(*rows, *self.sequences, False, **self.settings)
        return [out.transpose(0, 1), *others[:3]]

    def gradients(self, *inputs: Tensor) -> list[Tensor]:
        rows, (lse, *random_state) = (one.transpose(0, 1) for one in inputs[:5]), inputs[5:]
        found = _aten._flash_attention_backward(*rows, lse, *self.sequences, *random_state, **self.settings)
        return [one.transpose(0, 1) for one in found]
