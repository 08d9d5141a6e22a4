"""Build an attention worker: the model without experts, channels to the expert workers, micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Several
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from relibra.engine.engine import EngineLimits
from relibra.engine.kv_cache import cache_bytes
from relibra.engine.sequence import Sequence
from relibra.replay.forward_cache import CACHE_NAME
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.checkpoint import load_attention, open_checkpoint, read_structure
from relibra.serving.roles.compute_token import ComputeToken
from relibra.serving.roles.micro_batch import Listener, MicroBatch
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
        structure = read_structure(folder, dtype)
        self.layout, self.number, self._recorder = layout, number, recorder
        self.token = ComputeToken()
        self.model: Any = load_attention(structure, open_checkpoint(folder))
        use_remote_experts(self.model, structure.experts)
        self.shape = ExchangeShape(
            experts_of=(),
            max_tokens=layout.max_tokens,
            top_k=structure.top_k,
            hidden=structure.hidden,
            dtype=structure.dtype,
            num_layers=len(structure.experts),
        )
        self.most_cache_bytes = _most_cache_bytes(self.model, layout)
        self.micro_batches: list[MicroBatch] = []
        self._exchanges: list[SlotExchange] = []

    def connect(self, experts: Several[Several[Any]], secret: bytes, listener: Listener) -> None:
        """Open the channels of all micro-batches and start their threads.

        experts   address of each expert worker, and the experts that it holds
        raises    EngineError if an expert worker does not answer
        """
        layout, addresses = self.layout, [address for address, _ in experts]
        self.shape = replace(self.shape, experts_of=tuple(tuple(held) for _, held in experts))
        for slot in range(layout.micro_batches):
            self._exchanges.append(
                SlotExchange(
                    addresses, self.shape, attention=self.number, slot=slot, secret=secret, timeout=layout.timeout
                )
            )
        limits = EngineLimits(
            max_running=layout.max_running, kv_tokens=layout.micro_batch_kv_tokens, max_tokens=layout.max_tokens
        )
        pad_id = self.model.config.get_text_config().pad_token_id or 0
        self.micro_batches = [
            MicroBatch(self.model, RemoteExperts(exchange, self.token, self._recorder), limits, pad_id, listener)
            for exchange in self._exchanges
        ]

    def submit(self, sequence: Sequence) -> None:
        """Give a request to the micro-batch where its prompt waits, else to the one with the fewest.

        Ties: one where its prompt runs, then the first.
        """
        prompt = sequence.prompt
        waiting = next((one for one in self.micro_batches if one.has_prompt(prompt, waiting=True)), None)
        chosen = waiting or min(self.micro_batches, key=lambda one: (one.unfinished, not one.has_prompt(prompt)))
        chosen.submit(sequence)

    def cancel(self, number: int) -> None:
        """End a request at the next step; unknown numbers are ignored."""
        for one in self.micro_batches:
            one.cancel(number)

    def rejoin(self, expert_worker: int, address: str, experts: Several[int]) -> None:
        """Use an expert worker that was started again, or holds other experts."""
        for one in self.micro_batches:
            one.rejoin(expert_worker, address, experts)

    def load(self) -> list[int]:
        """Return the rows of each expert since the start; loads nothing."""
        return sum(one.experts.load_E for one in self.micro_batches).tolist()  # type: ignore[union-attr]

    def counters(self) -> dict[str, int | float]:
        """Return the counts of all micro-batches, the steps, the seconds in which one of them computed, and its cache.

        kv_cache_usage   share of the KV cache that requests under way may need
        """
        total: Counter[str] = Counter()
        for exchange in self._exchanges:
            total.update(exchange.counters.as_dict())
        engines = [one.engine for one in self.micro_batches]
        return {
            **total,
            "decode_steps": sum(one.decode_steps for one in engines),
            "prefill_passes": sum(one.prefill_passes for one in engines),
            "reused_prompts": sum(one.reused_prompts for one in engines),
            "busy_seconds": self.token.busy_seconds,
            "kv_cache_bytes": sum(one.cache_bytes for one in engines),
            "kv_cache_most_bytes": self.most_cache_bytes,
            "kv_cache_usage": sum(one.cache_usage for one in engines) / self.layout.micro_batches,
        }

    def close(self) -> None:
        """Stop the micro-batches and close all channels."""
        for one in self.micro_batches:
            one.close()
        for exchange in self._exchanges:
            exchange.close()


@torch.inference_mode()
def _most_cache_bytes(model: Any, layout: WorkerLayout) -> int:
    """Return the bytes of a full KV cache, from the caches of one and of two tokens.

    What does not grow with tokens, such as states of linear attention, is there once per request.
    """
    with without_experts():
        one, two = (
            cache_bytes(model(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=True)[CACHE_NAME])
            for tokens in (1, 2)
        )
    token, request = two - one, 2 * one - two
    return layout.micro_batches * (layout.micro_batch_kv_tokens * token + layout.max_running * request)
