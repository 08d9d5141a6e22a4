"""Text to tokens and back, with the tokenizer of the served model, and where the text of an answer ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import HTTPException

from relibra.errors import in_a_line
from relibra.rl.model.tokenizer import encode_text, has_tokenizer, load_tokenizer, stop_tokens

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What the beginning of a character decodes to."""
_LONGEST_CHARACTER = 4
"""Tokens that one character may take."""


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

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt; raises HTTPException (400) where there is no tokenizer, or it refuses."""
        if self.tokenizer is None:
            raise HTTPException(400, "this model has no tokenizer: send the prompt as a list of token ids")
        try:
            return encode_text(self.tokenizer, text)
        except Exception as error:  # each tokenizer raises others
            raise HTTPException(400, f"the tokenizer of the model refuses the prompt ({in_a_line(error)})") from error

    def encode_chat(self, messages: Sequence[dict[str, Any]], *, answers: bool, arguments: dict[str, Any]) -> list[int]:
        """Return the tokens of messages in the chat template of the model.

        answers     the prompt ends where an answer of the model begins
        arguments   for the template
        raises      HTTPException (400) where the model has no template, or it rejects the messages
        """
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise HTTPException(
                400,
                "this model has no chat template: send a prompt to /v1/completions, or start the server from a folder "
                "with a chat_template.jinja",
            )
        try:
            tokens = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=answers, return_dict=False, **arguments
            )
        except Exception as error:  # a template is a program
            raise HTTPException(
                400, f"the chat template of the model rejects the messages ({in_a_line(error)})"
            ) from error
        return [int(one) for one in tokens]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def name(self, token: int) -> str:
        """Return a token as log-probs name it: its text, or its number where it has none of its own."""
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if text and BROKEN not in text else f"token_id:{token}"


class AnswerText:
    """Text of an answer that grows by tokens: whole characters only, and nothing that may belong to a stop text."""

    def __init__(self, codec: TextCodec, prompt: Sequence[int], stops: Sequence[str]) -> None:
        """Begin empty.

        prompt   tokens before the answer: the text of a token depends on those before it
        stops    texts that end the answer, and are no part of it
        """
        self._codec, self._stops = codec, stops
        self._tokens = list(prompt[-_LONGEST_CHARACTER:])
        self._decoded_from, self._decoded_to = 0, len(self._tokens)
        self._kept = ""
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop text has come; `stopped_by` is the one."""
        return self.stopped_by is not None

    def add(self, tokens: Sequence[int], *, last: bool) -> str:
        """Add tokens; return the text that is certain now.

        last   no more will come
        """
        if self.stopped:
            return ""
        self._tokens += tokens
        text = self._kept + self._decode(last=last)
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda one: one[0])  # of several at one place the first that was named
            self._kept = ""
            return text[:at]
        kept = 0 if last else longest_beginning(text, self._stops)
        self._kept = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _decode(self, *, last: bool) -> str:
        """Return the text of the tokens that have come, behind those before, up to the last whole character."""
        before = self._codec.decode(self._tokens[self._decoded_from : self._decoded_to])
        waiting = len(self._tokens) - self._decoded_to
        for left_out in range(1 if last else min(waiting, _LONGEST_CHARACTER)):
            end = len(self._tokens) - left_out
            after = self._codec.decode(self._tokens[self._decoded_from : end])
            if last or not after.endswith(BROKEN):
                return self._advance(before, after, end)
        if waiting < _LONGEST_CHARACTER:
            return ""
        return self._advance(before, self._codec.decode(self._tokens[self._decoded_from :]), len(self._tokens))

    def _advance(self, before: str, after: str, end: int) -> str:
        """Count tokens as decoded; return what their text adds."""
        if len(after) <= len(before):
            return ""
        self._decoded_from, self._decoded_to = self._decoded_to, end
        return after[len(before) :]


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of a text that a stop text begins with.

    >>> longest_beginning("one tw", ["two", "three"])
    2
    """
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def load_codec(folder: Path) -> TextCodec:
    """Return the codec of a model folder; one without files of a tokenizer takes and gives token ids only.

    raises   ConfigError for files that cannot be read
    """
    config = json.loads((folder / "config.json").read_text())
    vocab_size = int((config.get("text_config") or config).get("vocab_size", 0)) or 1 << 31
    tokenizer = load_tokenizer(str(folder)) if has_tokenizer(folder) else None
    # A token beyond the vocabulary, as files of another model name it, is never sampled.
    stop_ids = tuple(stop for stop in stop_tokens(str(folder), tokenizer) if stop < vocab_size)
    return TextCodec(tokenizer, stop_ids, vocab_size)
