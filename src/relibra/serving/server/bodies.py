"""Bodies of requests: what they may hold, the choices they ask for, and the form of these in an answer."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import HTTPException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticUseDefault

from relibra.engine.sequence import SamplingParameters
from relibra.serving.server.choice import MOST_CHOICES, Choice, make_choices
from relibra.serving.server.text import TextCodec, TokenText, text_offsets

DEFAULT_LIMIT = 16
"""New tokens where a body does not say how many, as OpenAI's."""
LEAST_TEMPERATURE = 1e-5
"""Below it an answer is greedy, as with vLLM: logits divided by less leave the range of float32."""


def _not_null(value: Any) -> Any:
    """Return a value; null stands for the default."""
    if value is None:
        raise PydanticUseDefault
    return value


_null = BeforeValidator(_not_null)
Flag = Annotated[bool, _null]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
_quick = Field(fail_fast=True)  # of a long list, only the first error is looked for
_prompts = Field(fail_fast=True, max_length=MOST_CHOICES)
Tokens = Annotated[list[Token], _quick]
IGNORED = frozenset(
    (
        *("user", "metadata", "store", "safety_identifier", "service_tier", "prediction", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_control", "cache_salt"),
        "include_obfuscation",
    )
)
"""Fields that change no answer, whatever they hold: who asks, what is kept, how fast the answer comes."""
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("use_beam_search", "echo", "add_special_tokens", "continuous_usage_stats"), (False,)),
    **dict.fromkeys(("bad_words", "logits_processors", "documents", "tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "spaces_between_special_tokens": (True,),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values of further fields that ask for what this server does anyway; null does so for every field."""


class WholeBody(BaseModel):
    """A part of a request: a field that is not declared is an error, unless it changes nothing."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, hide_input_in_errors=True)
    ignored: ClassVar[frozenset[str]] = IGNORED

    @model_validator(mode="after")
    def _obeys_all(self) -> WholeBody:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.ignored and value not in HARMLESS.get(name, ()):
                raise ValueError(f"{name[:200]} is not offered by this server: leave it out")
        return self


class StreamOptions(WholeBody):
    """What a stream holds beside the answer."""

    include_usage: Flag = False


class SamplingBody(WholeBody):
    """How tokens are chosen, as OpenAI's and vLLM's clients say it."""

    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    n: int | None = Field(1, ge=1, le=128)
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1024)] | None = None
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    include_stop_str_in_output: Flag = False
    return_routed_experts: Flag = False
    return_token_ids: Flag = False
    return_tokens_as_token_ids: Flag = False

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def token(self, codec: TextCodec, number: int) -> TokenText:
        """Return what a token is called among log-probs, and its bytes where the text shows it."""
        known = codec.token(number, self.skip_special_tokens)
        return known._replace(name=f"token_id:{number}") if self.return_tokens_as_token_ids else known

    def stop_reason(self, choice: Choice) -> str | int | None:
        """Return the stop text or stop token of this request that ended an answer, as vLLM does; None: neither did."""
        if choice.finish != "stop" or choice.answer.stopped_by is not None:
            return choice.answer.stopped_by
        last = choice.tokens[-1] if choice.new else None
        return last if last in (self.stop_token_ids or ()) else None

    def amounts(self, room: int) -> tuple[int, int, bool]:
        """Return most new tokens, log-probs beside each token's own, and whether the prompt is scored.

        room   tokens that the prompt leaves to the answer
        """
        raise NotImplementedError

    def choices(self, codec: TextCodec, max_length: int, prompts: list[list[int]]) -> list[Choice]:
        """Return the choices of prompts; raises HTTPException as `make_choices` does."""
        limit, top_log_probs, prompt_log_probs = self.amounts(max_length - len(prompts[0]))
        own = () if self.ignore_eos else codec.stop_ids
        temperature = 1.0 if self.temperature is None else self.temperature
        sampling = SamplingParameters(
            limit=limit,
            temperature=0.0 if temperature < LEAST_TEMPERATURE else temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=secrets.randbits(48) if self.seed is None else self.seed % (1 << 64),
            stop_ids=tuple(dict.fromkeys((*own, *(self.stop_token_ids or ())))),
            top_log_probs=top_log_probs,
            routes=self.return_routed_experts,
            prompt_log_probs=prompt_log_probs,
        )
        how = {"skip_special": self.skip_special_tokens, "include_stop": self.include_stop_str_in_output}
        return make_choices(codec, prompts, self.n or 1, sampling, self.stops, max_length, **how)

    def fields_of(self, choice: Choice) -> dict[str, Any]:
        """Return the fields of a choice that completions and chats share."""
        body: dict[str, Any] = {"index": choice.index, "logprobs": None, "finish_reason": choice.finish}
        body["stop_reason"] = self.stop_reason(choice)
        if self.return_token_ids:
            body |= {"token_ids": choice.tokens, "prompt_token_ids": list(choice.prompt) if choice.first else None}
        if choice.routes is not None:
            body["routed_experts"] = base64.b64encode(choice.routes).decode()
        return body


class TextBody(SamplingBody):
    """What both endpoints of OpenAI take."""

    model: Annotated[str, _null] = Field("", max_length=1024)
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(TextBody):
    """`/v1/completions`: a prompt, or several, as text or tokens."""

    prompt: str | Tokens | Annotated[list[str], _prompts] | Annotated[list[Tokens], _prompts]
    max_tokens: int | None = Field(DEFAULT_LIMIT, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False
    add_special_tokens: Flag = True

    kind: ClassVar[str] = "text_completion"
    prefix: ClassVar[str] = "cmpl-"
    no_prompt: ClassVar[dict[str, Any]] = {"prompt": ""}

    def prompts(self, codec: TextCodec, max_length: int) -> list[list[int]]:
        """Return the tokens of the prompts; encodes text, which may take long."""
        several = isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int))
        prompts: Any = self.prompt if several else [self.prompt]
        if not prompts:
            raise HTTPException(400, "prompt is an empty list: send one prompt or several")
        if len(prompts) * (self.n or 1) > MOST_CHOICES:
            raise HTTPException(400, f"{len(prompts)} prompts with n {self.n or 1} are more than {MOST_CHOICES}")
        for prompt in prompts:
            codec.check_length(prompt, max_length)
        return [
            codec.encode(prompt, self.add_special_tokens) if isinstance(prompt, str) else prompt for prompt in prompts
        ]

    def amounts(self, _room: int) -> tuple[int, int, bool]:
        """Return most new tokens, log-probs beside each token's own, and whether the prompt is scored."""
        limit = DEFAULT_LIMIT if self.max_tokens is None else max(1, self.max_tokens)
        return limit, self.logprobs or 0, bool(self.echo and self.logprobs is not None)

    def part(self, codec: TextCodec, choice: Choice, _whole: bool) -> dict[str, Any]:
        """Return what is new of a choice, for the answer or for an event."""
        kept = 0 if self.max_tokens == 0 else len(choice.new)
        echoed = choice.prompt if self.echo and choice.first else ()
        if self.echo and choice.echo is None:  # not decoded yet, or in a forked process that has ended
            choice.echo = codec.decode(choice.prompt, self.skip_special_tokens)
        text = ((choice.echo or "") if echoed else "") + ("" if self.max_tokens == 0 else choice.new_text)
        body = self.fields_of(choice) | {"text": text}
        if self.max_tokens == 0 and choice.finish:
            body["finish_reason"] = "length"
        if self.return_token_ids:
            body["token_ids"] = choice.tokens[:kept]
        if self.logprobs is not None:
            body["logprobs"] = self._log_probs(codec, choice, echoed, kept)
        return body

    def _log_probs(self, codec: TextCodec, choice: Choice, echoed: Sequence[int], kept: int) -> dict[str, Any]:
        """Return tokens, their log-probs and the likeliest ones; the first token of a prompt has none."""
        before = [None, *(choice.prompt_log_probs or [])] if echoed else []
        token, tokens, log_probs = partial(self.token, codec), choice.tokens[:kept], choice.log_probs[:kept]
        likeliest = [
            {token(int(one)).name: value for one, value in top} | {token(sampled).name: log_prob}
            for sampled, log_prob, top in zip(tokens, log_probs, choice.tops[:kept], strict=True)
        ]
        offsets = text_offsets(codec, echoed, skip_special=self.skip_special_tokens)
        return {
            "tokens": [token(one).name for one in (*echoed, *tokens)],
            "token_logprobs": [*before, *log_probs],
            "top_logprobs": [*(None for _ in before), *likeliest],
            "text_offset": [*offsets, *(len(choice.echo or "") + offset for offset in choice.offsets[:kept])],
        }


class TextPart(WholeBody):
    """A part of a message; only text is offered."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message; fields that are not known go to the template."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates read it: content is a text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(TextBody):
    """`/v1/chat/completions`: messages in the chat template of the model."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None

    kind: ClassVar[str] = "chat.completion"
    prefix: ClassVar[str] = "chatcmpl-"
    no_prompt: ClassVar[dict[str, Any]] = {"messages": [{"role": "user"}], "chat_template_kwargs": None}

    def prompts(self, codec: TextCodec, max_length: int) -> list[list[int]]:
        """Return the tokens of the messages; runs the template, which may take long."""
        if self.top_logprobs and not self.logprobs:
            raise HTTPException(400, "top_logprobs needs logprobs: true")
        messages = [message.for_template() for message in self.messages]
        codec.check_length("".join(str(one) for message in messages for one in message.values()), max_length)
        prompt = codec.encode_chat(
            messages,
            answers=self.add_generation_prompt and not self.continue_final_message,
            continues=self.continue_final_message,
            variables=self.chat_template_kwargs or {},
        )
        return [prompt]

    def amounts(self, room: int) -> tuple[int, int, bool]:
        """Return the same as for completions; without a limit, an answer may take what the prompt leaves."""
        return self.max_completion_tokens or self.max_tokens or max(1, room), self.top_logprobs or 0, False

    def part(self, codec: TextCodec, choice: Choice, whole: bool) -> dict[str, Any]:
        """Return what is new of a choice, for the answer or for an event."""
        message: dict[str, Any] = {"role": "assistant"} if whole or choice.first else {}
        message["content"] = choice.new_text
        if whole:
            message["refusal"] = None
        body = self.fields_of(choice) | {"message" if whole else "delta": message}
        if self.logprobs:
            body["logprobs"] = {"content": log_prob_content(choice, partial(self._named, codec)), "refusal": None}
        return body

    def _named(self, codec: TextCodec, token: int) -> dict[str, Any]:
        """Return the name and the bytes of a token; one that the text leaves out has none."""
        known = self.token(codec, token)
        return {"token": known.name, "bytes": None if known.data is None else list(known.data)}


class TokenSampling(SamplingBody):
    """The `sampling_params` of a request for tokens.

    logprobs          likeliest tokens beside each sampled one; None: no log-probs
    prompt_logprobs   None: no log-probs of the prompt
    """

    ignored: ClassVar[frozenset[str]] = IGNORED | {"detokenize"}  # the answer has no text
    return_routed_experts: Flag = True
    max_tokens: int | None = Field(DEFAULT_LIMIT, ge=1, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)

    def amounts(self, _room: int) -> tuple[int, int, bool]:
        """Return the same as for completions."""
        return self.max_tokens or DEFAULT_LIMIT, self.logprobs or 0, self.prompt_logprobs is not None


class TokenBody(WholeBody):
    """`/inference/v1/generate`: tokens to tokens, as vLLM's endpoint of that name."""

    ignored: ClassVar[frozenset[str]] = IGNORED | {"request_id"}  # the answer has no id

    token_ids: Annotated[Tokens, Field(min_length=1)]
    sampling_params: Annotated[TokenSampling, _null] = Field(default_factory=TokenSampling)
    model: Annotated[str, _null] = Field("", max_length=1024)
    stream: bool | None = False

    no_prompt: ClassVar[dict[str, Any]] = {"token_ids": [0]}

    def prompts(self, codec: TextCodec, max_length: int) -> list[list[int]]:
        """Return the tokens of the prompt."""
        codec.check_length(self.token_ids, max_length)
        return [self.token_ids]

    def choices(self, codec: TextCodec, max_length: int, prompts: list[list[int]]) -> list[Choice]:
        """Return the choices asked for."""
        return self.sampling_params.choices(codec, max_length, prompts)

    def part(self, choice: Choice, version: str) -> dict[str, Any]:
        """Return a choice for the answer; `version` is that of the weights that sampled it."""
        part: dict[str, Any] = {"routed_experts": None, **self.sampling_params.fields_of(choice)}
        part |= {"token_ids": choice.tokens, "weight_version": version}
        if self.sampling_params.logprobs is not None:
            part["logprobs"] = {"content": log_prob_content(choice, lambda token: {"token": f"token_id:{token}"})}
        return part

    def rest(self, choice: Choice) -> dict[str, Any]:
        """Return what an answer holds beside its choices: log-probs of the prompt, from any of them."""
        if (scores := choice.prompt_log_probs) is None:
            return {"prompt_logprobs": None}
        listed = [{str(token): {"logprob": score}} for token, score in zip(choice.prompt[1:], scores, strict=True)]
        return {"prompt_logprobs": [None, *listed]}


def log_prob_content(choice: Choice, named: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the new tokens as chats list them: what `named` returns for each, its log-prob, and the likeliest."""
    return [
        {
            **named(token),
            "logprob": log_prob,
            "top_logprobs": [{**named(int(one)), "logprob": value} for one, value in top],
        }
        for token, log_prob, top in zip(choice.tokens, choice.log_probs, choice.tops, strict=True)
    ]
