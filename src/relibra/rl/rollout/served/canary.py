"""The canary: log-probs of a server against those of the trainer, and the rules that name what is wrong.

No single threshold finds all faults. Mean absolute difference with vLLM 0.29.0: both in float32 1e-7, a bfloat16 server
1e-3 to 1e-2, weights of the step before 1e-2, log-probs without temperature 1e-2, corrupted experts 2 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.rl.rollout.served.dialects import Dialect

LARGEST_DIFFERENCE = 0.2
"""Mean absolute difference that no rounding explains."""
LARGEST_EXACT_DIFFERENCE = 1e-3
"""The same where server and trainer both compute in float32."""
FEWEST_EQUAL_ROUTES = 0.5
"""Share of (token, layer) whose experts have to be equal."""
STANDARD_ERRORS = 4.0
"""An update counts as not made where the share made of it is below one half by so many."""

_NOT_LOADED = (
    "it did not load what was published: it has to read the folder under the same path (rollout.server_weights), and "
    "to serve this run alone"
)
_CORRUPTS: dict[Dialect, str] = {
    "sglang": "the reload corrupts weights, or it serves another model",
    "vllm": "the reload corrupts weights (on a CPU, vLLM needs the plug-in of relibra for experts; on GPUs see "
    "vllm#48312), or it serves another model",
}
_TEMPERS: dict[Dialect, str] = {
    "sglang": "start it without the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB",
    "vllm": "start it with --logprobs-mode processed_logprobs",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class CanaryScores:
    """Log-probs of a server, and of the trainer with the weights just published.

    served_T     of given tokens at temperature 1, computed without the server's cache
    trained_T    the same by the trainer
    earlier_T    the same under weights that the server had before, by their version
    first_T      of the server itself before the run published anything; None: at later updates
    sampled_S    of tokens that the server sampled after sequences in its cache, at `temperature`
    tempered_S   of these by the trainer at that temperature
    raw_S        of these by the trainer at temperature 1
    equal_routes share of (token, layer) with the same experts on both sides; None: not compared
    exact        server and trainer both compute in float32
    dialect      of the server, for what to do
    """

    served_T: Float64[ndarray, " T"]
    trained_T: Float64[ndarray, " T"]
    sampled_S: Float64[ndarray, " S"]
    tempered_S: Float64[ndarray, " S"]
    raw_S: Float64[ndarray, " S"]
    temperature: float
    exact: bool
    equal_routes: float | None = None
    earlier_T: Mapping[int, Float64[ndarray, " T"]] = field(default_factory=dict)
    first_T: Float64[ndarray, " T"] | None = None
    dialect: Dialect = "vllm"

    @property
    def difference(self) -> float:
        """Mean absolute difference of given tokens."""
        return _distance(self.served_T, self.trained_T)

    @property
    def sampled_difference(self) -> float:
        """Mean absolute difference of sampled tokens."""
        return _distance(self.sampled_S, self.tempered_S)

    @property
    def limit(self) -> float:
        """Largest difference that passes."""
        return LARGEST_EXACT_DIFFERENCE if self.exact else LARGEST_DIFFERENCE


@dataclass(frozen=True)
class ShareMade:
    """How far a server has gone from one set of log-probs to another: 0 not at all, 1 all the way.

    error   standard error of the share; infinite where the two sets are equal
    """

    share: float
    error: float

    @property
    def is_unmade(self) -> bool:
        """Whether the server is clearly nearer to where it came from."""
        return self.share + STANDARD_ERRORS * self.error < 0.5

    @property
    def is_made(self) -> bool:
        """Whether the server is clearly nearer to where it should be."""
        return self.share - STANDARD_ERRORS * self.error > 0.5


def share_made(served_T: ndarray, before_T: ndarray, after_T: ndarray) -> ShareMade:
    """Return the least-squares share of the way from `before` to `after`; noise of the server widens its error.

    >>> share_made(np.array([1.0, 2.0]), np.array([1.0, 2.0]), np.array([1.5, 2.5])).is_unmade
    True
    """
    way_T, gone_T = after_T - before_T, served_T - before_T
    squared = float(way_T @ way_T)
    if squared == 0.0 or not np.isfinite(gone_T).all():
        return ShareMade(1.0, math.inf)
    share = float(gone_T @ way_T) / squared
    rest_T = gone_T - share * way_T
    return ShareMade(share, math.sqrt(float(rest_T @ rest_T) / max(1, len(way_T) - 1) / squared))


def find_fault(scores: CanaryScores) -> str | None:
    """Return what is wrong with a server after an update of its weights, in words; None: nothing.

    Earlier weights, or temperature 1, are named where their log-probs fit, and clearly better than the right ones.
    """
    for version, earlier_T in scores.earlier_T.items():
        unmade = share_made(scores.served_T, earlier_T, scores.trained_T).is_unmade
        if unmade and _distance(scores.served_T, earlier_T) <= scores.limit:
            return f"it still computes with the weights of version {version}: {_NOT_LOADED}"
    if not scores.difference <= scores.limit:
        text = (
            f"its log-probs differ from the trainer's by {scores.difference:.2g} on average, and rounding explains "
            f"{scores.limit:g}: "
        )
        unchanged = scores.first_T is not None and np.abs(scores.served_T - scores.first_T).mean() <= scores.limit / 10
        text += f"they did not change with the update. {_NOT_LOADED}; or " if unchanged else ""
        return text + _CORRUPTS[scores.dialect]
    untempered = share_made(scores.sampled_S, scores.raw_S, scores.tempered_S).is_unmade
    if scores.temperature != 1.0 and untempered and _distance(scores.sampled_S, scores.raw_S) <= scores.limit:
        return (
            f"its log-probs are those of temperature 1, not of rollout.temperature {scores.temperature:g}: "
            f"{_TEMPERS[scores.dialect]}"
        )
    if not scores.sampled_difference <= scores.limit:
        return (
            f"its log-probs after cached tokens differ from the trainer's by {scores.sampled_difference:.2g} on "
            f"average, and without its cache by {scores.difference:.2g}: it kept keys and values of earlier weights"
        )
    if scores.equal_routes is not None and scores.equal_routes < FEWEST_EQUAL_ROUTES:
        return (
            f"only {scores.equal_routes:.0%} of its routes are the trainer's, although log-probs agree: it reports "
            "routes of other tokens or layers"
        )
    return None


def _distance(one_T: ndarray, other_T: ndarray) -> float:
    return float(np.abs(one_T - other_T).mean()) if len(one_T) else math.nan
