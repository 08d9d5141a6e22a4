"""Refusals of a configuration: all of them at once, where each value was given, and what may have been meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from relibra.errors import LONGEST_VALUE, ConfigError
from relibra.rl.config.settings import RunConfig

MAX_SHOWN = 8
"""Refusals in one message."""


def raise_all(refusals: Sequence[ConfigError]) -> None:
    """Raise the only refusal, or one error with all of them as its `causes`; return where there is none."""
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        listed = "; ".join(f"({number}) {one}" for number, one in enumerate(refusals[:MAX_SHOWN], start=1))
        left = len(refusals) - MAX_SHOWN
        together = ConfigError(
            f"{len(refusals)} mistakes in the settings",
            allowed=listed,
            next_step=f"and {left} more" if left > 0 else "",
        )
        together.causes = tuple(refusals)
        raise together


@dataclass(frozen=True)
class Sources:
    """Where settings were given, by section.key, and where all others were."""

    given: Mapping[str, str]
    elsewhere: str

    def of(self, *names: str) -> str:
        """Return where settings were given; a section stands for all of its settings."""
        places = [
            place
            for given, place in self.given.items()
            if any(f"{given}.".startswith(f"{name}.") or f"{name}.".startswith(f"{given}.") for name in names)
        ]
        return " and ".join(dict.fromkeys(places)) or self.elsewhere


def refusals_of_types(error: ValidationError, sources: Sources) -> list[ConfigError]:
    """Return what pydantic refuses: unknown settings, values of another type or out of range."""
    found = [_refusal(dict(one), sources) for one in error.errors()]
    return list({one.what: one for one in reversed(found)}.values())[::-1]  # a union has one for each of its types


def _refusal(mistake: Mapping[str, Any], sources: Sources) -> ConfigError:
    key = tuple(str(part) for part in mistake["loc"][:2])
    name, message, got = ".".join(key) or "the configuration", mistake["msg"], mistake["input"]
    where = sources.of(name)
    if mistake["type"] == "extra_forbidden":
        known = {section: list(type(part).model_fields) for section, part in RunConfig()}
        allowed = f"allowed here: {', '.join(known if len(key) == 1 else known[key[0]])}"
        meant = _nearest_setting(key, known)
        return ConfigError(f"{name} is not a setting", where=where, allowed=allowed, next_step=_question(meant))
    if mistake["type"] == "value_error":  # a check of ours, which says what it got: it may be a key, not to be shown
        where = "the command line" if where.startswith("override ") else where
        return ConfigError(name, where=where, allowed=message.removeprefix("Value error, "))
    meant = _nearest(got, re.findall(r"'([^']*)'", message)) if mistake["type"] == "literal_error" else ""
    allowed = message[0].lower() + message[1:]
    return ConfigError(name, got=got, where=where, allowed=allowed, next_step=_question(meant))


def _question(meant: str) -> str:
    return f"did you mean {meant}?" if meant else ""


def _nearest_setting(key: tuple[str, ...], known: Mapping[str, Sequence[str]]) -> str:
    """Return the setting that an unknown key may stand for: of the same name elsewhere, or of a similar name."""
    section, name = key[0], key[-1]
    elsewhere = next((f"{other}.{name}" for other, names in known.items() if name in names), "")
    if len(key) == 1:
        return _nearest(name, list(known)) or elsewhere
    near = _nearest(name, known[section])
    return elsewhere or (f"{section}.{near}" if near else "")


def _nearest(given: object, allowed: Sequence[str]) -> str:
    """Return the allowed name that is most like a given one, in letters of either case; "": none is."""
    if not isinstance(given, str):
        return ""
    lowered = {name.lower(): name for name in allowed}
    found = get_close_matches(given.lower()[:LONGEST_VALUE], list(lowered), n=1)
    return lowered[found[0]] if found else ""
