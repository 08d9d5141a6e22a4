"""`Response`: a prompt with the tokens sampled so far, their log-probs, values and routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped
from numpy import ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Tokens that an engine added to a response in one step.

    tokens_w       new tokens; empty where the engine had nothing to add
    log_probs_w    of each under the tempered policy that sampled it, or that scored it anew (`rescored_v`)
    experts_mLK    logical ids of every token fed, prompt included, so all but the last, under the weights of this step;
                   where keys and values are kept, under those that fed the token. None: a model without experts
    stopped        the response ended itself
    versions_w     of the weights that sampled each; None: one version, which the caller knows
    cut            an update of the weights ended it early: it has no routes, and goes on under the new weights
    rescored_v     log-probs of earlier parts of the window, under the weights of this one; None: not asked for
    """

    tokens_w: Int64[ndarray, " w"]
    log_probs_w: Float32[ndarray, " w"]
    experts_mLK: Shaped[ndarray, "m L K"] | None
    stopped: bool
    versions_w: Int32[ndarray, " w"] | None = None
    cut: bool = False
    rescored_v: Float32[ndarray, " v"] | None = None

    def followed_by(self, other: Window) -> Window:
        """Return both as one; routes are those of `other`, for which all tokens before it were fed again.

        Both have versions.
        """
        assert self.versions_w is not None, "a part has versions"
        assert other.versions_w is not None, "a part has versions"
        earlier_v = self.log_probs_w if other.rescored_v is None else other.rescored_v
        return replace(
            other,
            tokens_w=np.concatenate([self.tokens_w, other.tokens_w]),
            log_probs_w=np.concatenate([earlier_v, other.log_probs_w]),
            versions_w=np.concatenate([self.versions_w, other.versions_w]),
            rescored_v=None,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """A prompt and its response so far.

    sample_id        number of the response in the run: prompt number x responses per prompt + index among them
    group_id         number of its prompt
    tokens_n         prompt, then response
    prompt_length    tokens of the prompt
    log_probs_r      of each response token under the policy that sampled it, or scored it anew (`Window.rescored_v`)
    versions_r       of the weights that sampled each response token
    values_r         before each token, by the value model of the step of its window; nan where not recorded
    experts_mLK      logical ids; row t = routing while processing token t, under the weights of the last token (what
                     came before was fed again), or those that fed it, where keys and values are kept; no row for the
                     last token. None: no experts, or not kept
    windows          steps that added tokens to it
    window_length    tokens of the last window
    finish_reason    `stop`: ended itself; `length`: reached the longest response allowed; None: unfinished
    reward           of a finished response; None: not known
    """

    sample_id: int
    group_id: int
    tokens_n: Int64[ndarray, " n"]
    prompt_length: int
    log_probs_r: Float32[ndarray, " r"]
    versions_r: Int32[ndarray, " r"]
    values_r: Float32[ndarray, " r"]
    experts_mLK: Shaped[ndarray, "m L K"] | None = None
    windows: int = 0
    window_length: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    reward: float | None = None

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.log_probs_r)

    @property
    def in_window_r(self) -> Bool[ndarray, " r"]:
        """Mask of the response tokens of the last window."""
        return np.arange(self.length) >= self.length - self.window_length

    @property
    def mixed_r(self) -> Bool[ndarray, " r"]:
        """Mask of response tokens of earlier weights than the last token's; later weights may have routed them."""
        return self.versions_r != self.versions_r[-1:]

    def extended(self, window: Window, *, weight_version: int, max_response: int) -> Response:
        """Return the response one window longer.

        weight_version   of the policy that sampled the window, where the window does not say it
        max_response     tokens at which a response is finished
        """
        added = len(window.tokens_w)
        length = self.length + added
        assert added > 0, f"sample {self.sample_id}: an empty window"
        assert length <= max_response, f"sample {self.sample_id}: {length} response tokens of at most {max_response}"
        full: Literal["length"] | None = "length" if length == max_response else None
        versions_w = np.full(added, weight_version, np.int32) if window.versions_w is None else window.versions_w
        return replace(
            self,
            tokens_n=np.concatenate([self.tokens_n, window.tokens_w]),
            log_probs_r=np.concatenate([self.log_probs_r, window.log_probs_w]),
            versions_r=np.concatenate([self.versions_r, versions_w]),
            values_r=np.concatenate([self.values_r, np.full(added, np.nan, np.float32)]),
            experts_mLK=window.experts_mLK,
            windows=self.windows + 1,
            window_length=added,
            finish_reason="stop" if window.stopped else full,
        )


def new_response(sample_id: int, group_id: int, prompt: Sequence[int]) -> Response:
    """Return a response without any response token."""
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
    """Work of a rollout on one rank.

    decode_steps       rounds that added one token to every response under way
    passes             forward passes: decode steps, pieces of prefills, refills; None: a server, which reports none
    slot_steps         decode steps x slots for responses; a slot is idle when its response has ended
    busy_slot_steps    those that were not idle
    prefilled_tokens   tokens fed before the first new one of each response, earlier windows included
    mixed_tokens       tokens sampled over keys and values of earlier weights (`rollout.on_update="keep"`)
    """

    decode_steps: int
    passes: int | None
    slot_steps: int
    busy_slot_steps: int
    prefilled_tokens: int
    mixed_tokens: int = 0


@runtime_checkable
class RolloutEngine(Protocol):
    """Interface of rollout engines, embedded or served.

    The engine holds one version of the weights; a sync replaces it, and drops caches unless `rollout.on_update="keep"`.
    """

    def generate(
        self, responses: Sequence[Response], *, window: int, max_response: int, spare: Iterator[Response] | None = None
    ) -> tuple[list[Window], RolloutCost]:
        """Add up to `window` tokens to each response, none beyond `max_response`; one window each, in their order.

        Tokens follow from the run's seed, the sample's id and the token's position, not from the rest of the batch.

        spare   responses that may begin in slots of others that have ended (`rollout.refill`), while enough of the
                `window` decode steps are left. Those taken from the iterator begin, and their windows follow the
                others; None: slots stay idle
        """
        ...
