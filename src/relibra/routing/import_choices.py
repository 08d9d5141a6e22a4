"""What the user of an import chooses: format, and what is done with rows that were not recorded. Loads no numpy."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """What recorded the routes."""

    ANSWERS = "answers"
    VERL = "verl"
    SLIME = "slime"
    SKYRL = "skyrl"
    NEMO_RL = "nemo-rl"
    PRIME_RL = "prime-rl"
    MEGATRON = "megatron"
    SGLANG_RECORDER = "sglang-recorder"


class ZeroRows(StrEnum):
    """What is done with rows that are zero in every layer: an engine did not record them."""

    REFUSE = "refuse"
    MISSING = "missing"
    DROP_SAMPLE = "drop-sample"


class ShortRows(StrEnum):
    """Which tokens lack a row where a sample has fewer rows than tokens that were processed."""

    REFUSE = "refuse"
    FIRST = "first"
    LAST = "last"
