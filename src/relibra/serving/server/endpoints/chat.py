"""`/v1/chat/completions`: messages in the chat template of the model, and the answer, whole or as events."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from relibra.serving.server.endpoints.sampling_body import SamplingBody
from relibra.serving.server.generation import GenerationRequest, Piece
from relibra.serving.server.refusals import BadRequest
from relibra.serving.server.text import TextCodec


class TextPart(BaseModel):
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


class ChatBody(SamplingBody):
    """Messages, and how to answer them."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    kind: ClassVar[str] = "chat.completion"
    prefix: ClassVar[str] = "chatcmpl-"

    def request(self, codec: TextCodec, client: str, max_length: int) -> GenerationRequest:
        """Return what the engine is asked for; runs the template, which may take long.

        max_length   of the server: without a limit, an answer may take what the prompt leaves of it
        """
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true")
        arguments = {
            name: value
            for name, value in (self.chat_template_kwargs or {}).items()
            if name not in ("tokenize", "return_dict", "return_tensors", "conversation", "chat_template")
        }
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        prompt = codec.encode_chat(
            [message.for_template() for message in self.messages],
            answers=self.add_generation_prompt and not self.continue_final_message,
            arguments=arguments,
        )
        limit = self.max_completion_tokens or self.max_tokens or max(1, max_length - len(prompt))
        return GenerationRequest(
            prompts=[prompt],
            samples=self.samples,
            sampling=self.sampling(codec, limit=limit, top_log_probs=self.top_logprobs or 0),
            stops=self.stops,
            client=client,
        )

    def choice(self, codec: TextCodec, piece: Piece, prompt: list[int], whole: bool) -> dict[str, Any]:
        """Return a choice of the answer, or of one event."""
        message: dict[str, Any] = {"role": "assistant"} if whole or piece.first else {}
        message["content"] = piece.text
        if whole:
            message["refusal"] = None
        body: dict[str, Any] = {
            "index": piece.index,
            "message" if whole else "delta": message,
            "logprobs": self._log_probs(codec, piece) if self.logprobs else None,
            "finish_reason": piece.finish,
            "stop_reason": self.stop_reason(piece),
        }
        if self.return_token_ids:
            body |= {"token_ids": piece.tokens, "prompt_token_ids": list(prompt) if piece.first else None}
        if piece.routes is not None:
            body["routed_experts"] = piece.routes
        return body

    def _log_probs(self, codec: TextCodec, piece: Piece) -> dict[str, Any]:
        return {
            "content": [
                {
                    **_named(codec, token, log_prob),
                    "top_logprobs": [_named(codec, int(one), value) for one, value in top],
                }
                for token, log_prob, top in zip(piece.tokens, piece.log_probs, piece.tops, strict=True)
            ],
            "refusal": None,
        }


def _named(codec: TextCodec, token: int, log_prob: float) -> dict[str, Any]:
    name = codec.name(token)
    return {"token": name, "logprob": log_prob, "bytes": list(name.encode())}
