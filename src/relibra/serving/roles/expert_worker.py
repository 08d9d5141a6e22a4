"""The loop of an expert worker: take the message that was complete first, run its experts, answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from relibra.errors import RelibraError, in_a_line
from relibra.serving.exchange.expert_side import ExpertInbox
from relibra.serving.roles.expert_layers import run_experts


class ExpertWorker:
    """Experts of every layer and the messages for them.

    busy_seconds   spent on experts since the start
    """

    def __init__(self, layers: Sequence[nn.Module], inbox: ExpertInbox) -> None:
        """Take over modules that `load_experts` returned."""
        self.layers, self.inbox = layers, inbox
        self.busy_seconds = 0.0

    @torch.inference_mode()
    def run(self) -> None:
        """Answer messages until the inbox is closed. A message that fails is answered with the error."""
        while (message := self.inbox.next()) is not None:
            began = time.perf_counter()
            try:
                run_experts(self.layers[message.layer], message.rows_YH, message.counts_E, message.result_YH)
            except (RelibraError, RuntimeError, MemoryError) as error:
                message.refuse(f"layer {message.layer} failed for {message.sender}: {in_a_line(error)}")
                continue
            self.busy_seconds += time.perf_counter() - began
            message.answer(message.result_YH, self.inbox.counters)
