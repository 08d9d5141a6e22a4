"""`/v1/completions`: what a body may hold, and the answer, whole or as events."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from relibra.serving.server.endpoints.sampling_body import SamplingBody
from relibra.serving.server.generation import GenerationRequest, Piece
from relibra.serving.server.text import TextCodec

DEFAULT_LIMIT = 16
"""New tokens where a body does not say how many, as OpenAI's."""
Token = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
_quick = Field(fail_fast=True)
Tokens = Annotated[list[Token], _quick]
"""Of a long list, only the first mistake is looked for."""


class CompletionBody(SamplingBody):
    """A prompt, or several, as text or tokens."""

    prompt: str | Tokens | Annotated[list[str], _quick] | Annotated[list[Tokens], _quick]
    max_tokens: int | None = Field(DEFAULT_LIMIT, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = False

    kind: ClassVar[str] = "text_completion"
    prefix: ClassVar[str] = "cmpl-"

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def request(self, codec: TextCodec, client: str, _max_length: int) -> GenerationRequest:
        """Return what the engine is asked for; encodes text, which may take long."""
        limit = DEFAULT_LIMIT if self.max_tokens is None else self.max_tokens
        return GenerationRequest(
            prompts=[codec.encode(one) if isinstance(one, str) else one for one in self.prompts],
            samples=self.samples,
            sampling=self.sampling(
                codec,
                limit=max(1, limit),
                top_log_probs=self.logprobs or 0,
                prompt_log_probs=bool(self.echo and self.logprobs is not None),
            ),
            stops=self.stops,
            client=client,
        )

    def choice(self, codec: TextCodec, piece: Piece, prompt: list[int], _whole: bool) -> dict[str, Any]:
        """Return a choice of the answer, or of one event."""
        kept = 0 if self.max_tokens == 0 else len(piece.tokens)
        tokens, text = piece.tokens[:kept], piece.text if kept else ""
        echoed = prompt if self.echo and piece.first else []
        body: dict[str, Any] = {
            "index": piece.index,
            "text": codec.decode(echoed) + text if echoed else text,
            "logprobs": None,
            "finish_reason": "length" if piece.finish and self.max_tokens == 0 else piece.finish,
            "stop_reason": self.stop_reason(piece),
        }
        if self.logprobs is not None:
            body["logprobs"] = self._log_probs(codec, piece, echoed, kept)
        if self.return_token_ids:
            body |= {"token_ids": tokens, "prompt_token_ids": list(prompt) if piece.first else None}
        if piece.routes is not None:
            body["routed_experts"] = piece.routes
        return body

    def _log_probs(self, codec: TextCodec, piece: Piece, echoed: list[int], kept: int) -> dict[str, Any]:
        """Return tokens, their log-probs and the likeliest ones; the first token of a prompt has none."""
        before = [None, *(piece.prompt_log_probs or [])] if echoed else []
        names = [codec.name(token) for token in (*echoed, *piece.tokens[:kept])]
        likeliest = [
            {codec.name(int(token)): value for token, value in top} | {codec.name(sampled): log_prob}
            for sampled, log_prob, top in zip(
                piece.tokens[:kept], piece.log_probs[:kept], piece.tops[:kept], strict=True
            )
        ]
        offsets = [0]
        for name in names[:-1]:
            offsets.append(offsets[-1] + len(name))
        return {
            "tokens": names,
            "token_logprobs": [*before, *piece.log_probs[:kept]],
            "top_logprobs": [*(None for _ in before), *likeliest] if self.logprobs else None,
            "text_offset": offsets[: len(names)],
        }
