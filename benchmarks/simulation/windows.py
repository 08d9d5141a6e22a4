"""Rollouts of at most so many tokens per response and step (T-PPO, arXiv 2506.15050), in a model of slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray
from numpy.random import Generator

from relibra.cluster import Cluster
from relibra.errors import ConfigError
from relibra.simulation import Engines, ModelShape, SimulatedRollout
from relibra.simulation.rollout import decode_cost, mean_context, prefill_seconds

Draw = Callable[[int, Generator], Int64[ndarray, " S"]]
"""Draws a number of lengths."""
WINDOW_STEPS, WINDOW_BURN_IN = 20, 10


@dataclass(frozen=True, kw_only=True)
class WindowTotals:
    """Totals over some steps of windows.

    tokens, decode_steps   decoded, and until the last response of each step stops
    continued              slots that go on with a response of the step before
    fed_again              earlier tokens of those responses, which an engine without their cache feeds in again
    slots                  slots x steps
    """

    tokens: int
    decode_steps: int
    continued: int
    fed_again: int
    slots: int

    def idle(self, slots: int) -> float:
        """Return the share of `slots` x decode steps without a response."""
        return 1 - self.tokens / (slots * self.decode_steps)

    def tokens_per_time(self, cost_per_response: float) -> float:
        """Return tokens per time if a decode step costs 1 + cost x active responses, summed up: the tokens."""
        return self.tokens / (self.decode_steps + cost_per_response * self.tokens)


def decode_in_windows(draw: Draw, slots: int, window: int, rng: Generator, *, steps: int, burn_in: int) -> WindowTotals:
    """Return totals of steps of at most `window` tokens per response; unfinished ones continue in the next step.

    A slot whose response has ended, or used up its window, idles until the step does (T-PPO, arXiv 2506.15050).

    draw      lengths of new responses, such as `LengthDistribution.draw`
    steps     that count, after `burn_in` steps that do not
    raises    ConfigError for an engine without slots, or windows without tokens
    """
    if slots < 1 or window < 1:
        raise ConfigError(f"an engine of {slots} slots and windows of {window} tokens decodes nothing: give at least 1")
    length_B = draw(slots, rng)
    done_B = np.zeros(slots, dtype=np.int64)
    tokens = decode_steps = continued = fed_again = 0
    for step in range(burn_in + steps):
        added_B = np.minimum(length_B - done_B, window)
        if step >= burn_in:
            tokens += int(added_B.sum())
            decode_steps += int(added_B.max())
            continued += int((done_B > 0).sum())
            fed_again += int(done_B.sum())
        done_B += added_B
        finished_B = done_B == length_B
        length_B = np.where(finished_B, draw(slots, rng), length_B)
        done_B[finished_B] = 0
    return WindowTotals(
        tokens=tokens, decode_steps=decode_steps, continued=continued, fed_again=fed_again, slots=slots * steps
    )


def simulate_windowed_rollout(
    draw: Draw,
    window: int,
    prompt_tokens: float,
    engines: Engines,
    model: ModelShape,
    cluster: Cluster,
    *,
    rng: Generator,
) -> SimulatedRollout:
    """Return a rollout of at most `window` tokens per response (T-PPO): the mean of several iterations after a burn-in.

    Slots stay full: in the next iteration a new response replaces one that ended, and one that was cut continues after
    its earlier tokens are prefilled again.

    draw    lengths of whole responses
    """
    own = [
        decode_in_windows(draw, engines.slots, window, rng, steps=WINDOW_STEPS, burn_in=WINDOW_BURN_IN)
        for _ in range(engines.num_engines)
    ]
    context = prompt_tokens + mean_context(draw(1000, rng))
    cost = decode_cost(model, cluster, engines.ranks, context)
    seconds = [cost.seconds(item.decode_steps, item.tokens) / WINDOW_STEPS for item in own]
    slowest = int(np.argmax(seconds))
    decoded = own[slowest]
    fed_again = 0.0
    if decoded.continued:
        again = np.full(decoded.continued, round(decoded.fed_again / decoded.continued + prompt_tokens))
        fed_again = prefill_seconds(model, cluster, engines.ranks, again) / WINDOW_STEPS
    fresh = np.full(decoded.slots - decoded.continued, round(prompt_tokens))
    return SimulatedRollout(
        decode=seconds[slowest],
        prefill=prefill_seconds(model, cluster, engines.ranks, fresh) / WINDOW_STEPS,
        fed_again=fed_again,
        tokens=round(sum(each.tokens for each in own) / WINDOW_STEPS),
        idle=float(np.mean([each.idle(engines.slots) for each in own])),
    )
