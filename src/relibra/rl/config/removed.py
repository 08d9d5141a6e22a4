"""Settings of earlier versions, and what stands for each today: files of then are read, or refused with that name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    """A setting that is gone.

    kept      values that runs of earlier versions hold and that are still what happens: they are left out
    instead   the setting to use for another value, or why there is none
    """

    kept: tuple[Any, ...]
    instead: str


REMOVED: Mapping[str, Removed] = {
    "algorithm.ratio": Removed(("token",), "algorithm.loss=gspo has one ratio per response, the others one per token"),
    "plan.objective": Removed(("seconds",), "plan.balancer=relibra_paper_tokens evens token-slots out"),
    "plan.static_rows": Removed((False,), "is gone: with plan.pack=true loads are even"),
}


def kept_values(name: str, settings: Mapping[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the values of a removed setting with which a file of an earlier version means what it says today."""
    algorithm = settings.get("algorithm", {})
    if name == "algorithm.ratio" and algorithm.get("loss", algorithm.get("preset")) == "gspo":
        return ("sequence",)
    return REMOVED[name].kept
