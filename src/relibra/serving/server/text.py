"""`TextCodec`: text to tokens and back, with the tokenizer of the served model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relibra.errors import ConfigError
from relibra.rl.model.tokenizer import ModelTokenizer


@dataclass(frozen=True, eq=False)
class TextCodec:
    """Tokenizer of a model.

    stop_ids     tokens that end an answer
    vocab_size   tokens that the model knows
    """

    tokenizer: Any
    stop_ids: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt; raises ConfigError where the model has no tokenizer."""
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer: send the prompt as a list of token ids")
        return self.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)


class TextStream:
    """Text of an answer that grows token by token, without halves of characters."""

    def __init__(self, codec: TextCodec) -> None:
        """Begin empty."""
        self._codec = codec
        self._tokens: list[int] = []
        self._told = 0
        self.text = ""

    def add(self, token: int) -> str:
        """Add a token; return the new text, empty while a character is incomplete."""
        self._tokens.append(token)
        self.text = self._codec.decode(self._tokens)
        if self.text.endswith("�"):
            return ""
        new, self._told = self.text[self._told :], len(self.text)
        return new

    def rest(self) -> str:
        """Return what has not been told yet, at the end of the answer."""
        new, self._told = self.text[self._told :], len(self.text)
        return new


def load_codec(folder: Path) -> TextCodec:
    """Return the codec of a model folder; one without a tokenizer takes and gives token ids only."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config
    vocab_size = int(text.get("vocab_size", 0)) or 1 << 31
    try:
        loaded = ModelTokenizer.load(str(folder))
    except ConfigError:
        stops = text.get("eos_token_id")
        stop_ids = tuple(stops) if isinstance(stops, list) else () if stops is None else (int(stops),)
        return TextCodec(None, stop_ids, vocab_size)
    return TextCodec(loaded.tokenizer, loaded.stop_ids, vocab_size)
