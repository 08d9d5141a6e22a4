"""`Response`: one answer to one prompt, finished or not, with all that training needs to know of how it came about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped
from numpy import ndarray

from relibra.routing.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """What an engine added to a response in one step.

    tokens_w       new tokens; empty where the engine had nothing to add
    log_probs_w    of each under the policy that sampled it, tempered
    experts_mLK    logical ids of every position fed, from the first token of the prompt on, under the weights of this
                   step; one row less than tokens, for the last one was never fed. None: a model without experts
    stopped        the response ended itself
    """

    tokens_w: Int64[ndarray, " w"]
    log_probs_w: Float32[ndarray, " w"]
    experts_mLK: Shaped[ndarray, "m L K"] | None
    stopped: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """A prompt with as much of a response as there is.

    sample_id        which response of the run; the prompt's number x responses per prompt + its place among them
    group_id         number of its prompt
    tokens_n         prompt, then response
    prompt_length    tokens of the prompt
    log_probs_r      of each response token under the policy that sampled it
    versions_r       of the weights that sampled each response token
    values_r         what the value model said before each token when that was sampled; nan where it was not asked
    experts_nLK      logical ids; row t = routing while processing token t, all under the weights of the last window
                     (the prefix was fed again); the last row was never computed. None: no experts
    windows          steps that added to it
    window_length    tokens of the last window
    finish_reason    `stop`: ended itself; `length`: reached the longest response allowed; None: goes on
    reward           of a finished response; None: not known
    """

    sample_id: int
    group_id: int
    tokens_n: Int64[ndarray, " n"]
    prompt_length: int
    log_probs_r: Float32[ndarray, " r"]
    versions_r: Int32[ndarray, " r"]
    values_r: Float32[ndarray, " r"]
    experts_nLK: Shaped[ndarray, "n L K"] | None = None
    windows: int = 0
    window_length: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    reward: float | None = None

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.log_probs_r)

    @property
    def window_start(self) -> int:
        """Place of the first token of the last window in `tokens_n`."""
        return len(self.tokens_n) - self.window_length

    def extended(self, window: Window, *, weight_version: int, max_response: int) -> Response:
        """Return the response with a window more.

        weight_version   of the policy that sampled the window
        max_response     at so many tokens a response is finished
        """
        added = len(window.tokens_w)
        length = self.length + added
        assert added > 0, f"sample {self.sample_id}: an empty window"
        assert length <= max_response, f"sample {self.sample_id}: {length} response tokens of at most {max_response}"
        cut: Literal["length"] | None = "length" if length == max_response else None
        return replace(
            self,
            tokens_n=np.concatenate([self.tokens_n, window.tokens_w]),
            log_probs_r=np.concatenate([self.log_probs_r, window.log_probs_w]),
            versions_r=np.concatenate([self.versions_r, np.full(added, weight_version, np.int32)]),
            values_r=np.concatenate([self.values_r, np.full(added, np.nan, np.float32)]),
            experts_nLK=None if window.experts_mLK is None else with_last_row(window.experts_mLK),
            windows=self.windows + 1,
            window_length=added,
            finish_reason="stop" if window.stopped else cut,
        )


def new_response(sample_id: int, group_id: int, prompt: Sequence[int]) -> Response:
    """Return a response without a token yet."""
    none = np.zeros(0, dtype=np.float32)
    return Response(
        sample_id=sample_id,
        group_id=group_id,
        tokens_n=np.array(prompt, dtype=np.int64),
        prompt_length=len(prompt),
        log_probs_r=none,
        versions_r=none.astype(np.int32),
        values_r=none,
    )


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """What a rollout took on one rank.

    decode_steps       rounds that added one token to every response under way
    passes             forward passes: decode steps, pieces of prefills, refills; None: a server does not say
    slot_steps         decode steps x places for responses; a place is taken, or idle because its response has ended
    busy_slot_steps    those that were taken
    prefilled_tokens   tokens fed before the first new one of each response, those of earlier windows included
    """

    decode_steps: int
    passes: int | None
    slot_steps: int
    busy_slot_steps: int
    prefilled_tokens: int


@runtime_checkable
class RolloutEngine(Protocol):
    """What the trainer asks of any engine, embedded or served.

    The engine holds the weights of one version; a weight sync replaces them, and whatever it has cached goes with them.
    """

    def generate(
        self,
        responses: Sequence[Response],
        *,
        window: int,
        max_response: int,
        spare: Iterator[Response] | None = None,
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; one window each, in their order.

        What is sampled follows from the run's seed, the sample's id and the token's place, whoever shares the batch.

        spare   responses that may begin in places of others that have ended (`rollout.refill`), while there is time for
                a window of use, in `window` decode steps. Those that are drawn begin, and their windows follow the
                others; None: places stay idle
        """
        ...


def trace_of(responses: Sequence[Response], *, num_experts: int, layer_ids: Sequence[int], source: str) -> RoutingTrace:
    """Gather the routes of responses; the last row of each is marked invalid.

    raises    TraceError when an engine delivered illegal routes
    """
    routes = [response.experts_nLK for response in responses]
    return RoutingTrace.from_samples(
        [experts_nLK for experts_nLK in routes if experts_nLK is not None],
        num_experts=num_experts,
        layer_ids=layer_ids,
        valid=[_all_but_last(len(response.tokens_n)) for response in responses],
        tokens=[response.tokens_n for response in responses],
        sample_ids=[response.sample_id for response in responses],
        group_ids=[response.group_id for response in responses],
        prompt_lengths=[response.prompt_length for response in responses],
        weight_versions=[int(response.versions_r[-1]) for response in responses],
        source=source,
    )


def with_last_row(experts_mLK: Shaped[ndarray, "m L K"]) -> Shaped[ndarray, "n L K"]:
    """Add a row of legal ids for the last token, which never was fed."""
    _, L, K = experts_mLK.shape
    filler_1LK = np.broadcast_to(np.arange(K, dtype=experts_mLK.dtype), (1, L, K))
    return np.concatenate([experts_mLK, filler_1LK])


def _all_but_last(rows: int) -> ndarray:
    return np.arange(rows) < rows - 1
