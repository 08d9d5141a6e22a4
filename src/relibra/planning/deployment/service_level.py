"""`ServiceLevel`: what requests look like and how fast they have to be answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import check_fields

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

    seconds_per_token: Annotated[int | float, Field(ge=LEAST_SECONDS, le=MOST_SECONDS)]
    context: Annotated[int | float, Field(ge=1, le=1e9)]
    expert_skew: Annotated[int | float, Field(ge=1, le=1e6)] = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        check_fields(ServiceLevel, vars(self), "service level", ConfigError)
