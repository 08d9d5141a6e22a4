"""`ServiceLevel`: what requests look like and how fast they have to be answered."""

from __future__ import annotations

from dataclasses import dataclass

from relibra.errors import ConfigError

LEAST_SECONDS, MOST_SECONDS = 1e-6, 1e4
"""Range of the time per token."""


@dataclass(frozen=True, kw_only=True)
class ServiceLevel:
    """Load and limit of a deployment.

    seconds_per_token    most time between two tokens of a request (`SLO` of Eq. 7)
    context              mean tokens of a request while it decodes, prompt and response so far
    expert_skew          rows of the busiest expert node / rows of the mean node; 1: even
    raises               ConfigError for values out of range
    """

    seconds_per_token: int | float
    context: int | float
    expert_skew: int | float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        for key, least, most in (
            ("seconds_per_token", LEAST_SECONDS, MOST_SECONDS),
            ("context", 1.0, 1e9),
            ("expert_skew", 1.0, 1e6),
        ):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigError(f"service level has {key} {value!r}: allowed are {least:g} to {most:g}")
