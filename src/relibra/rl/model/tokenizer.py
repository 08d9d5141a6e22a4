"""Text to token ids and back: one token per character for the built-in policy, or the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from relibra.errors import ConfigError

PADDING = "\N{SYMBOL FOR NULL}"
"""How decoded padding of a character tokenizer looks."""

Messages = list[dict[str, str]]
"""Chat messages: objects with "role" and "content"."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the trainer asks of a tokenizer.

    vocab_size   ids in use, padding included
    pad_id       fills up batches
    stop_ids     any of them ends a response; the first one ends demonstrations
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def pad_id(self) -> int: ...  # noqa: D102

    @property
    def stop_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    def encode(self, prompt: str | Messages) -> list[int]:
        """Return the ids of a prompt; raises ConfigError where it cannot be encoded."""
        ...

    def encode_response(self, text: str) -> list[int]:
        """Return the ids of a response that ends after this text, its end included."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without the token that ended it."""
        ...

    def save(self, folder: Path) -> None:
        """Write files that `transformers.AutoTokenizer` reads."""
        ...


def make_tokenizer(model_path: str, characters: str | None) -> Tokenizer:
    """Return the tokenizer of a model, or without one that of a task's alphabet.

    model_path    folder or hub name; empty: the built-in policy
    characters    alphabet of a built-in task, its last character ends responses
    raises        ConfigError where the model has no usable tokenizer
    """
    if model_path:
        return ModelTokenizer.load(model_path)
    assert characters is not None, "RunConfig refuses a task without an alphabet for the built-in model"
    return CharacterTokenizer(characters, characters[-1])


@dataclass(frozen=True)
class CharacterTokenizer:
    """Token id = place of the character in `characters`, plus one; 0 pads, `stop` ends a response."""

    characters: str
    stop: str

    pad_id: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Hold the alphabet to what the ids need."""
        assert len(set(self.characters)) == len(self.characters), f"characters repeat in {self.characters!r}"
        assert self.stop in self.characters, f"{self.stop!r} is not in {self.characters!r}"
        assert PADDING not in self.characters, "padding has a character of its own"

    @property
    def vocab_size(self) -> int:
        """Ids in use, padding included."""
        return len(self.characters) + 1

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Id of the character that ends a response."""
        return (self.characters.index(self.stop) + 1,)

    def encode(self, prompt: str | Messages) -> list[int]:
        """Return the ids of a text; raises ConfigError at a character without one, and for chat messages."""
        if not isinstance(prompt, str):
            raise ConfigError("the built-in model has no chat template for messages: set model.path, or use plain text")
        unknown = set(prompt) - set(self.characters)
        if unknown:
            raise ConfigError(f"no token for {sorted(unknown)} in {prompt!r}: known characters are {self.characters!r}")
        return [self.characters.index(character) + 1 for character in prompt]

    def encode_response(self, text: str) -> list[int]:
        """Return the ids of a response that ends after this text, its end included."""
        return self.encode(text + self.stop)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a response, without the character that ended it.

        Padding shows as a character of its own, for a policy may sample it.
        """
        text = "".join(self.characters[i - 1] if i != self.pad_id else PADDING for i in ids)
        return text.removesuffix(self.stop)

    def save(self, folder: Path) -> None:
        """Write the same tokenizer, with the same ids, as `tokenizers` knows it, for `transformers.AutoTokenizer`."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        ids = {PADDING: self.pad_id} | {character: i for i, character in enumerate(self.characters, start=1)}
        tokenizer = Tokenizer(models.WordLevel(ids))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PADDING, eos_token=self.stop)
        fast.save_pretrained(folder)


@dataclass(frozen=True, eq=False)
class ModelTokenizer:
    """The tokenizer of a `transformers` model."""

    name: str
    tokenizer: Any
    pad_id: int
    stop_ids: tuple[int, ...]

    @classmethod
    def load(cls, name: str) -> ModelTokenizer:
        """Load the tokenizer of a folder or hub name.

        Responses end at the end-of-sequence token of the tokenizer, and at those of the model's generation settings.
        Without a padding token the first of them pads.

        raises    ConfigError where there is no tokenizer, or none of its tokens ends a response
        """
        from transformers import AutoTokenizer

        if Path(name).is_absolute() and not Path(name).exists():
            raise ConfigError(f"model.path {name!r}: there is no such folder; name one that save_pretrained wrote")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            if not Path(name).exists():
                raise ConfigError(
                    f"model.path {name!r}: there is no such folder here, and as a name on the hub it cannot be loaded "
                    f"({_first_line(error)}); check the path, or the name and the network"
                ) from error
            raise ConfigError(
                f"model.path {name!r}: no tokenizer can be loaded from there ({_first_line(error)}); save one "
                "beside the weights with tokenizer.save_pretrained(folder)"
            ) from error
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        stop_ids = tuple(dict.fromkeys(own + _generation_stops(name)))
        if not stop_ids:
            raise ConfigError(
                f"model.path {name!r}: its tokenizer has no eos_token and its generation_config.json no eos_token_id, "
                "so no response would ever end; set one of them"
            )
        pad = tokenizer.pad_token_id
        return cls(name, tokenizer, stop_ids[0] if pad is None else int(pad), stop_ids)

    @property
    def vocab_size(self) -> int:
        """Ids in use, padding and added tokens included."""
        return len(self.tokenizer)

    def encode(self, prompt: str | Messages) -> list[int]:
        """Return the ids of a text as the tokenizer marks its start, or of chat messages in the model's template."""
        if isinstance(prompt, str):
            return [int(i) for i in self.tokenizer.encode(prompt)]
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"model.path {self.name!r} has no chat template, which prompts of chat messages need: use plain text, "
                "or put a chat_template.jinja beside its tokenizer"
            )
        from jinja2 import TemplateError

        try:
            ids = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise ConfigError(
                f"model.path {self.name!r}: its chat template refuses the messages {str(prompt)[:80]} "
                f"({_first_line(error)}); change the prompt"
            ) from error
        return [int(i) for i in ids]

    def encode_response(self, text: str) -> list[int]:
        """Return the ids of a response that ends after this text, its end included."""
        return [*(int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)), self.stop_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without the token that ended it; other special tokens show."""
        kept = ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids
        return str(self.tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """Write files that `transformers.AutoTokenizer` reads."""
        self.tokenizer.save_pretrained(folder)


def _generation_stops(name: str) -> list[int]:
    """Return the ids that end a response by the model's generation settings; none where it has none."""
    from transformers import GenerationConfig

    try:
        stops = GenerationConfig.from_pretrained(name).eos_token_id
    except (OSError, ValueError):
        return []
    if stops is None:
        return []
    return [int(i) for i in (stops if isinstance(stops, list) else [stops])]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
