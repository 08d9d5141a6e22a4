"""Build an attention worker: the model without experts, channels to the expert workers, the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from relibra.replay.forward_cache import CACHE_NAME
from relibra.serving.engine.engine import AttentionEngine
from relibra.serving.engine.micro_batch import EngineLimits, MicroBatch
from relibra.serving.engine.request import GenerateRequest, Progress
from relibra.serving.engine.slotted_cache import cache_bytes
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange
from relibra.serving.expert_placement import place_experts
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.checkpoint import load_attention, open_checkpoint, read_structure
from relibra.serving.roles.compute_token import ComputeToken
from relibra.serving.roles.remote_experts import RemoteExperts, use_remote_experts, without_experts
from relibra.timeline import TimelineRecorder


class AttentionWorker:
    """An attention worker that has loaded its part, and runs once it is connected."""

    def __init__(
        self,
        folder: Path,
        layout: WorkerLayout,
        number: int,
        dtype: str = "auto",
        recorder: TimelineRecorder | None = None,
    ) -> None:
        """Load everything of a model but its experts.

        number     of this attention worker
        recorder   of its timeline; None: nothing is recorded
        raises     ConfigError, EngineError as `read_structure` and `load_attention` do
        """
        structure = read_structure(folder, dtype, layout.device)
        self.layout, self.number, self._recorder = layout, number, recorder
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
            backend=layout.backend,
            device=layout.device,
        )
        self.most_cache_bytes = _most_cache_bytes(self.model, layout)
        self.engine: AttentionEngine | None = None
        self._exchanges: list[SlotExchange] = []

    def connect(
        self,
        addresses: Sequence[str],
        secret: bytes,
        listener: Callable[[list[Progress]], None],
        experts_of: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Open the channels of all micro-batches and start the engine.

        addresses    of the expert workers, in their order
        listener     is told what each step adds
        experts_of   what each of them holds; None: the first placement
        raises       EngineError if an expert worker does not answer
        """
        layout = self.layout
        if experts_of is not None:
            self.shape = replace(self.shape, experts_of=tuple(map(tuple, experts_of)))
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
        limits = EngineLimits(max_rows=layout.rows, max_places=layout.places, max_tokens=layout.max_tokens)
        pad_id = self.model.config.get_text_config().pad_token_id or 0
        self.engine = AttentionEngine(
            [
                MicroBatch(self.model, RemoteExperts(exchange, self.token, self._recorder), limits, pad_id, listener)
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
        """Return the rows of each expert since the start; loads nothing."""
        assert self.engine is not None, "connect comes first"
        return sum(one.load_E for one in self.engine.micro_batches).tolist()  # type: ignore[union-attr]

    def counters(self) -> dict[str, int | float]:
        """Return the counts of all micro-batches, the steps, the seconds in which one of them computed, and its cache.

        kv_cache_usage   share of the places that requests under way may need
        """
        total: Counter[str] = Counter()
        for exchange in self._exchanges:
            total.update(exchange.counters.as_dict())
        micro_batches = self.engine.micro_batches if self.engine else ()
        return {
            **total,
            "steps": sum(one.steps for one in micro_batches),
            "prefills": sum(one.prefills for one in micro_batches),
            "lent_prompts": sum(one.lent_prompts for one in micro_batches),
            "busy_seconds": self.token.busy_seconds,
            "kv_cache_bytes": sum(one.cache_bytes for one in micro_batches),
            "kv_cache_most_bytes": self.most_cache_bytes,
            "kv_cache_usage": sum(one.cache_usage for one in micro_batches) / self.layout.micro_batches,
        }

    def close(self) -> None:
        """Stop the engine and close all channels."""
        if self.engine is not None:
            self.engine.close()
        for exchange in self._exchanges:
            exchange.close()


@torch.inference_mode()
def _most_cache_bytes(model: Any, layout: WorkerLayout) -> int:
    """Return the bytes of a full KV cache, from the caches of one and of two tokens.

    A place of it may hold a token; what does not grow with tokens, such as states of linear attention, is there once
    per request.
    """
    with without_experts():
        one, two = (
            cache_bytes(
                model(input_ids=torch.zeros((1, tokens), dtype=torch.int64, device=layout.device), use_cache=True)[
                    CACHE_NAME
                ]
            )
            for tokens in (1, 2)
        )
    place, request = two - one, 2 * one - two
    return layout.micro_batches * (layout.places * place + layout.rows * request)
