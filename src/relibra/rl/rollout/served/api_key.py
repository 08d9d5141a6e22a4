"""The key of a server, from a file or an environment variable; it is no setting, so no run folder holds it."""

from __future__ import annotations

from pathlib import Path

from relibra.environment import environment_value
from relibra.errors import ConfigError

_MAX_BYTES = 4096


def read_api_key(source: str) -> str:
    """Return the key that `rollout.api_key_from` names; empty for none.

    source    env:NAME or file:PATH; empty: the server asks for none
    raises    ConfigError where there is no key, or one that no header may hold
    """
    kind, _, name = source.partition(":")
    if not source:
        return ""
    if kind == "env":
        key = environment_value(name).strip()
    else:
        path = Path(name).expanduser()
        try:
            with path.open("rb") as file:
                key = file.read(_MAX_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise ConfigError(f"rollout.api_key_from {source!r}: cannot read {path}: {error.strerror}") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        where = f"the environment variable {name}" if kind == "env" else f"the file {name}"
        raise ConfigError(
            f"rollout.api_key_from {source!r}: {where} holds no key (one line of printable ASCII characters without "
            "spaces); set it to what the server was started with (--api-key)"
        )
    return key
