"""The tokenizer of the built-in model: one token per character of a task's alphabet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from relibra.errors import ConfigError
from relibra.rl.tasks.task import Messages

PADDING = "\N{SYMBOL FOR NULL}"
"""Text that a decoded padding token becomes."""


@dataclass(frozen=True)
class CharacterTokenizer:
    """Token id = position of the character in `characters` + 1; 0 is padding; the last character ends a response."""

    characters: str

    pad_id: ClassVar[int] = 0

    def __post_init__(self) -> None:
        assert len(set(self.characters)) == len(self.characters), f"characters repeat in {self.characters!r}"
        assert PADDING not in self.characters, "the padding character is not part of an alphabet"

    @property
    def vocab_size(self) -> int:
        """Number of ids, padding included."""
        return len(self.characters) + 1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Id of the character that ends a response."""
        return (len(self.characters),)

    def encode(self, prompt: str | Messages, /, **template: Any) -> list[int]:
        """Return the ids of a text; raises ConfigError at an unknown character, and for what needs a chat template."""
        if template or not isinstance(prompt, str):
            raise ConfigError("the built-in model has no chat template for messages: set model.path, or use plain text")
        unknown = set(prompt) - set(self.characters)
        if unknown:
            raise ConfigError(f"no token for {sorted(unknown)} in {prompt!r}: known characters are {self.characters!r}")
        return [self.characters.index(character) + 1 for character in prompt]

    def encode_response(self, text: str) -> list[int]:
        """Return the ids of a response that ends after this text, the stop id included."""
        return [*self.encode(text), *self.stop_ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a response without the character that ended it; sampled padding becomes `PADDING`."""
        text = "".join(self.characters[i - 1] if i != self.pad_id else PADDING for i in ids)
        return text.removesuffix(self.characters[-1])

    def save(self, folder: Path) -> None:
        """Write a tokenizer with the same ids for `transformers.AutoTokenizer`."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        ids = {PADDING: self.pad_id} | {character: i for i, character in enumerate(self.characters, start=1)}
        tokenizer = Tokenizer(models.WordLevel(ids))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PADDING, eos_token=self.characters[-1])
        fast.save_pretrained(folder)
