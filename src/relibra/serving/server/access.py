"""Who may ask: API keys, and the client that a request counts for."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request

from relibra.errors import ConfigError
from relibra.rl.rollout.served.api_key import is_key, place_of_key, read_key_text
from relibra.serving.server.refusals import WrongKey


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


class AccessList:
    """Keys that open a server."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        """Keep the digests of keys; without keys everybody may ask."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def client_of(self, request: Request) -> str:
        """Return the name that a request counts for in the queue: its key, or where there are none its address.

        raises   WrongKey
        """
        if not self._digests:
            return request.client.host if request.client else "?"
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1", "replace")).digest()
        found = [number for number, one in enumerate(self._digests) if hmac.compare_digest(one, digest)]
        if kind.lower() != "bearer":
            raise WrongKey("this server asks for a key: send the header Authorization: Bearer KEY")
        if not found:
            raise WrongKey("the key of the header Authorization is none of this server's: ask its operator for one")
        return f"key {found[0]}"
