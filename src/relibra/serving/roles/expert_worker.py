"""The loop of an expert worker: take the next message, run its experts on their rows, answer with weighted sums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer
from numpy import ndarray
from torch import Tensor, nn

from relibra.errors import RelibraError, in_a_line
from relibra.serving.exchange.expert_side import ExpertInbox, Message
from relibra.timeline import TimelineRecorder


class ExpertWorker:
    """Experts of every layer and the messages for them.

    busy_seconds   spent on experts since the start
    """

    def __init__(
        self, layers: Sequence[nn.Module], inbox: ExpertInbox, recorder: TimelineRecorder | None = None
    ) -> None:
        """Take over modules of `load_experts`, and a recorder of the worker's timeline, or None."""
        self.layers, self.inbox, self._recorder = layers, inbox, recorder
        self.busy_seconds = 0.0

    @torch.inference_mode()
    def run(self) -> None:
        """Answer messages until the inbox is closed. A message that fails is answered with the error."""
        ended = time.perf_counter()
        while (message := self.inbox.next()) is not None:
            began = time.perf_counter()
            try:
                run_choices(self.layers[message.layer], message)
            except (RelibraError, RuntimeError, MemoryError) as error:
                message.fail(f"layer {message.layer} failed for {message.sender}: {in_a_line(error)}")
                continue
            since, ended = ended, time.perf_counter()
            self.busy_seconds += ended - began
            message.answer(self.inbox.counters)
            if self._recorder is not None:
                self._recorder.add("wait", start=since, seconds=began - since)
                self._recorder.add(
                    "experts",
                    start=began,
                    seconds=ended - began,
                    layer=message.layer,
                    micro_batch=message.micro_batch,
                    bytes=message.rows_YH.nbytes,
                    label=message.sender,
                )


def run_choices(experts: nn.Module, message: Message) -> None:
    """Write for each row of a message the weighted sum of its experts here, added in float32 by ascending expert."""
    chosen_CH = message.rows_YH.index_select(0, message.row_C)
    output_CH = torch.empty_like(chosen_CH)
    run_experts(experts, chosen_CH, message.counts_E, output_CH)
    result_YH = message.result_YH
    sum_YH = result_YH.zero_() if result_YH.dtype == torch.float32 else torch.zeros(result_YH.shape)
    sum_YH.index_add_(0, message.row_C, output_CH.float() * message.gate_C.unsqueeze(1))
    if sum_YH is not result_YH:
        result_YH.copy_(sum_YH)


def run_experts(
    experts: nn.Module, rows_YH: Float[Tensor, "Y H"], counts_E: Integer[ndarray, " E"], result_YH: Float[Tensor, "Y H"]
) -> None:
    """Write the output of each row's expert, without gate weights, into `result_YH`.

    The steps are those of `transformers.integrations.moe`, whose interface says how a family stores and gates its
    experts; each expert runs once, on a view of its rows.

    experts    module with the experts interface of transformers
    rows_YH    first the rows of expert 0, then those of expert 1, and so on
    counts_E   rows of each expert; 0 is allowed
    """
    module: Any = experts
    first = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count == 0:
            continue
        rows, result = rows_YH[first : first + count], result_YH[first : first + count]
        inner = _project(module, "gate_up_proj" if module.has_gate else "up_proj", rows, expert)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        weight = module.down_proj[expert]
        torch.mm(inner.to(weight.dtype), weight if module.is_transposed else weight.t(), out=result)
        if module.has_bias:
            result.add_(module.down_proj_bias[expert])
        if module.has_post_expert_norm:
            result.copy_(module.post_expert_norm(result))
        first += count


def _project(module: Any, name: str, rows: Tensor, expert: int) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch.nn.functional.linear(rows.to(weight.dtype), weight.t() if module.is_transposed else weight, bias)
