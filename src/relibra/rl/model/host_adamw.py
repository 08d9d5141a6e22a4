"""`HostAdamW`: AdamW whose moments are in host memory, and on the device one piece of a parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from relibra.rl.model.host_memory import CopyStream, host_memory
from relibra.rl.model.local_shards import are_alike, local_shard, sharded_like

PIECE_VALUES = 1 << 23
"""Most values of a parameter that are stepped at once: 32 MiB of each moment, twice on the device."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.AdamW):
    """AdamW, bit for bit, without weight decay, for parameters in float32.

    Moments come to the device and go back beside the kernels of other pieces, and gradients are dropped one by one: a
    step needs weights, gradients and four buffers of PIECE_VALUES, and lasts as long as copying 8 bytes per weight.
    State: `exp_avg` and `exp_avg_sq` in host memory, sharded as the parameter, which `relocate` and checkpoints read
    and write in place; `step` where the kernels read it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], learning_rate: float, betas: tuple[float, float]) -> None:
        self._device = local_shard(parameters[0]).device
        fused = are_alike(parameters)
        super().__init__(parameters, lr=learning_rate, betas=betas, weight_decay=0.0, foreach=False, fused=fused)
        ends = list(accumulate(2 * local_shard(parameter).numel() for parameter in parameters))
        self._start = dict(zip(parameters, [0, *ends], strict=False))
        self._memory = host_memory(4 * ends[-1], self._device)

    def zeros(self, parameter: Tensor, key: str) -> Tensor:
        """Return the place of a moment in host memory, filled with zeros."""
        own = local_shard(parameter)
        start = self._start[parameter] + MOMENTS.index(key) * own.numel()  # type: ignore[index]
        values = self._memory.view(torch.float32)[start : start + own.numel()]
        return sharded_like(values.view(own.shape).zero_(), parameter)

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters with a gradient, and drop the gradients; return when the moments are on the host."""
        inward, outward = CopyStream(self._device), CopyStream(self._device)
        shards = [local_shard(parameter) for parameter in self._start]
        width = max(min(own.numel(), PIECE_VALUES) if own.is_contiguous() else own.numel() for own in shards)
        buffers = [torch.empty(2, width, device=self._device) for _ in range(2)]
        free, number = [inward.kernels_end()] * 2, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                count = self._state_of(parameter)["step"]
                for weight, gradient, *on_host in self._pieces(parameter):
                    now = number % 2
                    moments = [buffer[: weight.numel()].view(weight.shape) for buffer in buffers[now]]
                    inward.kernels_wait(inward.copy(zip(moments, on_host, strict=True), after=free[now]))
                    _step_piece(weight, gradient, moments, count.clone(), group)
                    free[now] = outward.copy(zip(on_host, moments, strict=True), after=outward.kernels_end())
                    number += 1
                count += 1
                parameter.grad = None
        outward.synchronize()

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=self._device)
            state |= {key: self.zeros(parameter, key) for key in MOMENTS}
        return state

    def _pieces(self, parameter: nn.Parameter) -> Iterator[list[Tensor]]:
        """Yield weight, gradient and moments of each piece of a parameter; weight and moments are views."""
        own, state = local_shard(parameter.detach()), self.state[parameter]
        tensors = [own, local_shard(parameter.grad), *(local_shard(state[key]) for key in MOMENTS)]  # type: ignore[arg-type]
        if not own.is_contiguous():
            yield tensors
        elif own.numel():
            yield from zip(*(tensor.reshape(-1).split(PIECE_VALUES) for tensor in tensors), strict=True)


def _step_piece(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], count: Tensor, group: dict) -> None:
    exp_avg, exp_avg_sq = moments
    beta1, beta2 = group["betas"]
    adamw(
        *([weight], [gradient], [exp_avg], [exp_avg_sq], [], [count]),
        foreach=False,
        fused=group["fused"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
