"""AdamW with moments of 8 bits in blocks of 256 values, by torchao (`update.optimizer="adamw8bit"`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from relibra.errors import ConfigError
from relibra.rl.model.local_shards import local_shard, sharded_like

BLOCK = 256


def make_adamw_8bit(
    parameters: Sequence[nn.Parameter], learning_rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """Return torchao's AdamW8bit, without weight decay.

    Moments are quantized where each row of their parameter is whole blocks, so that rows of experts can move, and other
    numbers of ranks can read a checkpoint; those of biases and norms, for example, stay in float32.

    raises    ConfigError if torchao is not installed
    """
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ConfigError(
            "update.optimizer 'adamw8bit' needs the package torchao: pip install -e '.[eight-bit]', or set "
            "update.optimizer=adamw"
        ) from error

    class BlockAdamW8bit(AdamW8bit):  # type: ignore[misc]
        def zeros(self, parameter: Tensor, key: str) -> Tensor:
            own = local_shard(parameter.detach())
            if own.ndim < 2 or own.shape[1:].numel() % BLOCK or not own.numel():
                return torch.zeros_like(parameter.detach())
            state = OptimState8bit.zeros(own.shape, key == "exp_avg", BLOCK, own.device, dtype=own.dtype)
            return sharded_like(state, parameter)

        def step(self, closure: Any = None) -> None:
            with torch.compiler.set_stance("force_eager"):  # one graph per shape would take a minute to compile
                super().step(closure)

    optimizer = BlockAdamW8bit(list(parameters), lr=learning_rate, betas=betas, weight_decay=0.0)
    for parameter in parameters:  # before the first step, which would quantize by the size of the shard
        moments = {key: optimizer.zeros(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter].update({"step": torch.tensor(0.0), **moments})
    return optimizer


def blocks_of(state: Tensor) -> dict[str, Tensor]:
    """Return the tensors `codes [X, ...]` and `scale [X, blocks]` of a quantized moment, which share its memory.

    Empty for any other tensor.
    """
    own = local_shard(state)
    codes, scale = getattr(own, "codes", None), getattr(own, "scale", None)
    if codes is None or scale is None:
        return {}
    blocks = state.shape[1:].numel() // BLOCK
    return {
        "codes": sharded_like(codes, state),
        "scale": sharded_like(scale.view(-1, blocks), state, shape=(state.shape[0], blocks)),
    }
