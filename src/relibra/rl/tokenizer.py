"""One token per character: all that the built-in tasks need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from relibra.errors import ConfigError

PADDING = "\N{SYMBOL FOR NULL}"
"""How decoded padding looks."""


@dataclass(frozen=True)
class CharacterTokenizer:
    """Token id = place of the character in `characters`, plus one; 0 pads, `stop` ends a response."""

    characters: str
    stop: str

    pad_id = 0

    @property
    def vocab_size(self) -> int:
        """Ids in use, padding included."""
        return len(self.characters) + 1

    @property
    def stop_id(self) -> int:
        """Id of the character that ends a response."""
        return self.characters.index(self.stop) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; raises ConfigError at a character without one."""
        unknown = set(text) - set(self.characters)
        if unknown:
            raise ConfigError(f"no token for {sorted(unknown)} in {text!r}: known characters are {self.characters!r}")
        return [self.characters.index(character) + 1 for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; padding shows as a character of its own, for a policy may sample it."""
        return "".join(self.characters[i - 1] if i != self.pad_id else PADDING for i in ids)
