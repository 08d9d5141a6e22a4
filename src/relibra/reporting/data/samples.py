"""`Samples`: responses that a run wrote down for people to read, as a reader can trust them.

A row is a JSON object on a line of its own. Whoever trained the policy decides what its texts say, so they are cut to a
length that a page can hold, and signs that only steer a terminal are shown as pictures of themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relibra.reporting.data.metrics import number
from relibra.reporting.data.summary import evenly_chosen

MAX_STEPS = 40
"""Steps that a page shows samples of: first, last, and some evenly chosen between them."""

MAX_OF_A_STEP = 24
MAX_CHARACTERS = 6_000
"""Of a text; of a longer one two thirds are kept from its start, one third from its end."""

_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response; whatever the row lacked is None, texts that it lacked are empty."""

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
    """Responses of some steps, by step and as they were written.

    num_steps    steps that the file has samples of, those left out too
    unreadable   lines that hold no sample, the cut last one not counted
    """

    of_steps: tuple[Sample, ...] = ()
    num_steps: int = 0
    unreadable: int = 0

    @property
    def steps(self) -> list[int]:
        """Steps that are shown, each once."""
        return list(dict.fromkeys(sample.step for sample in self.of_steps))


def read_samples(path: Path) -> Samples:
    """Read a samples file; one that does not exist has none. A file larger than memory is no problem."""
    if not path.is_file():
        return Samples()
    places: dict[int, list[int]] = {}
    unreadable = 0
    with path.open("rb") as file:
        for place, line in _lines(file):
            row = _row(line)
            if row is not None:
                places.setdefault(row["step"], []).append(place)
            elif line.strip() and line.endswith(b"\n"):
                unreadable += 1
        steps = sorted(places)
        chosen = [steps[i] for i in evenly_chosen(len(steps), MAX_STEPS)]
        found: list[Sample] = []
        for step in chosen:
            for place in places[step][-MAX_OF_A_STEP:]:
                file.seek(place)
                row = _row(file.readline())
                assert row is not None, "the line was read before"
                found.append(_sample(row))
    return Samples(of_steps=tuple(found), num_steps=len(steps), unreadable=unreadable)


def shortened(text: str) -> str:
    """Cut the middle out of a text that a page cannot hold, and say how much.

    >>> shortened("a" * 7000)[3998:4039]
    'aa\\n[... 1,000 characters left out ...]\\naa'
    """
    if len(text) > MAX_CHARACTERS:
        head, tail = 2 * MAX_CHARACTERS // 3, MAX_CHARACTERS // 3
        text = f"{text[:head]}\n[... {len(text) - head - tail:,} characters left out ...]\n{text[-tail:]}"
    return text.translate(_PICTURES)


def _lines(file: Any) -> Iterator[tuple[int, bytes]]:
    place = 0
    for line in file:
        yield place, line
        place += len(line)


def _row(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _whole(row.get("step")) is not None else None


def _sample(row: Mapping[str, Any]) -> Sample:
    step, finish = _whole(row.get("step")), row.get("finish")
    assert step is not None, "a row has a step"
    return Sample(
        step=step,
        number=_whole(row.get("sample")),
        prompt=shortened(_text(row.get("prompt"))),
        response=shortened(_text(row.get("response"))),
        reward=number(row.get("reward")),
        tokens=_whole(row.get("tokens")),
        finish=finish[:40] if isinstance(finish, str) else "",
        windows=_whole(row.get("windows")),
    )


def _text(value: object) -> str:
    """Return a text, or chat messages as a person reads them."""
    if isinstance(value, list):
        messages = [message for message in value if isinstance(message, dict)]
        return "\n\n".join(f"[{message.get('role', '')}]\n{message.get('content', '')}" for message in messages)
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
    return value if is_whole else None  # type: ignore[return-value]
