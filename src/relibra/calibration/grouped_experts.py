"""`GroupedExperts`: experts of one rank as grouped matrix products, checked against float64 and timed."""

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
"""Runs forward and backward once; returns output and gradients of rows, gate_up and down, or () without rows."""

ERROR_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Allowed relative error (norm of the difference over norm of the float64 result) of the output and each gradient.

bfloat16 keeps 8 bits: one rounding costs about 2e-3 in this norm, the several roundings of a gradient together 4e-3
where products are accumulated in float32.
"""

CHECK_COUNTS = (130, 1, 17, 64)
"""Rows of each expert in `check`: more than a tile of 128, one, an odd number, and half a tile."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedExperts:
    """Gated experts down(silu(gate x) * up x), with rows and output gradients for the token-slots of a rank.

    gate_up_EXH   gate and up stacked, X = 2 F

    One set of tensors serves every rank that a benchmark times: values do not change the time.
    """

    gate_up_EXH: Float[Tensor, "E X H"]
    down_EHF: Float[Tensor, "E H F"]
    rows_TH: Float[Tensor, "T H"]
    gradient_TH: Float[Tensor, "T H"]

    def work(self, counts_E: Sequence[int]) -> Work:
        """Return the work of one rank whose expert `e` multiplies `counts_E[e]` rows.

        Experts without rows are left out: they need no product, and their gradients are zero.
        """
        counts = [count for count in counts_E if count]
        num_experts, rows = len(counts), sum(counts)
        assert num_experts <= len(self.gate_up_EXH), f"{num_experts} experts, made for {len(self.gate_up_EXH)}"
        assert rows <= len(self.rows_TH), f"{rows} rows, made for {len(self.rows_TH)}"
        if not counts:
            return tuple  # called, it returns ()
        ends_E = torch.tensor(counts).cumsum(0).to(self.rows_TH.device, torch.int32)
        taken = (self.rows_TH[:rows], self.gate_up_EXH[:num_experts], self.down_EHF[:num_experts])
        leaves = [part.detach().requires_grad_() for part in taken]
        gradient_TH = self.gradient_TH[:rows]

        def run() -> tuple[Tensor, ...]:
            output_TH = apply_experts(leaves[0], leaves[1], leaves[2], ends_E)
            return (output_TH, *torch.autograd.grad(output_TH, leaves, gradient_TH))

        return run

    def check(self) -> float:
        """Return the largest relative error of output and gradients, compared with float64 products of each expert.

        raises    EngineError above ERROR_BOUNDS
        """
        counts_E = CHECK_COUNTS[: len(self.gate_up_EXH)]
        bound = ERROR_BOUNDS[self.rows_TH.dtype]
        pairs = zip(self.work(counts_E)(), self._in_float64(counts_E), strict=True)
        errors = torch.stack([(found.detach().double() - exact).norm() / exact.norm() for found, exact in pairs])
        worst = float(errors.max())
        if not worst <= bound:  # also when it is not a number
            raise EngineError(
                f"grouped experts of shape {tuple(self.gate_up_EXH.shape)} on {self.rows_TH.device} in "
                f"{self.rows_TH.dtype} are off by {worst:.1e} relative to float64, allowed is {bound:.0e}: nothing is "
                "timed, try another build of torch"
            )
        return worst

    def _in_float64(self, counts_E: Sequence[int]) -> tuple[Tensor, ...]:
        rows, num_experts = sum(counts_E), len(counts_E)
        taken = (self.rows_TH[:rows], self.gate_up_EXH[:num_experts], self.down_EHF[:num_experts])
        leaves = [part.detach().double().requires_grad_() for part in taken]
        outputs = []
        for tokens_TH, gate_up_XH, down_HF in zip(leaves[0].split(list(counts_E)), leaves[1], leaves[2], strict=True):
            gate_TF, up_TF = (tokens_TH @ gate_up_XH.T).chunk(2, dim=-1)
            outputs.append((functional.silu(gate_TF) * up_TF) @ down_HF.T)
        output_TH = torch.cat(outputs)
        return (output_TH.detach(), *torch.autograd.grad(output_TH, leaves, self.gradient_TH[:rows].double()))


def apply_experts(rows_TH: Tensor, gate_up_EXH: Tensor, down_EHF: Tensor, ends_E: Tensor) -> Tensor:
    """Return the outputs of rows that are ordered by expert; expert `e` gets the rows up to `ends_E[e]`."""
    gate_up_TX = functional.grouped_mm(rows_TH, gate_up_EXH.transpose(-2, -1), offs=ends_E)
    gate_TF, up_TF = gate_up_TX.chunk(2, dim=-1)
    return functional.grouped_mm(functional.silu(gate_TF) * up_TF, down_EHF.transpose(-2, -1), offs=ends_E)


def grouped_experts(
    num_experts: int, rows: int, hidden: int, width: int, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> GroupedExperts:
    """Return random experts and rows of unit scale, with at least the rows that `check` needs."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = max(rows, sum(CHECK_COUNTS))

    def draw(*sizes: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*sizes, device=device, dtype=dtype, generator=generator).mul_(scale)

    return GroupedExperts(
        gate_up_EXH=draw(num_experts, 2 * width, hidden, scale=hidden**-0.5),
        down_EHF=draw(num_experts, hidden, width, scale=width**-0.5),
        rows_TH=draw(rows, hidden),
        gradient_TH=draw(rows, hidden),
    )


def seconds_each(works: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Run works one after another and return the seconds of each.

    On a GPU they are measured by its events, on a CPU as processor time of this thread, so that other programs count
    only by their effect on caches and clock rates.
    """
    if device.type == "cpu":
        assert torch.get_num_threads() == 1, "thread_time counts this thread alone: set one thread"
        seconds = []
        for work in works:
            start = time.thread_time()
            work()
            seconds.append(time.thread_time() - start)
        return seconds
    torch.cuda.synchronize(device)
    works[0]()  # an extra run: the GPU works on it while the host launches the next
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
    marks[0].record()
    for work, mark in zip(works, marks[1:], strict=True):
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
