"""Build an attention worker: the model without experts, channels to the expert workers, the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relibra.serving.engine.engine import AttentionEngine
from relibra.serving.engine.micro_batch import EngineLimits, MicroBatch
from relibra.serving.engine.request import GenerateRequest, Progress
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange
from relibra.serving.expert_placement import place_experts
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.checkpoint import load_attention, open_checkpoint, read_structure
from relibra.serving.roles.compute_token import ComputeToken
from relibra.serving.roles.remote_experts import RemoteExperts, use_remote_experts


class AttentionWorker:
    """An attention worker that has loaded its part, and runs once it is connected."""

    def __init__(self, folder: Path, layout: WorkerLayout, number: int, dtype: str = "auto") -> None:
        """Load everything of a model but its experts.

        number   of this attention worker
        raises   ConfigError, EngineError as `read_structure` and `load_attention` do
        """
        structure = read_structure(folder, dtype)
        self.layout, self.number = layout, number
        self.token = ComputeToken()
        self.model: Any = load_attention(structure, open_checkpoint(folder))
        use_remote_experts(self.model, structure.experts)
        self.shape = ExchangeShape(
            experts_of=place_experts(structure.num_experts, layout.experts, layout.spare_experts),
            max_tokens=layout.max_tokens,
            top_k=structure.top_k,
            hidden=structure.hidden,
            dtype=structure.dtype,
            num_layers=len(structure.experts),
        )
        self.engine: AttentionEngine | None = None
        self._exchanges: list[SlotExchange] = []

    def connect(self, addresses: Sequence[str], secret: bytes, listener: Callable[[list[Progress]], None]) -> None:
        """Open the channels of all micro-batches and start the engine.

        addresses   of the expert workers, in their order
        listener    is told what each step adds
        raises      EngineError if an expert worker does not answer
        """
        layout = self.layout
        for slot in range(layout.micro_batches):
            exchange = SlotExchange(
                addresses,
                self.shape,
                attention=self.number,
                slot=slot,
                secret=secret,
                timeout=layout.timeout,
            )
            self._exchanges.append(exchange)
        limits = EngineLimits(max_rows=layout.rows, max_columns=layout.columns, max_tokens=layout.max_tokens)
        pad_id = self.model.config.get_text_config().pad_token_id or 0
        self.engine = AttentionEngine(
            [
                MicroBatch(self.model, RemoteExperts(exchange, self.token), limits, pad_id, listener)
                for exchange in self._exchanges
            ]
        )

    def submit(self, request: GenerateRequest) -> None:
        """Begin a request."""
        assert self.engine is not None, "connect comes first"
        self.engine.submit(request)

    def cancel(self, number: int) -> None:
        """End a request at the next step."""
        assert self.engine is not None, "connect comes first"
        self.engine.cancel(number)

    def rejoin(self, expert_worker: int, address: str, experts: Sequence[int]) -> None:
        """Use an expert worker that was started again, or holds other experts."""
        assert self.engine is not None, "connect comes first"
        for one in self.engine.micro_batches:
            one.rejoin(expert_worker, address, experts)

    def load(self) -> list[int]:
        """Return the rows of each expert since the start."""
        assert self.engine is not None, "connect comes first"
        return sum(one.load_E for one in self.engine.micro_batches).tolist()  # type: ignore[union-attr]

    def counters(self) -> dict[str, int | float]:
        """Return the counts of all micro-batches, the steps, and the seconds in which one of them computed."""
        total: Counter[str] = Counter()
        for exchange in self._exchanges:
            total.update(exchange.counters.as_dict())
        steps = sum(one.steps for one in self.engine.micro_batches) if self.engine else 0
        return {**total, "steps": steps, "busy_seconds": self.token.busy_seconds}

    def close(self) -> None:
        """Stop the engine and close all channels."""
        if self.engine is not None:
            self.engine.close()
        for exchange in self._exchanges:
            exchange.close()
