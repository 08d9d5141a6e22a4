"""`Engine`: continuous batching. Sequences join and leave a running batch between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig

from relibra.engine.forward import Forward, Prefill, group_prompts, share_prompts
from relibra.engine.kv_cache import Room, SlottedCache, cache_bytes
from relibra.engine.sampling import sample_next
from relibra.engine.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of an engine.

    max_running   sequences decoded together
    kv_tokens     tokens of the KV cache: running sequences x tokens that the longest of them may reach, as rows of a
                  cache have one width
    max_tokens    tokens of one forward pass, padding included
    """

    max_running: int
    kv_tokens: int
    max_tokens: int


class Engine:
    """Samples sequences with one KV cache.

    forward          the pass of the model; it or its weights may be replaced between steps, and the keys and values in
                     the cache stay
    limits           of the next steps
    running          sequences whose latest token is fed next; the cache holds the tokens before it
    waiting          sequences that have not begun
    prefills         prompts that are being fed
    decode_steps     forward passes that fed the latest token of all running sequences
    prefill_passes   forward passes that fed a piece of prompts
    reused_prompts   prompts whose keys and values were copied from a running sequence instead
    """

    def __init__(
        self, forward: Forward, config: PreTrainedConfig, limits: EngineLimits, *, pad_id: int, exact: bool = False
    ) -> None:
        """Begin without sequences.

        config   of the model
        exact    True: log-probs repeat bit for bit, as rollouts need it. A product with other rows rounds otherwise, so
                 sequences keep their order, and each feeds its own prompt, whole and before the next decode step.
                 False: a prompt is computed once for all its sequences, pieces and decode steps take turns, and a
                 sequence moves only into the slot of one that ended
        """
        self.forward, self._config, self.limits = forward, config, limits
        self._pad_id, self._exact = pad_id, exact
        self.waiting: deque[Sequence] = deque()
        self.prefills: deque[Prefill] = deque()
        self.running: list[Sequence] = []
        self._cache = SlottedCache(config, Room(0, 0))
        self._width, self._fed_last = 0, False
        self.decode_steps = self.prefill_passes = self.reused_prompts = 0

    @property
    def can_join(self) -> bool:
        """Whether sequences may join running ones; states of linear attention cannot be joined."""
        return self._cache.can_join

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache now; may be read by another thread."""
        return sum(map(cache_bytes, [self._cache, *(prefill.cache for prefill in list(self.prefills))]))

    @property
    def cache_usage(self) -> float:
        """Share of the KV cache that sequences under way may need; at 1 no other begins."""
        count, longest = self._begun()
        return count * longest / self.limits.kv_tokens

    def step(self) -> list[Sequence]:
        """Admit sequences that fit, run one forward pass, and return the sequences that have a token more."""
        self._admit()
        feeds = bool(self.prefills) and (self._exact or not self.running or not self._fed_last)
        self._fed_last = feeds
        return self._feed_piece() if feeds else self._decode()

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it begins when there is room."""
        self.waiting.append(sequence)

    def begin(self, sequences: Several[Sequence]) -> None:
        """Begin sequences: feed their prompts in the next steps. Prompts to score are fed apart from others."""
        by_length = sorted(sequences, key=lambda sequence: -len(sequence.prompt))
        if not self.can_join:
            self._begin_together([[sequence] for sequence in by_length])
            return
        for scored in (True, False):
            own = [sequence for sequence in by_length if sequence.sampling.prompt_log_probs == scored]
            sharing = [[sequence] for sequence in own] if self._exact else share_prompts(own)
            for group in group_prompts([len(one[0].prompt) for one in sharing], self.limits.max_tokens):
                self._begin_together([sharing[index] for index in group])

    def _begin_together(self, sharing: Several[Several[Sequence]]) -> None:
        whole = self._exact or not self.can_join
        self.prefills.append(Prefill(sharing, self._config, self._pad_id, whole=whole))

    def drop_finished(self) -> None:
        """Take finished and cancelled sequences out; those in a prefill that goes on for others leave after it."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.finish is None)
        self.prefills = deque(prefill for prefill in self.prefills if prefill.goes_on)
        kept = [b for b, sequence in enumerate(self.running) if sequence.finish is None]
        if not kept and self._cache.room.tokens:
            self.running, self._cache, self._width = [], SlottedCache(self._config, Room(0, 0)), 0
        if len(kept) == len(self.running):
            return
        if self.can_join:
            self._width = max(self.running[b].length for b in kept) - 1
        order = self._cache.keep(kept, self._width, in_order=self._exact or not self.can_join)
        self.running = [self.running[b] for b in order]

    def _admit(self) -> None:
        """Begin waiting sequences, first come first served, within the limits."""
        if not self.waiting:
            return
        fresh: list[Sequence] = []
        count, longest = self._begun()
        while self.waiting and count < self.limits.max_running:
            sequence = self.waiting[0]
            widest = max(longest, sequence.longest)
            if count and (count + 1) * widest > self.limits.kv_tokens:
                break
            if not self.can_join and (count > len(fresh) or (fresh and len(fresh[0].prompt) != len(sequence.prompt))):
                break  # states cannot be padded or joined: a batch has prompts of one length, and runs to its end
            fresh.append(self.waiting.popleft())
            count, longest = count + 1, widest
        fresh = [sequence for sequence in fresh if self._exact or not self._reuse_prefix(sequence)]
        if fresh:
            self.begin(fresh)

    def _begun(self) -> tuple[int, int]:
        """Return how many sequences have begun, and the tokens that the longest of them may reach."""
        parts = [self.running, *(prefill.sequences for prefill in list(self.prefills))]
        longest = [sequence.longest for part in parts for sequence in part]
        return len(longest), max(longest, default=0)

    def _reuse_prefix(self, fresh: Sequence) -> bool:
        """Begin a sequence with the cached prompt of a running one that has the same; return whether there is one.

        All of its prompt but the last token is copied; the next decode step feeds that one.
        """
        row = next((b for b, sequence in enumerate(self.running) if fresh.can_reuse_prompt(sequence)), None)
        if row is None or not self.can_join or not self._cache.holds_all(self.running[row].fed):
            return False
        fresh.fed = len(fresh.prompt) - 1
        if fresh.sampling.routes:
            fresh.experts.append(np.concatenate(self.running[row].experts)[: fresh.fed])
        self._make_room(len(self.running) + 1, self._width)
        self._cache.copy_beginning(row, self.running[row].fed - fresh.fed)
        self.running.append(fresh)
        self.reused_prompts += 1
        return True

    def _feed_piece(self) -> list[Sequence]:
        """Feed a piece of the first prompts; after the last piece, sample and join the running sequences."""
        prefill = self.prefills.popleft()
        logits_SV = prefill.feed(self.forward, self.limits.max_tokens)
        self.prefill_passes += 1
        if logits_SV is None:  # pieces in turn: a short prompt does not wait for a long one
            self.prefills.append(prefill)
            return []
        own = [s for s, sequence in enumerate(prefill.sequences) if sequence.finish is None]
        sampled = [prefill.sequences[s] for s in own]
        sample_next(sampled, logits_SV if len(own) == len(logits_SV) else logits_SV[own])
        if self.can_join:
            kept = [s for s in own if prefill.sequences[s].finish is None]
            self._join(prefill, kept)
        else:
            assert not self.running, "states without slots are not joined"
            self.running, self._cache, self._width = list(prefill.sequences), prefill.cache, prefill.width
            self.drop_finished()
        return sampled

    def _join(self, prefill: Prefill, kept: Several[int]) -> None:
        """Copy keys and values of fed sequences behind those that run."""
        if not kept:
            return
        fresh = [prefill.sequences[s] for s in kept]
        self._width = max(self._width, max(sequence.length for sequence in fresh) - 1)
        self._make_room(len(self.running) + len(fresh), self._width)
        self._cache.take_in(prefill.cache, [prefill.prompt_of[s] for s in kept], self._width)
        self.running += fresh

    def _decode(self) -> list[Sequence]:
        """Feed the latest token of each running sequence, and sample the next."""
        batch = self.running
        if not batch:
            return []
        self._make_room(len(batch), self._width + 1)
        token_B1 = torch.tensor([[sequence.latest] for sequence in batch])
        length_B1 = torch.tensor([[sequence.length] for sequence in batch])
        mask_BC = torch.arange(self._width + 1) > self._width - length_B1
        logits_B1V, experts_BLK = self.forward(token_B1, mask_BC, self._cache)
        self.decode_steps += 1
        self._width += 1
        if experts_BLK is not None:
            routes = experts_BLK.numpy()
            for b, sequence in enumerate(batch):
                if sequence.sampling.routes:
                    sequence.experts.append(routes[b : b + 1].copy())  # a view would hold all rows
        for sequence in batch:
            sequence.fed += 1
        sample_next(batch, logits_B1V[:, -1])
        self.drop_finished()
        return batch

    def _make_room(self, rows: int, columns: int) -> None:
        """Make room in the cache within what prompts under way leave."""
        left = self.limits.kv_tokens - sum(prefill.cache.room.tokens for prefill in self.prefills)
        self._cache.make_room(rows, columns, left)
