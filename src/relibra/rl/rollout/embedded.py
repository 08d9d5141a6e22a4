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


@dataclass(frozen=True, kw_only=True)
class EmbeddedEngine:
    """Samples from a model that is already in this process.

    model         full copy of the policy, in evaluation mode
    stop_ids      tokens that end a response
    temperature   of sampling; log-probs are those of the tempered policy
    seed          with the sample's id and the token's position in the response, determines the random numbers
    max_batch     responses decoded at once: the slots of the batch
    record        record the experts of every token; False: a model without experts, or with unknown routers
    shortest      a spare begins only if there is time for this many tokens

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

    @torch.inference_mode()
    def generate(
        self, responses: Several[Response], *, window: int, max_response: int, spare: Iterator[Response] | None = None
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; see `RolloutEngine`.

        raises    EngineError for probabilities that are not finite, or where the model's routes cannot be recorded
                  (`record_routing`)
        """
        assert spare is None or len(responses) <= self.max_batch, "with spares, each response needs a slot"
        sequences = [self._sequence(response, min(window, max_response - response.length)) for response in responses]
        if not sequences:
            return [], RolloutCost(decode_steps=0, passes=0, slot_steps=0, busy_slot_steps=0, prefilled_tokens=0)
        slots = min(self.max_batch, len(sequences))
        limits = EngineLimits(
            max_running=slots, kv_tokens=slots * max(one.longest for one in sequences), max_tokens=PREFILL_TOKENS
        )
        with record_routing(self.model) if self.record else nullcontext() as recorder:
            engine = Engine(
                local_forward(self.model, recorder), self.model.config, limits, pad_id=self.pad_id, exact=True
            )
            # idle: slots x decode steps without a sequence since the last prefill
            begun = steps = busy = idle = prefilled = 0
            while True:
                running = len(engine.running)
                if not running or (engine.can_join and idle >= slots):
                    free, steps_then = slots - running, steps + (not running)
                    if spare is not None and begun == len(sequences):
                        count = spares_to_begin(free, slots, window - steps_then, self.shortest)
                        limit = min(window - steps_then + 1, max_response)
                        sequences += [self._sequence(response, limit) for response in islice(spare, count)]
                    if fresh := sequences[begun : begun + free]:
                        engine.begin(fresh)
                        while engine.prefills:
                            _check_finite(engine.step())
                        busy += 0 if running else len(fresh)
                        begun, steps, idle = begun + len(fresh), steps_then, 0
                        prefilled += sum(len(sequence.prompt) for sequence in fresh)
                        continue
                if not running:
                    break
                _check_finite(engine.step())
                steps, busy, idle = steps + 1, busy + running, idle + slots - len(engine.running)
        cost = RolloutCost(
            decode_steps=steps,
            passes=engine.decode_steps + engine.prefill_passes,
            slot_steps=steps * slots,
            busy_slot_steps=busy,
            prefilled_tokens=prefilled,
        )
        return [_window(sequence) for sequence in sequences], cost

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


def _check_finite(sequences: Several[Sequence]) -> None:
    """Raise EngineError where the weights give a log-prob that is not finite."""
    for sequence in sequences:
        if sequence.finish == "error":
            raise EngineError(
                f"sample {sequence.number}: {sequence.error}; resume from an earlier checkpoint with a lower "
                "update.learning_rate"
            )


def _window(sequence: Sequence) -> Window:
    return Window(
        tokens_w=np.array(sequence.tokens, dtype=np.int64),
        log_probs_w=np.array(sequence.log_probs, dtype=np.float32),
        experts_mLK=sequence.routes,
        stopped=sequence.finish == "stop",
    )
