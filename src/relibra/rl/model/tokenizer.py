"""`Tokenizer`: the tokenizer of a `transformers` model, or that of the built-in model."""

from __future__ import annotations

import inspect
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from relibra.errors import ConfigError, RelibraError, in_a_line, library_errors
from relibra.printable import excerpt
from relibra.rl.config.settings import TaskSettings
from relibra.rl.tasks.task import Messages
from relibra.rl.toy.character_tokenizer import CharacterTokenizer

DEFAULT_PROMPTS = TaskSettings()
"""Prompts of a run that sets nothing about them."""
TEMPLATE_SECONDS = 10.0
"""Seconds for the chat template of one prompt; they take microseconds, but may hold loops."""


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Turn errors of transformers while loading into a ConfigError of one sentence.

    what     what is loaded, such as "model.path 'models/mine'"
    """
    try:
        yield
    except RelibraError:
        raise
    except Exception as error:  # each model class raises others; damaged pickles raise UnpicklingError
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{what} brings Python files of its own, which are not run: use a model whose family transformers "
                "knows, or read the files and set model.trust_remote_code=true"
            ) from error
        raise ConfigError(
            f"{what} cannot be loaded: {in_a_line(error)}; pass a folder written by save_pretrained, or a "
            "causal language model on the hub"
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer: without, transformers makes an empty one for some families."""
    return any(part in path.name for path in folder.iterdir() for part in ("token", "vocab", "tekken", "spm", ".model"))


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the `transformers` tokenizer of a folder or hub name; raises ConfigError where there is none."""
    from transformers import AutoTokenizer

    with loading(f"the tokenizer of model.path {name!r}"):
        if Path(name).is_dir() and not has_tokenizer(Path(name)):
            raise FileNotFoundError("it has no tokenizer.json, nor another file of a tokenizer")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def stop_tokens(name: str, tokenizer: Any, *, trust_remote_code: bool = False) -> tuple[int, ...]:
    """Return the tokens that end a response, for trainer, engines and server; empty where nothing names one.

    They are the eos_token of the tokenizer, then eos_token_id of generation_config.json, or of config.json where that
    names none.

    name        folder or hub name of the model
    tokenizer   None: the model has none
    raises      ConfigError for a file that cannot be read, or an eos_token_id that is no number
    """
    with loading(f"eos_token_id of model.path {name!r}"):
        stops: Any = next((one for one in _named_stops(name, trust_remote_code) if one not in (None, [])), [])
        listed = stops if isinstance(stops, list) else [stops]
        if any(type(one) is not int for one in listed):
            raise ValueError(f"{stops!r} is no number of a token, nor a list of them")
    own = [] if tokenizer is None or tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return tuple(dict.fromkeys([*own, *(one for one in listed if one >= 0)]))  # older files write -1 for none


def _named_stops(name: str, trust_remote_code: bool) -> Iterator[Any]:
    """Yield the eos_token_id of each file of a model, or None where it has none; the first that is named counts."""
    from transformers import GenerationConfig, PreTrainedConfig
    from transformers.utils import has_file

    if has_file(name, "generation_config.json"):
        yield GenerationConfig.from_pretrained(name).eos_token_id
    if has_file(name, "config.json"):
        # As written: classes of configurations have defaults, which are tokens of another vocabulary.
        written, _ = PreTrainedConfig.get_config_dict(name, trust_remote_code=trust_remote_code)
        yield from (one.get("eos_token_id") for one in (written, written.get("text_config") or {}))


def make_tokenizer(
    model_path: str, characters: str | None, settings: TaskSettings, *, trust_remote_code: bool = False
) -> Tokenizer:
    """Return the tokenizer of a model, or one of single characters for the built-in model.

    model_path           folder or hub name; empty: the built-in model
    characters           alphabet of a built-in task; its last character ends responses
    settings             how prompts become tokens of a model
    trust_remote_code    run Python files of the model
    raises               ConfigError if the model has no usable tokenizer
    """
    if model_path:
        return ModelTokenizer.load(model_path, settings, trust_remote_code=trust_remote_code)
    assert characters is not None, "RunConfig refuses a task without an alphabet for the built-in model"
    return CharacterTokenizer(characters)


@dataclass(frozen=True, eq=False)
class ModelTokenizer:
    """The tokenizer of a `transformers` model.

    pad_id      fills up batches
    stop_ids    end a response; the first one ends demonstrations
    """

    name: str
    tokenizer: Any
    pad_id: int
    stop_ids: tuple[int, ...]
    settings: TaskSettings

    @classmethod
    def load(
        cls, name: str, settings: TaskSettings = DEFAULT_PROMPTS, *, trust_remote_code: bool = False
    ) -> ModelTokenizer:
        """Load the tokenizer of a folder or hub name.

        Stop ids are `stop_tokens`. If the tokenizer has no padding token, the first stop id pads.

        raises    ConfigError if there is no tokenizer, or no stop id
        """
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        stop_ids = stop_tokens(name, tokenizer, trust_remote_code=trust_remote_code)
        if not stop_ids:
            raise ConfigError(
                f"model.path {name!r} defines no stop token, so responses would never end: set eos_token of the "
                "tokenizer or eos_token_id in generation_config.json or config.json"
            )
        pad = tokenizer.pad_token_id
        return cls(name, tokenizer, stop_ids[0] if pad is None else int(pad), stop_ids, settings)

    @property
    def vocab_size(self) -> int:
        """Number of ids, padding and added tokens included."""
        return len(self.tokenizer)

    def encode(self, prompt: str | Messages, /, **template: Any) -> list[int]:
        """Return the ids of chat messages in the model's template; a text becomes one message of the user.

        With task.prompt_format "text", or without template, a text stays as it is, maybe behind start tokens.

        template   arguments of the chat template for this prompt alone: `tools`, variables
        raises     ConfigError where it cannot be encoded
        """
        template = {**self.settings.template_variables, **template}
        if not isinstance(prompt, str):
            return self._encode_messages(prompt, template)
        if self.settings.prompt_format == "text" or self.tokenizer.chat_template is None:
            if template:
                raise ConfigError(
                    f"{', '.join(template)} (task.template_variables, or columns of the row) are for a chat template, "
                    f"and the prompt {excerpt(prompt)} is fed as it is: remove them, set task.prompt_format=chat, or "
                    f"put a chat_template.jinja beside the tokenizer of model.path {self.name!r}"
                )
            with library_errors(f"the tokenizer of model.path {self.name!r} refuses {excerpt(prompt)}", ConfigError):
                return encode_text(self.tokenizer, prompt, add_special_tokens=self.settings.add_special_tokens)
        if prompt.lstrip().startswith(self._special_texts):
            raise ConfigError(
                f"the prompt {excerpt(prompt)} begins with a special token of model.path {self.name!r}, as a text does "
                "that is in its chat template already: set task.prompt_format=text, or remove the token"
            )
        return self._encode_messages([{"role": "user", "content": prompt}], template)

    @cached_property
    def _special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens."""
        return tuple(token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)

    def _encode_messages(self, prompt: Messages, arguments: Mapping[str, Any]) -> list[int]:
        """Return the ids of chat messages in the model's template.

        They end where an answer begins, or in a last message of the assistant, which an answer then continues.
        """
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                f"model.path {self.name!r} has no chat template, but a prompt consists of chat messages: use plain "
                "text, or put a chat_template.jinja beside its tokenizer"
            )
        continued = prompt[-1]["role"] == "assistant"
        try:
            self._check_arguments(arguments)
            with _time_limit(TEMPLATE_SECONDS):
                ids = self.tokenizer.apply_chat_template(
                    prompt,
                    add_generation_prompt=not continued,
                    continue_final_message=continued,
                    return_dict=False,
                    **arguments,
                )
        except RelibraError:
            raise
        except OutOfTimeError as error:
            raise ConfigError(
                f"the chat template of model.path {self.name!r} does not end within {TEMPLATE_SECONDS:g} s for the "
                f"messages {excerpt(prompt)}: mend its chat_template.jinja"
            ) from error
        except Exception as error:  # a template is a program
            raise ConfigError(
                f"the chat template of model.path {self.name!r} rejects the messages {excerpt(prompt)} "
                f"({in_a_line(error)}): change the prompt"
            ) from error
        return [int(i) for i in ids]

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError for an argument that the chat template does not name, which would change nothing."""
        if not arguments:
            return
        written = self.tokenizer.get_chat_template(tools=arguments.get("tools"))
        own = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, "messages"} - {"tools", "documents"}
        for name in arguments:
            if name in own or not re.search(rf"\b{re.escape(name)}\b", written):
                raise ConfigError(
                    f"the chat template of model.path {self.name!r} has no variable {name!r} that could be set: remove "
                    "it from task.template_variables, or from the columns tools and chat_template_kwargs of the rows"
                )

    def encode_response(self, text: str) -> list[int]:
        """Return the ids of a response that ends after this text, the stop id included."""
        return [*(int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)), self.stop_ids[0]]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a response, without its stop token; other special tokens are kept."""
        kept = ids[:-1] if len(ids) and ids[-1] in self.stop_ids else ids
        return str(self.tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """Write files that `transformers.AutoTokenizer` reads."""
        self.tokenizer.save_pretrained(folder)


Tokenizer = CharacterTokenizer | ModelTokenizer
"""Both have the same methods."""


class OutOfTimeError(BaseException):
    """The time is over. No `Exception`, so that code which catches those does not go on."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError inside when the time is over.

    By a signal, which only the main thread of a process gets, between two bytecodes: elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of a text of which a model writes the rest: no end tokens, and start tokens only once.

    tokenizer            of transformers; it may add tokens in front and behind, as its files say
    add_special_tokens   add those in front, unless the text begins with the first of them
    """
    ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    if not add_special_tokens:
        return ids
    bare, whole = tokenizer.encode(text[:1], add_special_tokens=False), tokenizer.encode(text[:1])
    places = range(len(whole) - len(bare) + 1)
    start = whole[: next((i for i in places if whole[i : i + len(bare)] == bare), 0)] if bare else whole
    return ids if ids[:1] == start[:1] else [*map(int, start), *ids]
