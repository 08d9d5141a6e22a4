"""`SamplingBody`: the fields that completions and chats share."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from relibra.serving.engine.request import SamplingParameters
from relibra.serving.server.generation import Piece
from relibra.serving.server.text import TextCodec

MOST_STOPS, LONGEST_STOP = 16, 1024
LEAST_TEMPERATURE = 1e-5
"""Below it an answer is greedy, as with vLLM: logits divided by less leave the range of float32."""
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class StreamOptions(BaseModel):
    """What a stream holds beside the answer."""

    include_usage: bool = False


class SamplingBody(BaseModel):
    """How tokens are chosen, as OpenAI's and vLLM's clients say it.

    Fields that are not known are ignored; those that would change an answer, and are not offered, are refused.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    model: str = Field("", max_length=1024)
    temperature: float | None = Field(1.0, ge=0, le=100)
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    n: int | None = Field(1, ge=1, le=128)
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1024)] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False

    not_offered: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "logit_bias": ({},),
        "min_tokens": (0,),
        "use_beam_search": (False,),
        "best_of": (1,),
        "suffix": ("",),
        "prompt_logprobs": (),
        "tools": ([],),
        "functions": ([],),
        "response_format": ({"type": "text"},),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "structured_outputs": (),
    }
    """Fields that would change an answer, and the values that change nothing."""

    @model_validator(mode="after")
    def _offers_all(self) -> SamplingBody:
        for name, harmless in self.not_offered.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in harmless:
                raise ValueError(f"{name} is not offered by this server: leave it out")
        return self

    @property
    def samples(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def stop_reason(self, piece: Piece) -> str | int | None:
        """Return the text or the token among those of this request that ended an answer, as vLLM does, or None."""
        if piece.finish != "stop" or piece.stopped_by is not None:
            return piece.stopped_by
        last = piece.tokens[-1] if piece.tokens else None
        return last if last in (self.stop_token_ids or ()) else None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self, codec: TextCodec, *, limit: int, top_log_probs: int, prompt_log_probs: bool = False
    ) -> SamplingParameters:
        """Return the parameters of the engine."""
        own = () if self.ignore_eos else codec.stop_ids
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParameters(
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


def event(body: Mapping[str, Any]) -> str:
    """Return a body as an event of a stream."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


LAST_EVENT = "data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
