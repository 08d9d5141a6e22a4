"""`Samples`: responses that a run saved for people to read.

A row is a JSON object on a line of its own. Its texts are untrusted: they are cut to a length that a page can hold, and
control characters other than newline and tab are shown as their Unicode pictures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relibra.printable import cut_middle
from relibra.reporting.data.metrics import finite_number, iterate_rows, whole_number
from relibra.reporting.data.summary import evenly_chosen

MAX_STEPS = 40
"""Steps that a page shows samples of: first, last, and some evenly chosen between them."""

MAX_OF_A_STEP = 24  # the last ones of the step
MAX_CHARACTERS = 6_000
"""Longest text; of a longer one the middle is left out."""

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response; a number that the row lacks is None, a text that it lacks is empty."""

    step: int
    number: int | None
    prompt: str
    response: str
    reward: float | None
    tokens: int | None
    finish: str
    windows: int | None


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Responses of some steps, in order of step and file.

    num_steps    steps that the file has samples of, shown or not
    unreadable   lines that hold no sample, an unfinished last one not counted
    """

    of_steps: tuple[Sample, ...] = ()
    num_steps: int = 0
    unreadable: int = 0

    @property
    def steps(self) -> list[int]:
        """The shown steps, each once."""
        return list(dict.fromkeys(sample.step for sample in self.of_steps))


def read_samples(path: Path) -> Samples:
    """Read a samples file line by line; one that does not exist has no samples."""
    steps: set[int] = set()
    unreadable = 0
    for row in iterate_rows(path):
        if row is None:
            unreadable += 1
        else:
            steps.add(row["step"])
    ordered = sorted(steps)
    chosen = [ordered[i] for i in evenly_chosen(len(ordered), MAX_STEPS)] if ordered else []
    last: dict[int, deque[Sample]] = {step: deque(maxlen=MAX_OF_A_STEP) for step in chosen}
    for row in iterate_rows(path):
        if row is not None and row["step"] in last:
            last[row["step"]].append(_sample(row))
    of_steps = tuple(sample for samples in last.values() for sample in samples)
    return Samples(of_steps=of_steps, num_steps=len(steps), unreadable=unreadable)


def _sample(row: Mapping[str, Any]) -> Sample:
    finish = row.get("finish")
    return Sample(
        step=row["step"],
        number=whole_number(row.get("sample")),
        prompt=_shown(row.get("prompt")),
        response=_shown(row.get("response")),
        reward=finite_number(row.get("reward")),
        tokens=whole_number(row.get("tokens")),
        finish=finish[:40] if isinstance(finish, str) else "",
        windows=whole_number(row.get("windows")),
    )


def _shown(value: object) -> str:
    """Return a text, cut to what a page can hold; of chat messages their roles and contents."""
    if isinstance(value, list):
        messages = [message for message in value if isinstance(message, dict)]
        value = "\n\n".join(f"[{message.get('role', '')}]\n{message.get('content', '')}" for message in messages)
    return cut_middle(value, MAX_CHARACTERS).translate(_PICTURES) if isinstance(value, str) else ""
