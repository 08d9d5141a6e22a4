"""Keys of servers, from a file or an environment variable; they are no settings, so no run folder holds them."""

from __future__ import annotations

from pathlib import Path

from relibra.environment import environment_value
from relibra.errors import ConfigError

_MAX_BYTES = 1 << 16


def read_api_key(source: str) -> str:
    """Return the key that `rollout.api_key_from` names; empty for none.

    source    env:NAME or file:PATH; empty: the server asks for none
    raises    ConfigError where there is no key, or one that no header may hold
    """
    if not source:
        return ""
    key = read_key_text(source, "rollout.api_key_from").strip()
    if not is_key(key):
        raise ConfigError(
            f"rollout.api_key_from {source!r}: {place_of_key(source)} holds no key (one line of printable ASCII "
            "characters without spaces); set it to what the server was started with (--api-key)"
        )
    return key


def read_key_text(source: str, setting: str) -> str:
    """Return the text in which the keys of a setting stand.

    source    env:NAME or file:PATH
    raises    ConfigError for another source, and for a file that cannot be read
    """
    kind, _, name = source.partition(":")
    if kind == "env" and name:
        return environment_value(name)
    if kind != "file" or not name:
        raise ConfigError(f"{setting} is env:NAME of an environment variable, or file:PATH, not the key itself")
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{setting} {source!r}: cannot read {path}: {error.strerror}") from error


def place_of_key(source: str) -> str:
    """Return what env:NAME or file:PATH names, for a message."""
    kind, _, name = source.partition(":")
    return f"the environment variable {name}" if kind == "env" else f"the file {name}"


def is_key(text: str) -> bool:
    """Return whether a header may hold a text as a key."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text
