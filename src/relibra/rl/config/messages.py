"""What a refused configuration says: all mistakes at once, where each was given, and what may have been meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from relibra.printable import excerpt

MAX_SHOWN = 160
"""Characters of a value in a message."""
MAX_MISTAKES = 8
"""Mistakes that one message tells."""

Origin = Mapping[tuple[str, ...], str]
"""Where the settings of overrides come from, by their keys."""


def describe_mistakes(error: ValidationError, source: str, origin: Origin, schema: type[BaseModel]) -> str:
    """Return one sentence for one mistake, and a numbered list in one line for several.

    source   of the settings that no override gave
    """
    said = [_describe(dict(one), source, origin, schema) for one in error.errors()]
    mistakes = list(dict.fromkeys(said))
    if len(mistakes) == 1:
        return mistakes[0]
    listed = "; ".join(f"({number}) {text}" for number, text in enumerate(mistakes[:MAX_MISTAKES], start=1))
    left = len(mistakes) - MAX_MISTAKES
    return f"{len(mistakes)} mistakes in the settings: {listed}" + (f"; and {left} more" if left > 0 else "")


def _describe(mistake: Mapping[str, Any], source: str, origin: Origin, schema: type[BaseModel]) -> str:
    key = tuple(str(part) for part in mistake["loc"])
    between_settings = mistake["type"] == "value_error"  # a rule of ours: its message names the settings
    message = mistake["msg"].removeprefix("Value error, ")
    overrides = [
        override
        for name, override in origin.items()
        if name[: len(key)] == key[: len(name)] and (not between_settings or name[-1] in message)
    ]
    where = " and ".join(overrides) or source
    name = ".".join(key) or "the configuration"
    if mistake["type"] == "extra_forbidden":
        meant = _nearest_setting(key, schema)
        return f"{name} is not a setting (in {where}){_question(meant)}; allowed here: {', '.join(_names(key, schema))}"
    got = "" if between_settings else f", got {excerpt(mistake['input'], MAX_SHOWN)}"
    meant = _nearest(mistake["input"], re.findall(r"'([^']*)'", message)) if mistake["type"] == "literal_error" else ""
    return f"{name}{got} (in {where}): {message[0].lower()}{message[1:]}{_question(meant)}"


def _question(meant: str) -> str:
    return f": did you mean {meant}?" if meant else ""


def _sections(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Return the names of the settings of each section."""
    return {
        name: list(field.annotation.model_fields)
        for name, field in schema.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _names(key: tuple[str, ...], schema: type[BaseModel]) -> list[str]:
    """Return the names that are allowed beside an unknown key."""
    sections = _sections(schema)
    return list(sections) if len(key) == 1 else sections[key[0]]


def _nearest_setting(key: tuple[str, ...], schema: type[BaseModel]) -> str:
    """Return the setting that an unknown key may stand for: of the same name elsewhere, or of a similar name."""
    sections = _sections(schema)
    if len(key) == 1:
        places = [f"{section}.{name}" for section, names in sections.items() for name in names if name == key[0]]
        return _nearest(key[0], list(sections)) or next(iter(places), "")
    section, name = key[0], key[-1]
    elsewhere = [f"{other}.{name}" for other, names in sections.items() if name in names]
    near = _nearest(name, sections[section])
    return elsewhere[0] if elsewhere else f"{section}.{near}" if near else ""


def _nearest(given: object, allowed: Sequence[str]) -> str:
    """Return the allowed name that is most like a given one, in letters of either case; "": none is."""
    if not isinstance(given, str):
        return ""
    lowered = {name.lower(): name for name in allowed}
    found = get_close_matches(given.lower()[:MAX_SHOWN], list(lowered), n=1)
    return lowered[found[0]] if found else ""
