"""The experts of one rank as grouped matrix products, forward and backward, checked against float64 and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from relibra.errors import EngineError

Work = Callable[[], tuple[Tensor, ...]]
"""Forward and backward once: output, then gradients of rows, gate_up and down; nothing where there are no rows."""

ERROR_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest norm of the error over the norm of the float64 result, of the output and of each gradient.

bfloat16 keeps 8 bits, so one rounding costs about 2e-3 in this norm, and several lie on the way to a gradient: together
4e-3 where products are added up in float32.
"""

CHECK_COUNTS = (130, 0, 1, 17, 64)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedExperts:
    """Gated experts down(silu(gate x) * up x), and rows and output gradients for as many token-slots as a rank gets.

    Ranks that are emulated one after another share all of it: which values they multiply changes no time.
    """

    gate_up_GWH: Float[Tensor, "G W H"]
    down_GHF: Float[Tensor, "G H F"]
    rows_NH: Float[Tensor, "N H"]
    gradient_NH: Float[Tensor, "N H"]

    def work(self, counts_I: Sequence[int]) -> Work:
        """Prepare one rank's work: instance i of the rank multiplies `counts_I[i]` rows.

        Instances without rows are left out: they need no product, and their gradients are zero anyway.
        """
        counts = [count for count in counts_I if count]
        groups, rows = len(counts), sum(counts)
        assert groups <= len(self.gate_up_GWH), f"{groups} instances, made for {len(self.gate_up_GWH)}"
        assert rows <= len(self.rows_NH), f"{rows} rows, made for {len(self.rows_NH)}"
        if not counts:
            return tuple
        ends_G = torch.tensor(counts).cumsum(0).to(self.rows_NH.device, torch.int32)
        taken = (self.rows_NH[:rows], self.gate_up_GWH[:groups], self.down_GHF[:groups])
        leaves = [part.detach().requires_grad_() for part in taken]
        gradient_NH = self.gradient_NH[:rows]

        def run() -> tuple[Tensor, ...]:
            output_NH = _forward(leaves[0], leaves[1], leaves[2], ends_G)
            return (output_NH, *torch.autograd.grad(output_NH, leaves, gradient_NH))

        return run

    def check(self, counts_I: Sequence[int] = CHECK_COUNTS) -> float:
        """Return the largest relative error of output and gradients against float64, expert by expert.

        raises    EngineError above ERROR_BOUNDS: such a product must not be timed
        """
        counts_I = [count for count in counts_I if count][: len(self.gate_up_GWH)]
        bound = ERROR_BOUNDS[self.rows_NH.dtype]
        pairs = zip(self.work(counts_I)(), self._in_float64(counts_I), strict=True)
        errors = torch.stack([(found.detach().double() - exact).norm() / exact.norm() for found, exact in pairs])
        worst = float(errors.max())
        if not worst <= bound:  # also when it is not a number
            raise EngineError(
                f"grouped experts of shape {tuple(self.gate_up_GWH.shape)} on {self.rows_NH.device} in "
                f"{self.rows_NH.dtype} are off by {worst:.1e} relative to float64, allowed is {bound:.0e}: nothing is "
                "timed, try another build of torch"
            )
        return worst

    def _in_float64(self, counts_I: Sequence[int]) -> tuple[Tensor, ...]:
        rows, groups = sum(counts_I), len(counts_I)
        taken = (self.rows_NH[:rows], self.gate_up_GWH[:groups], self.down_GHF[:groups])
        leaves = [part.detach().double().requires_grad_() for part in taken]
        outputs = []
        for x_NH, gate_up_WH, down_HF in zip(leaves[0].split(list(counts_I)), leaves[1], leaves[2], strict=True):
            gate_NF, up_NF = (x_NH @ gate_up_WH.T).chunk(2, dim=-1)
            outputs.append((functional.silu(gate_NF) * up_NF) @ down_HF.T)
        output_NH = torch.cat(outputs)
        return (output_NH.detach(), *torch.autograd.grad(output_NH, leaves, self.gradient_NH[:rows].double()))


def _forward(rows_NH: Tensor, gate_up_GWH: Tensor, down_GHF: Tensor, ends_G: Tensor) -> Tensor:
    gate_up_NW = functional.grouped_mm(rows_NH, gate_up_GWH.transpose(-2, -1), offs=ends_G)
    gate_NF, up_NF = gate_up_NW.chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate_NF) * up_NF, down_GHF.transpose(-2, -1), offs=ends_G)


def grouped_experts(
    groups: int, rows: int, hidden: int, width: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> GroupedExperts:
    """Draw experts and rows of unit scale; room for the check's rows is always there."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = max(rows, sum(CHECK_COUNTS))

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, generator=generator).mul_(scale)

    return GroupedExperts(
        gate_up_GWH=draw(groups, 2 * width, hidden, scale=hidden**-0.5),
        down_GHF=draw(groups, hidden, width, scale=width**-0.5),
        rows_NH=draw(rows, hidden),
        gradient_NH=draw(rows, hidden),
    )


def bytes_needed(groups: int, rows: int, hidden: int, width: int, dtype: torch.dtype) -> int:
    """Bound the bytes of a rank's forward and backward: weights and their gradients, and what autograd keeps.

    Per row: rows, output, their gradients and one to spare; gate_up with its gradient, silu, product and theirs.
    """
    weights = 2 * groups * 3 * hidden * width
    return (weights + rows * (5 * hidden + 9 * width)) * dtype.itemsize


def seconds_each(works: Sequence[Work], device: torch.device) -> list[float]:
    """Run pieces of work one after another and return the seconds of each.

    On a GPU its own clock counts. On a CPU it is this thread's processor time: of other programs on the machine only
    what they do to caches and clock rates is in it.
    """
    if device.type == "cpu":
        assert torch.get_num_threads() == 1, "processor time of this thread is all there is with one thread only"
        seconds = []
        for work in works:
            start = time.thread_time()
            work()
            seconds.append(time.thread_time() - start)
        return seconds
    torch.cuda.synchronize(device)
    works[0]()  # once more: while it runs the host gets ahead, so that no launch is waited for below
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
    marks[0].record()
    for work, mark in zip(works, marks[1:], strict=True):
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
