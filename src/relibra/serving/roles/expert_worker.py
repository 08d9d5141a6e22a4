"""The loop of an expert worker: take the next message, run its experts, answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from relibra.errors import RelibraError, in_a_line
from relibra.serving.exchange.expert_side import ExpertInbox
from relibra.serving.roles.expert_layers import run_experts
from relibra.timeline import TimelineRecorder


class ExpertWorker:
    """Experts of every layer and the messages for them.

    busy_seconds   spent on experts since the start
    """

    def __init__(
        self, layers: Sequence[nn.Module], inbox: ExpertInbox, recorder: TimelineRecorder | None = None
    ) -> None:
        """Take over modules that `load_experts` returned.

        recorder   of its timeline; None: nothing is recorded
        """
        self.layers, self.inbox, self._recorder = layers, inbox, recorder
        self.busy_seconds = 0.0

    @torch.inference_mode()
    def run(self) -> None:
        """Answer messages until the inbox is closed. A message that fails is answered with the error."""
        ended = time.perf_counter()
        while (message := self.inbox.next()) is not None:
            began = time.perf_counter()
            try:
                run_experts(self.layers[message.layer], message.rows_YH, message.counts_E, message.result_YH)
            except (RelibraError, RuntimeError, MemoryError) as error:
                message.fail(f"layer {message.layer} failed for {message.sender}: {in_a_line(error)}")
                continue
            since, ended = ended, time.perf_counter()
            self.busy_seconds += ended - began
            message.answer(message.result_YH, self.inbox.counters)
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
