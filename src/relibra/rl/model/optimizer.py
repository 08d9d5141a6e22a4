"""AdamW over sharded parameters, learning-rate warm-up, and clipping of the global gradient norm."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.rl.config.settings import UpdateSettings
from relibra.rl.model.adamw_8bit import make_adamw_8bit
from relibra.rl.model.host_adamw import HostAdamW
from relibra.rl.model.local_shards import are_alike, local_shard

BETAS = (0.9, 0.95)
MOST_SKIPPED = 5
"""Optimizer steps in a row that may be skipped; one more ends the run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepCount:
    """Steps of one optimizer.

    rl_step            RL step under way, for messages
    made               optimizer steps made so far
    skipped_in_a_row   skipped since the last one that was made
    """

    rl_step: int = 0
    made: int = 0
    skipped_in_a_row: int = 0


def make_optimizer(
    model: nn.Module, learning_rate: float, update: UpdateSettings | None = None
) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters of a model, without weight decay.

    update    says what moments are, and where; None: float32, on the device
    raises    ConfigError if a package for moments of 8 bits is missing, EngineError if host memory cannot be locked
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if update is not None and update.optimizer == "adamw8bit":
        return make_adamw_8bit(trained, learning_rate, BETAS)
    if update is not None and update.offload != "off":
        return HostAdamW(trained, learning_rate, BETAS)
    fused = are_alike(trained)
    return torch.optim.AdamW(trained, lr=learning_rate, betas=BETAS, weight_decay=0.0, foreach=False, fused=fused)


def new_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> Tensor:
    """Return a moment of a parameter before the first step: zeros, on the device where the optimizer keeps it."""
    zeros = getattr(optimizer, "zeros", None)
    return zeros(parameter, key) if zeros else torch.zeros_like(parameter.detach())


def set_learning_rate(optimizer: torch.optim.Optimizer, base: float, made: int, warmup_steps: int) -> None:
    """Set the learning rate of the next optimizer step.

    base           learning rate after `warmup_steps`: `update.learning_rate`, or `critic.learning_rate`
    made           optimizer steps made so far
    warmup_steps   steps over which the rate rises linearly; the last of them uses `base`
    """
    rate = base * min(1.0, (made + 1) / max(1, warmup_steps))
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # torchao reads the same tensor in each step
        else:
            group["lr"] = rate


def step_or_skip(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    count: StepCount,
    update: UpdateSettings,
    *,
    learning_rate: float,
    name: str,
) -> tuple[StepCount, float | None]:
    """Make an optimizer step with clipped gradients, or skip it where they are not finite; collective.

    learning_rate   after `update.lr_warmup_steps`
    name            of the model, for messages
    returns         counts after it, and the norm of the gradient before clipping; None: skipped, on all ranks
    raises          EngineError, on all ranks, after more than MOST_SKIPPED skipped steps in a row
    """
    norm = clip_gradients(model.parameters(), update.max_grad_norm)
    if not math.isfinite(norm):
        count = replace(count, skipped_in_a_row=count.skipped_in_a_row + 1)
        what = f"step {count.rl_step}: the gradient of the {name} has the norm {norm}"
        if count.skipped_in_a_row > MOST_SKIPPED:
            raise not_finite(f"{what}, {count.skipped_in_a_row} times in a row")
        if dist.get_rank() == 0:
            _log.warning("%s: optimizer step %d is skipped, the weights are unchanged", what, count.made)
        optimizer.zero_grad(set_to_none=True)
        return count, None
    set_learning_rate(optimizer, learning_rate, count.made, update.lr_warmup_steps)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return replace(count, made=count.made + 1, skipped_in_a_row=0), norm


def not_finite(what: str) -> EngineError:
    """Return the error that ends a run whose gradients are not finite."""
    return EngineError(
        f"{what}: the weights are unchanged; resume from the last checkpoint with a lower learning rate "
        "(update.learning_rate, critic.learning_rate) or float32 (model.dtype)"
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale gradients down to a global norm over all ranks, and return the norm before scaling; collective.

    torch's `clip_grad_norm_` cannot mix the meshes of dense and expert parameters. Every shard is on exactly one rank,
    so the squared norm is the sum of local squares over ranks. Where it is not finite, nothing is scaled.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [local_shard(gradient) for gradient in gradients]
    device = local[0].device if local else torch.device("cpu")
    total = torch.zeros((), device=device, dtype=torch.float64)
    for gradient in local:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    dist.all_reduce(total)
    norm = float(total.sqrt().float())  # rounded to float32: the same for every map of experts to ranks
    if math.isfinite(norm) and norm > max_norm:
        for gradient in local:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm
