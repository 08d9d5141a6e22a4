"""Log-prob and entropy of tokens from hidden states, in chunks of rows: logits of all rows are never there at once.

The output head of the model computes scores in place of logits, so that FSDP gathers its weight as in any pass. Some
models change logits after their head (Gemma caps them, Granite and Cohere scale them): `learn_logits` finds out when a
model is loaded. Where it is another change, scores are computed from whole logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from relibra.parallel.homes.logical_order import reshard
from relibra.rl.model.packed_sequences import probe_tokens

CHUNK_BYTES = 1 << 28
"""Of the logits of one chunk in float32; a backward pass holds three such tensors. Smaller chunks add the gradient of
the head's weight to its sum more often."""

_LEARNED = "_relibra_logits"
"""Attribute of a model: its `LogitChange`, or None."""


@dataclass(frozen=True, eq=False)
class TokenScores:
    """What a policy says about tokens, at its temperature, with gradients; float32 or better.

    log_probs_X   log-probability of each
    entropy_X     of the policy's distribution there, in nats
    """

    log_probs_X: Float[Tensor, " X"]
    entropy_X: Float[Tensor, " X"]


@dataclass(frozen=True)
class LogitChange:
    """What a model does to the output z of its head: factor x z, and with a cap c then c tanh(z / c)."""

    factor: float = 1.0
    cap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the logits."""
        logits = raw if self.factor == 1 else raw * self.factor
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


def token_scores(
    model: nn.Module,
    tokens_1T: Int[Tensor, "1 T"],
    position_1T: Int[Tensor, "1 T"],
    row_X: Int[Tensor, " X"],
    target_X: Int[Tensor, " X"],
    temperature: float,
) -> TokenScores:
    """Return the scores of tokens (one or more), each predicted by the output of a row; collective.

    The tensors are on the device of the model.

    position_1T   restart at 0 with each packed sequence
    """
    inputs = {"input_ids": tokens_1T, "position_ids": position_1T, "use_cache": False, "logits_to_keep": row_X}
    change: LogitChange | None = getattr(model, _LEARNED, None)
    if change is None:
        return score_logits(model(**inputs).logits[0], target_X, temperature)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    entropies = list[Tensor]()

    def score(hidden_1XH: Tensor) -> Tensor:
        log_probs_1X1, entropy_X = score_rows(hidden_1XH[0], head.weight, head.bias, target_X, change, temperature)
        entropies.append(entropy_X)
        return log_probs_1X1

    with _head_output_returned(model, head, score):
        log_probs_1X1 = model(**inputs).logits
    return TokenScores(log_probs_1X1[0, :, 0], entropies[0])


def score_logits(logits_XV: Float[Tensor, "X V"], target_X: Int[Tensor, " X"], temperature: float) -> TokenScores:
    """Return the scores of tokens from whole logits; other tensors of their size are there in chunks only."""
    log_probs_1X1, entropy_X = score_rows(logits_XV, None, None, target_X, LogitChange(), temperature)
    return TokenScores(log_probs_1X1[0, :, 0], entropy_X)


def score_rows(
    hidden_XH: Float[Tensor, "X H"],
    weight_VH: Float[Tensor, "V H"] | None,
    bias_V: Float[Tensor, " V"] | None,
    target_X: Int[Tensor, " X"],
    change: LogitChange,
    temperature: float,
) -> tuple[Float[Tensor, "1 X 1"], Float[Tensor, " X"]]:
    """Return log-probs, shaped as logits are, and entropies, from hidden states and a head. No weight: from logits.

    A backward pass computes the logits again, chunk by chunk.
    """
    return _ScoreRows.apply(hidden_XH, weight_VH, bias_V, target_X, change, float(temperature))


@contextmanager
def _head_output_returned(model: nn.Module, head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the head compute another function, and the model return its result as logits, whatever it does to logits.

    Hooks of FSDP see the same tensor: they gather the weight for the backward pass when gradients reach it.
    """
    kept = list[Tensor]()

    def keep(_head: nn.Module, _args: Any, output: Tensor) -> None:  # behind FSDP's hook on the head
        kept.append(output)

    def give_back(_model: nn.Module, _args: Any, output: Any) -> Any:  # before FSDP's hook on the model
        output.logits = kept.pop()
        return output

    hooks = head.register_forward_hook(keep), model.register_forward_hook(give_back, prepend=True)
    with hooks[0], hooks[1], patch.object(head, "forward", forward):
        yield


@torch.no_grad()
def learn_logits(model: nn.Module) -> LogitChange | None:
    """Learn what a model does to the output of its head, from a pass in which the head returns chosen numbers.

    Collective. `token_scores` then needs no logits; None: the model does something else, or its head is no linear layer
    that runs once, on the rows that are kept.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    change = None
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head):
        raw = list[Tensor]()

        def ramp(hidden_1XH: Tensor) -> Tensor:
            rows, vocab_size = hidden_1XH.shape[1], len(head.weight)
            numbers = torch.linspace(-50.0, 50.0, rows * vocab_size, device=hidden_1XH.device)
            numbers[0], numbers[1] = _SMALL, _LARGE
            raw.append(numbers.view(1, rows, vocab_size))
            return raw[-1]

        tokens_1T = probe_tokens(model, [0])
        position_T = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)
        with patch.object(head, "forward", ramp):
            logits = model(
                input_ids=tokens_1T, position_ids=position_T[None], use_cache=False, logits_to_keep=position_T[1:3]
            ).logits
        if len(raw) == 1 and raw[0].shape[1] == 2:
            change = _change_between(raw[0], logits)
    setattr(model, _LEARNED, change)
    reshard(model)  # FSDP keeps the root's weights whole after a pass, and an optimizer would get these
    return change


_SMALL, _LARGE = 2.0**-20, 1e30
"""Outputs of a head whose logits show the factor, and the cap."""


def _change_between(raw: Tensor, logits: Tensor) -> LogitChange | None:
    """Return the change that turns the output of a head into these logits, up to rounding; None: there is none."""
    if logits.shape != raw.shape:
        return None
    small, large = logits.flatten()[:2].tolist()
    factor = small / _SMALL
    change = LogitChange(1.0 if abs(factor - 1) < 1e-6 else factor, large if 0 < large < 1e20 else None)
    return change if torch.allclose(change(raw), logits.to(raw.dtype), rtol=5e-7, atol=0) else None


class _ScoreRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_XH: Tensor,
        weight_VH: Tensor | None,
        bias_V: Tensor | None,
        target_X: Tensor,
        change: LogitChange,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs [1, X, 1], shaped as logits are, and entropies [X]."""
        ctx.save_for_backward(hidden_XH, weight_VH, bias_V, target_X)
        ctx.change, ctx.temperature = change, temperature
        ctx.set_materialize_grads(False)
        num_rows, dtype = len(hidden_XH), torch.promote_types(hidden_XH.dtype, torch.float32)
        log_probs_1X1 = hidden_XH.new_empty((1, num_rows, 1), dtype=dtype)
        entropy_X = hidden_XH.new_empty(num_rows, dtype=dtype)
        for rows in _chunks(hidden_XH, weight_VH):
            logits_CV = _logits(hidden_XH[rows], weight_VH, bias_V, change)
            log_probs_CV = _tempered(logits_CV, temperature).log_softmax(-1)
            log_probs_1X1[0, rows] = log_probs_CV.gather(-1, target_X[rows, None])
            entropy_X[rows] = log_probs_CV.exp().mul_(log_probs_CV).sum(-1).neg_()
        return log_probs_1X1, entropy_X

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1X1: Tensor | None, grad_entropy_X: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute logits again, chunk by chunk; sums of the weight's gradient are in float32 or better."""
        hidden_XH, weight_VH, bias_V, target_X = ctx.saved_tensors
        change, scale = ctx.change, ctx.change.factor / ctx.temperature
        sums: dict[str, Any] = {"dtype": torch.promote_types(hidden_XH.dtype, torch.float32)}
        grad_hidden_XH = torch.empty_like(hidden_XH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = torch.zeros_like(weight_VH, **sums) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, **sums) if ctx.needs_input_grad[2] else None
        for rows in _chunks(hidden_XH, weight_VH):
            logits_CV = _logits(hidden_XH[rows], weight_VH, bias_V, change)
            tempered_CV = _tempered(logits_CV, ctx.temperature)
            by_row_C1 = tempered_CV.new_zeros(()) if grad_1X1 is None else grad_1X1[0, rows] * scale
            if grad_entropy_X is None:
                grad_CV = tempered_CV.softmax(-1).mul_(-by_row_C1)
            else:  # of the entropy: - p (log p + entropy)
                log_probs_CV = tempered_CV.log_softmax(-1)
                grad_CV = log_probs_CV.exp()
                entropy_C1 = -(grad_CV * log_probs_CV).sum(-1, keepdim=True)
                log_probs_CV.add_(entropy_C1).mul_(grad_entropy_X[rows, None] * scale)
                grad_CV.mul_(log_probs_CV.add_(by_row_C1)).neg_()
            grad_CV.scatter_add_(-1, target_X[rows, None], by_row_C1.expand(len(grad_CV), 1))
            if change.cap is not None:
                grad_CV.mul_(1 - (logits_CV / change.cap).square())
            grad_CV = grad_CV.to(hidden_XH.dtype)
            if grad_hidden_XH is not None:
                grad_hidden_XH[rows] = grad_CV if weight_VH is None else grad_CV @ weight_VH
            if grad_weight_VH is not None:
                _add_product(grad_weight_VH, grad_CV.T, hidden_XH[rows])
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        return grad_hidden_XH, _as(grad_weight_VH, weight_VH), _as(grad_bias_V, bias_V), None, None, None


def _chunks(hidden_XH: Tensor, weight_VH: Tensor | None) -> Sequence[slice]:
    """Return rows whose logits take at most `CHUNK_BYTES`, at least one; the same cut whatever the rows hold."""
    vocab_size = hidden_XH.shape[1] if weight_VH is None else len(weight_VH)
    size = max(1, CHUNK_BYTES // (4 * vocab_size))
    return [slice(start, start + size) for start in range(0, len(hidden_XH), size)]


def _logits(hidden_CH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, change: LogitChange) -> Tensor:
    """Return logits in float32 or better; the product is computed in the type of the hidden states."""
    raw_CV = hidden_CH if weight_VH is None else nn.functional.linear(hidden_CH, weight_VH, bias_V)
    return change(raw_CV.to(torch.promote_types(raw_CV.dtype, torch.float32)))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product to a sum, which may have a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _as(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)
