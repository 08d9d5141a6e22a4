"""`/inference/v1/generate`: tokens to tokens, as vLLM's endpoint of that name, with log-probs and routed experts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from relibra.serving.server.endpoints.completions import Tokens
from relibra.serving.server.endpoints.sampling_body import SamplingBody
from relibra.serving.server.generation import GenerationRequest, Piece
from relibra.serving.server.text import TextCodec


class TokenSampling(SamplingBody):
    """The `sampling_params` of a request.

    logprobs          likeliest tokens beside each sampled one; None: no log-probs
    prompt_logprobs   None: no log-probs of the prompt
    """

    max_tokens: int | None = Field(16, ge=1, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)


class TokenBody(BaseModel):
    """Tokens to go on from."""

    model_config = ConfigDict(extra="allow", hide_input_in_errors=True)

    token_ids: Annotated[Tokens, Field(min_length=1)]
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str = Field("", max_length=1024)
    stream: bool | None = False

    def request(self, codec: TextCodec, client: str) -> GenerationRequest:
        """Return what the engine is asked for; routes are always told."""
        asked = self.sampling_params.model_copy(update={"return_routed_experts": True})
        return GenerationRequest(
            prompts=[self.token_ids],
            samples=asked.samples,
            sampling=asked.sampling(
                codec,
                limit=asked.max_tokens or 16,
                top_log_probs=asked.logprobs or 0,
                prompt_log_probs=asked.prompt_logprobs is not None,
            ),
            stops=asked.stops,
            client=client,
        )

    def answer(self, pieces: list[Piece], version: str) -> dict[str, Any]:
        """Return the answer.

        version   of the weights that sampled it
        """
        body: dict[str, Any] = {"choices": [self._choice(piece, version) for piece in pieces]}
        scores = pieces[0].prompt_log_probs
        if scores is not None:
            tokens = self.token_ids[1:]
            listed = [{str(token): {"logprob": score}} for token, score in zip(tokens, scores, strict=True)]
            body["prompt_logprobs"] = [None, *listed]
        return body

    def _choice(self, piece: Piece, version: str) -> dict[str, Any]:
        log_probs = None
        if self.sampling_params.logprobs is not None:
            content = [
                {
                    "token": f"token_id:{token}",
                    "logprob": log_prob,
                    "top_logprobs": [{"token": f"token_id:{int(one)}", "logprob": value} for one, value in top],
                }
                for token, log_prob, top in zip(piece.tokens, piece.log_probs, piece.tops, strict=True)
            ]
            log_probs = {"content": content}
        return {
            "index": piece.index,
            "token_ids": piece.tokens,
            "logprobs": log_probs,
            "finish_reason": piece.finish,
            "routed_experts": piece.routes,
            "weight_version": version,
        }
