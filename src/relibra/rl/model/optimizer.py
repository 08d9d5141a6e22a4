"""AdamW over sharded parameters, learning-rate warm-up, and clipping of the global gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from relibra.errors import EngineError

BETAS = (0.9, 0.95)


def make_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW over the parameters of a model; no weight decay for norms, biases and other vectors.

    `foreach=False`, because parameters of dense layers and of experts are on different device meshes.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decaying = [parameter for name, parameter in trained if _decays(name, parameter)]
    others = [parameter for name, parameter in trained if not _decays(name, parameter)]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, foreach=False)


def set_learning_rate(optimizer: torch.optim.Optimizer, base: float, step: int, warmup_steps: int) -> float:
    """Set the learning rate of the next optimizer step, and return it.

    base           learning rate after the warm-up: `update.learning_rate`, or `critic.learning_rate`
    step           optimizer steps made so far
    warmup_steps   steps over which the rate rises linearly; the last of them uses `base`
    """
    rate = base * min(1.0, (step + 1) / max(1, warmup_steps))
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, *, what: str = "the gradient") -> float:
    """Scale gradients down to a global norm over all ranks, and return the norm before scaling; collective.

    torch's `clip_grad_norm_` cannot mix the meshes of dense and expert parameters. Every shard is on exactly one rank,
    so the squared norm is the sum of local squares over ranks.

    what     for the error message, such as "the policy's gradient in step 3, mini-batch 2"
    raises   EngineError, on all ranks, if the norm is not finite: an optimizer step would destroy the weights, and
             skipping it would hide the cause
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    device = local[0].device if local else torch.device("cpu")
    total = torch.zeros((), device=device, dtype=torch.float64)
    for gradient in local:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    dist.all_reduce(total)
    norm = float(total.sqrt().float())  # rounded to float32: the same for every map of experts to ranks
    if not math.isfinite(norm):
        raise EngineError(
            f"{what} has the norm {norm}: the weights are unchanged; resume from the last checkpoint with a lower "
            "learning rate (update.learning_rate, critic.learning_rate) or float32 (model.dtype)"
        )
    if norm > max_norm:
        for gradient in local:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim > 1 and not name.endswith("bias")  # biases of experts are matrices: one row per expert
