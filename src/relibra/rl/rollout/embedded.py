"""The embedded engine: `relibra.engine` inside the training process, with windows and refills, routes recorded.

It handles token ids, not text. Every rank holds a full copy of the policy and samples its own share of the responses.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import nn

from relibra.engine.engine import Engine, EngineLimits
from relibra.engine.forward import local_forward
from relibra.engine.sequence import SamplingParameters, Sequence
from relibra.errors import EngineError
from relibra.replay import record_routing
from relibra.rl.rollout.response import Response, RolloutCost, Window

PREFILL_TOKENS = 1 << 15
"""Most tokens, padding included, of one prefill pass, unless a single response has more: bounds its memory."""


@dataclass(eq=False, kw_only=True)
class EmbeddedEngine:
    """Samples from a model that is already in this process.

    model         full copy of the policy, in evaluation mode
    stop_ids      tokens that end a response
    temperature   of sampling; log-probs are those of the tempered policy
    seed          with the sample's id and the token's position in the response, determines the random numbers
    max_batch     responses decoded at once: the slots of the batch
    record        record the experts of every token; False: a model without experts, or with unknown routers
    shortest      a spare begins only if there is time for this many tokens
    keeps         responses that are unfinished at the end of a window stay in the cache; each has a slot
    kept          engine whose running sequences they are; None: nothing is kept

    With `keeps` responses of a call that are in the cache go on without being fed again: the keys and values of their
    earlier windows, and the routes, are those of the weights that fed them. Others are fed from their start: new ones,
    those of a checkpoint or of another rank, and all of a model whose caches cannot be joined. A window as long as the
    longest response, such as an evaluation's, keeps nothing and leaves alone what is kept.

    With more responses than slots, waiting ones take the slots of those that ended (refill): they are prefilled
    together and joined to the running batch. A refill costs about one decode step of the whole batch, so it waits until
    idle slots have cost as much, which minimises the total for any lengths (economic order quantity). Models whose
    caches cannot be joined get a new batch when the old one has ended.

    In the cost, the pass that fills an empty batch counts as a decode step, because it adds a token to every running
    response; a refill does not. Both are passes; prompts of more than `PREFILL_TOKENS` together take several.

    With spares a call is at most `window` decode steps: free slots take a spare by the same rule, while the steps left
    repay the refill and are enough for `shortest` tokens: one in the refill and one in each step left. When all
    responses have ended and no spare may begin, the call ends early.
    """

    model: nn.Module
    pad_id: int
    stop_ids: tuple[int, ...]
    temperature: float
    seed: int
    max_batch: int
    record: bool = True
    shortest: int = 1
    keeps: bool = False
    kept: Engine | None = None

    @torch.inference_mode()
    def generate(
        self, responses: Several[Response], *, window: int, max_response: int, spare: Iterator[Response] | None = None
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; see `RolloutEngine`.

        raises    EngineError for probabilities that are not finite, or where the model's routes cannot be recorded
                  (`record_routing`)
        """
        keeps = self.keeps and window < max_response
        assert not (keeps or spare is not None) or len(responses) <= self.max_batch, "each response needs a slot"
        longest = max_response if keeps else window  # kept ones outlive the window: the loop stops at its last step
        engine = self._kept_of(responses) if keeps else None
        known = {sequence.number: sequence for sequence in engine.running} if engine else {}
        sequences = [
            known.get(response.sample_id) or self._sequence(response, min(longest, max_response - response.length))
            for response in responses
        ]
        if not sequences:
            return [], RolloutCost(decode_steps=0, passes=0, slot_steps=0, busy_slot_steps=0, prefilled_tokens=0)
        first = [len(sequence.tokens) for sequence in sequences]
        slots = min(self.max_batch, len(sequences))
        limits = EngineLimits(
            max_running=slots, kv_tokens=slots * max(one.longest for one in sequences), max_tokens=PREFILL_TOKENS
        )
        with record_routing(self.model) if self.record else nullcontext() as recorder:
            forward = local_forward(self.model, recorder)
            engine = engine or Engine(forward, self.model.config, limits, pad_id=self.pad_id, exact=True)
            engine.forward, engine.limits = forward, limits
            passes_before = engine.decode_steps + engine.prefill_passes
            # idle: slots x decode steps without a sequence since the last prefill
            begun = steps = busy = idle = prefilled = 0
            if known:  # these get their first token of the window from a step, the others from their prompts
                _check_finite(engine.step())
                fresh = [sequence for sequence in sequences if not sequence.fed]
                prefilled = _feed_prompts(engine, fresh)
                begun, steps, busy = len(sequences), 1, len(sequences)
            while True:
                running = len(engine.running)
                if not running or (engine.can_join and idle >= slots):
                    free, steps_then = slots - running, steps + (not running)
                    if spare is not None and begun == len(sequences):
                        count = spares_to_begin(free, slots, window - steps_then, self.shortest)
                        limit = max_response if keeps else min(window - steps_then + 1, max_response)
                        sequences += [self._sequence(response, limit) for response in islice(spare, count)]
                    if fresh := sequences[begun : begun + free]:
                        prefilled += _feed_prompts(engine, fresh)
                        busy += 0 if running else len(fresh)
                        begun, steps, idle = begun + len(fresh), steps_then, 0
                        continue
                if not running or (keeps and steps == window):
                    break
                _check_finite(engine.step())
                steps, busy, idle = steps + 1, busy + running, idle + slots - len(engine.running)
        if keeps:
            self.kept = engine if engine.running and engine.can_join else None
        first += [0] * (len(sequences) - len(first))
        windows = [_window(*one) for one in zip(sequences, first, strict=True)]
        cost = RolloutCost(
            decode_steps=steps,
            passes=engine.decode_steps + engine.prefill_passes - passes_before,
            slot_steps=steps * slots,
            busy_slot_steps=busy,
            prefilled_tokens=prefilled,
            mixed_tokens=sum(len(one.tokens_w) for one, before in zip(windows, first, strict=True) if before),
        )
        return windows, cost

    def _kept_of(self, responses: Several[Response]) -> Engine | None:
        """Drop what is kept of other responses, and return the engine that keeps some of these; None: none is kept."""
        if self.kept is None:
            return None
        length_of = {response.sample_id: len(response.tokens_n) for response in responses}
        for sequence in self.kept.running:
            if length_of.get(sequence.number) != sequence.length:
                sequence.finish = "cancelled"
        self.kept.drop_finished()
        return self.kept if self.kept.running else None

    def _sequence(self, response: Response, limit: int) -> Sequence:
        """Return a response as the engine takes it, to be continued by up to `limit` tokens."""
        sample = f"sample {response.sample_id}"
        assert response.finish_reason is None, f"{sample} is finished: it cannot be continued"
        assert limit > 0, f"{sample} may not grow: its window is {limit}"
        assert len(response.tokens_n), f"{sample} has an empty prompt"
        sampling = SamplingParameters(
            limit=limit,
            temperature=self.temperature,
            seed=self.seed,
            sample=response.sample_id,
            position=response.length,
            stop_ids=self.stop_ids,
            routes=self.record,
        )
        return Sequence(number=response.sample_id, prompt=tuple(response.tokens_n.tolist()), sampling=sampling)


def spares_to_begin(free: int, slots: int, steps_left: int, shortest: int) -> int:
    """Return how many free slots get a new response now: all of them, or none.

    steps_left   decode steps after the prefill; in an empty batch that is itself a decode step
    shortest     tokens that each needs time for: one in the prefill and one in each step left

    >>> spares_to_begin(3, 12, 8, 4), spares_to_begin(3, 12, 2, 1), spares_to_begin(12, 12, 2, 4)
    (3, 0, 0)
    """
    repays = free == slots or free * steps_left >= slots
    return free if repays and steps_left + 1 >= shortest else 0


def _feed_prompts(engine: Engine, fresh: Several[Sequence]) -> int:
    """Feed the prompts of sequences, each of which gets its first token; return the tokens of the prompts."""
    engine.begin(fresh)
    while engine.prefills:
        _check_finite(engine.step())
    return sum(len(sequence.prompt) for sequence in fresh)


def _check_finite(sequences: Several[Sequence]) -> None:
    """Raise EngineError where the weights give a log-prob that is not finite."""
    for sequence in sequences:
        if sequence.finish == "error":
            raise EngineError(
                f"sample {sequence.number}: {sequence.error}; resume from an earlier checkpoint with a lower "
                "update.learning_rate"
            )


def _window(sequence: Sequence, first: int) -> Window:
    """Return the tokens from number `first` on."""
    return Window(
        tokens_w=np.array(sequence.tokens[first:], dtype=np.int64),
        log_probs_w=np.array(sequence.log_probs[first:], dtype=np.float32),
        experts_mLK=sequence.routes,
        stopped=sequence.finish == "stop",
    )
