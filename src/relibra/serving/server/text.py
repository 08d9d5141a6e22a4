"""Text to tokens and back, with the tokenizer of the served model, and where the text of an answer ends."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import HTTPException

from relibra.errors import in_a_line
from relibra.rl.model.tokenizer import encode_text, has_tokenizer, load_tokenizer, stop_tokens

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What the beginning of a character decodes to."""
_LONGEST_CHARACTER = 4
"""Tokens that one character may take."""


class TokenText(NamedTuple):
    """Name of a token, for readers only, and the bytes that it adds to a text; None: not known, or left out."""

    name: str
    data: bytes | None


@dataclass(frozen=True, eq=False)
class TextCodec:
    """Tokenizer of a model.

    tokenizer    None: the model has none, and takes and gives token ids
    stop_ids     tokens that end an answer
    vocab_size   tokens that the model knows
    """

    tokenizer: Any
    stop_ids: tuple[int, ...]
    vocab_size: int
    _known: dict[tuple[int, bool], TokenText] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def longest_token(self) -> int:
        """Most characters of a token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1) if self.tokenizer is not None else 1

    def check_length(self, prompt: Sequence[Any], max_length: int) -> None:
        """Raise HTTPException (400) for a prompt, text or tokens, that is certainly longer than `max_length` tokens."""
        what, token = ("characters", self.longest_token) if isinstance(prompt, str) else ("tokens", 1)
        if len(prompt) > max_length * token:
            raise HTTPException(
                400,
                f"a prompt of {len(prompt):,} {what} is longer than the longest request of this server, {max_length:,} "
                "tokens: shorten it",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt; raises HTTPException (400) where there is no tokenizer, or it refuses."""
        if self.tokenizer is None:
            raise HTTPException(400, "this model has no tokenizer: send the prompt as a list of token ids")
        try:
            return encode_text(self.tokenizer, text, add_special_tokens=add_special_tokens)
        except Exception as error:  # each tokenizer raises others
            raise HTTPException(400, f"the tokenizer of the model refuses the prompt ({in_a_line(error)})") from error

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, answers: bool, continues: bool, variables: dict[str, Any]
    ) -> list[int]:
        """Return the tokens of messages in the chat template of the model.

        answers     the prompt ends where an answer of the model begins
        continues   the prompt ends within the last message
        variables   of the template
        raises      HTTPException (400) where the model has no template, or it rejects the messages or a variable
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise HTTPException(
                400,
                "this model has no chat template: send a prompt to /v1/completions, or start the server from a folder "
                "with a chat_template.jinja",
            )
        taken = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}
        if wrong := sorted(variables.keys() & taken):
            raise HTTPException(400, f"chat_template_kwargs.{wrong[0]} is no variable of the template: leave it out")
        how = {"add_generation_prompt": answers, "continue_final_message": continues, "return_dict": False}
        try:
            tokens = self.tokenizer.apply_chat_template(list(messages), **how, **variables)
        except Exception as error:  # a template is a program
            raise HTTPException(
                400, f"the chat template of the model rejects the messages ({in_a_line(error)})"
            ) from error
        return [int(one) for one in tokens]

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of tokens, with special ones or without; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(
            self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        )

    @cached_property
    def _special(self) -> dict[str, int]:
        """Special tokens by their names: texts of answers leave them out."""
        added = {} if self.tokenizer is None else self.tokenizer.added_tokens_decoder
        return {str(token): number for number, token in added.items() if not self.decode([number])}

    def special_tokens(self, texts: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return the special tokens that each text names, by their names."""
        return {text: {name: number for name, number in self._special.items() if name in text} for text in texts}

    def token(self, number: int, skip_special: bool = True) -> TokenText:
        """Return what a token adds to a text, behind others."""
        if (number, skip_special) not in self._known:
            # Behind itself: some decoders drop the space before the first token.
            alone, behind = self.decode([number], False), self.decode([number, number], False)
            name, data = behind[len(alone) :], None
            if BROKEN in behind:
                name, data = "", partial_bytes(self.tokenizer.convert_ids_to_tokens(number), alone)
            elif self.tokenizer is not None and self.decode([number, number], skip_special) == behind:
                data = name.encode()
            self._known[number, skip_special] = TokenText(name or f"token_id:{number}", data)
        return self._known[number, skip_special]


def partial_bytes(name: str, text: str) -> bytes | None:
    """Return the bytes of a token that is part of a character, by its name: "<0x..>" or byte-level BPE; None: neither.

    text   that the token decodes to, which tells the kind of its name

    >>> partial_bytes("<0xE2>", "\N{REPLACEMENT CHARACTER}"), partial_bytes("âĤ", "\N{REPLACEMENT CHARACTER}")
    (b'\xe2', b'\xe2\x82')
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    numbered = re.fullmatch("<0x([0-9A-F]{2})>", name)
    spelt = bytes(byte_of[character] for character in name if character in byte_of)
    readings = [bytes.fromhex(numbered[1])] if numbered else [spelt] if len(spelt) == len(name) else []
    return next((data for data in readings if data.decode(errors="replace") == text), None)


class AnswerText:
    """Text of an answer that grows by tokens: whole characters only, and nothing that may belong to a stop text.

    sent         characters that are certain
    length       with those that may belong to a stop text
    stopped_by   stop text that has come
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt: Sequence[int],
        stops: Mapping[str, Mapping[str, int]],
        *,
        skip_special: bool = True,
        include_stop: bool = False,
    ) -> None:
        """Begin empty.

        prompt         tokens before the answer: the text of a token depends on those before it
        stops          texts that end the answer, and the special tokens that each names, which are matched as tokens
        skip_special   special tokens are no part of the answer
        include_stop   what ends the answer is a part of it
        """
        self._codec, self._skip_special, self._include_stop = codec, skip_special, include_stop
        near = max(0, len(prompt) - _LONGEST_CHARACTER)
        # Begin with a whole character: a part of one spoils the text of the bytes that follow.
        starts = range(near, max(-1, near - _LONGEST_CHARACTER), -1)
        start = next((one for one in starts if BROKEN not in codec.decode(prompt[one:], skip_special)), near)
        self._tokens = list(prompt[start:])
        self._decoded_from, self._decoded_to = 0, len(self._tokens)
        self._kept = ""
        self.sent = self.length = 0
        self.stopped_by: str | None = None
        # A surrogate, which no text has, stands for each special token of a stop text.
        self._signs: dict[int, str] = {}
        self._shown: dict[int, str] = {}
        self._stops: dict[str, str] = {}
        for stop, special in stops.items():
            pattern = stop
            for name, token in special.items():
                sign = self._signs.setdefault(token, chr(0xD800 + len(self._signs)))
                self._shown[ord(sign)] = "" if skip_special else name
                pattern = pattern.replace(name, sign)
            self._stops.setdefault(pattern, stop)

    def add(self, tokens: Sequence[int], *, last: bool, stops: bool = False) -> str:
        """Add tokens; return the text that is certain now.

        last    no more will come
        stops   the token is one that ends the answer: without `include_stop` only a stop text may need it
        """
        if self.stopped_by is not None:
            return ""
        hidden = ""
        for token in tokens:
            sign = self._signs.get(token, "")
            if stops and not self._include_stop:
                hidden = sign
            elif sign:
                self._kept += self._decode(last=True) + sign
            else:
                self._tokens.append(token)
                self._kept += self._decode(last=False)
        text = self._kept + (self._decode(last=True) if last else "") + hidden
        found = [(place, pattern) for pattern in self._stops if (place := text.find(pattern)) >= 0]
        if found:
            end, pattern = min(found, key=lambda one: one[0])  # of several at one place the first that was named
            self.stopped_by, self._kept = self._stops[pattern], ""
            certain = text[:end].translate(self._shown) + (self.stopped_by if self._include_stop else "")
        else:
            end = len(text) - (len(hidden) if last else longest_beginning(text, list(self._stops)))
            self._kept, certain = "" if last else text[end:], text[:end].translate(self._shown)
        self.sent += len(certain)
        self.length = self.sent + len(self._kept.translate(self._shown))
        return certain

    def _decode(self, *, last: bool) -> str:
        """Return the text that new tokens add behind those before, up to the last whole character."""
        before = self._text(self._decoded_from, self._decoded_to)
        waiting = len(self._tokens) - self._decoded_to
        for left_out in range(1 if last else min(waiting, _LONGEST_CHARACTER)):
            end = len(self._tokens) - left_out
            after = self._text(self._decoded_from, end)
            if last or not after.endswith(BROKEN):
                return self._advance(before, after, end)
        if waiting < _LONGEST_CHARACTER:
            return ""
        return self._advance(before, self._text(self._decoded_from, len(self._tokens)), len(self._tokens))

    def _text(self, start: int, end: int) -> str:
        return self._codec.decode(self._tokens[start:end], self._skip_special)

    def _advance(self, before: str, after: str, end: int) -> str:
        """Count tokens as decoded; return what their text adds."""
        if len(after) <= len(before):
            return ""
        self._decoded_from, self._decoded_to = self._decoded_to, end
        return after[len(before) :]


def text_offsets(codec: TextCodec, tokens: Sequence[int], *, skip_special: bool) -> list[int]:
    """Return where each token begins in the text of all, in characters; parts of a character begin where it does."""
    text, offsets = AnswerText(codec, [], {}, skip_special=skip_special), []
    for token in tokens:
        offsets.append(text.length)
        text.add([token], last=False)
    return offsets


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of a text that a stop text begins with.

    >>> longest_beginning("one tw", ["two", "three"])
    2
    """
    lengths = ((stop, length) for stop in stops for length in range(1, min(len(stop), len(text) + 1)))
    return max((length for stop, length in lengths if text.endswith(stop[:length])), default=0)


def load_codec(folder: Path) -> TextCodec:
    """Return the codec of a model folder, which may lack a tokenizer; raises ConfigError for unreadable files."""
    config = json.loads((folder / "config.json").read_text())
    vocab_size = int((config.get("text_config") or config).get("vocab_size", 0)) or 1 << 31
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer(folder) else None
    # A token beyond the vocabulary, as files of another model name it, is never sampled.
    stop_ids = tuple(stop for stop in stop_tokens(str(folder), tokenizer) if stop < vocab_size)
    return TextCodec(tokenizer, stop_ids, vocab_size)
