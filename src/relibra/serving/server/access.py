"""Who may ask: API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from fastapi import HTTPException, Request

from relibra.errors import ConfigError
from relibra.rl.rollout.served.api_key import is_key, place_of_key, read_key_text


def read_api_keys(source: str) -> tuple[str, ...]:
    """Return the keys of a server; none: it asks for none.

    source   env:NAME of an environment variable, or file:PATH of a file with one key per line; empty: none
    raises   ConfigError where there is no key, or one that no header may hold
    """
    if not source:
        return ()
    text = read_key_text(source, "--api-key-from")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or not all(map(is_key, keys)):
        state = "holds something that is no key" if keys else "is not set, or empty"
        raise ConfigError(
            f"--api-key-from {source}: {place_of_key(source)} {state}: it holds one key per line, of printable ASCII "
            "characters without spaces"
        )
    return keys


def key_check(keys: tuple[str, ...]) -> Callable[[Request], None]:
    """Return what raises HTTPException (401) for a request without one of the keys; without keys everybody may ask."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        found = [known for known in digests if hmac.compare_digest(known, digest)]
        message = "the key of the header Authorization is none of this server's: ask its operator for one"
        if kind.lower() != "bearer":
            message = "this server asks for a key: send the header Authorization: Bearer KEY"
        if digests and (kind.lower() != "bearer" or not found):
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})

    return check
