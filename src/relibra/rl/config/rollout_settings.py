"""Settings of the rollout: what is sampled, and by which engine. Imports no torch."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_LENGTH = 1 << 20
"""Most tokens of a prompt, and of a response."""
MOST_SERVERS = 64
"""Most rollout servers of a run."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine."""
LEAST_SERVED_HEAD = 32
MOST_RESPONSES = 1 << 22
"""Most responses of a step."""


class Section(BaseModel):
    """Base of a section: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RolloutSettings(Section):
    """Sampling of responses."""

    prompts_per_step: int = Field(32, ge=1, le=1 << 20)
    """Prompts per step, summed over ranks; times `responses_per_prompt` = responses in progress at once."""
    responses_per_prompt: int = Field(8, ge=1, le=1 << 16)
    """Responses per prompt: the group of group-relative advantages."""
    max_response: int = Field(8192, ge=1, le=MAX_LENGTH)
    """Longest response in tokens; unless given, at most what prompts leave of the context of the model."""
    window: int = Field(0, ge=0, le=MAX_LENGTH)
    """Most tokens that a step adds to a response (T-PPO); unfinished ones continue in the next step. 0: no limit.
    Preset tppo: a divisor of max_response near a quarter of it, unless given."""
    refill: bool = False
    """Start a new response as soon as one ends inside a window; a step still has at most `window` decode steps."""
    max_prompt: int = Field(1024, ge=1, le=MAX_LENGTH)
    """Longest prompt in tokens; unless given, at most half of the context of the model."""
    max_batch: int = Field(256, ge=1, le=1 << 16)
    """Most responses that one rank decodes at once; further ones start as others finish. Limits KV-cache memory."""
    engine: Literal["embedded", "serve", "sglang", "vllm"] = "embedded"
    """Sampler: "embedded" is a full copy of the policy in every rank; "serve" a server of relibra that the run starts,
    attention and experts apart; the others are servers at `url`."""
    url: tuple[str, ...] = Field((), max_length=MOST_SERVERS)
    """sglang, vllm: server address, such as http://127.0.0.1:30000; or several, as a list or with commas: each
    response may come from any of them. They must return log-probs and routed experts."""
    server_options: str = Field("", max_length=1000)
    """serve: options of `relibra serve`, as "--attention 2 --experts 2"; the run sets address, dtype and lengths."""
    server_weights: Path | None = None
    """sglang, vllm: folder through which new weights go (`transfer`), a fresh one inside it per version; trainer and
    server must see it under the same path."""
    transfer: Literal["folder", "nccl", "ipc", "gloo"] = "folder"
    """How new weights go to servers: through files in `server_weights`; or, to vLLM alone, from GPUs to GPUs of other
    processes (nccl), within a GPU that both share (ipc: on this machine alone), or between CPUs (gloo)."""
    sleep: bool = False
    """sglang, vllm: on the same GPUs as the trainer; the server gives their memory back while the trainer works."""
    ahead: int = Field(0, ge=0, le=8)
    """Servers: steps whose responses begin while a step trains; a token is trained at most so many steps after the
    weights that sampled it."""
    on_update: Literal["cut", "keep"] = "cut"
    """What an update of the weights does with responses under way, which go on with the new ones: "cut" stops them and
    feeds them whole again. "keep" lets the server hold them (sglang, vllm, with `ahead`): their tokens count as mixed.
    "keep" with `window` and "embedded": their keys, values and routes stay in memory, those of older weights, while the
    step trains; `mixed_tokens` counts what is sampled over them. A checkpoint drops them, so that a resumed run is the
    same."""
    mixed_routes: Literal["replay", "mask", "rescore"] = "replay"
    """Tokens before a cut have routes of the weights after it; those of on_update "keep" may, too. "replay" trains on
    them, "mask" leaves them out, "rescore" trains on them with log-probs of those weights too, which the server
    computes with what follows a cut."""
    start_seconds: float = Field(600.0, ge=0, le=1e6)
    """Servers: seconds to wait for one that does not answer, before the run begins and during it; one that is started
    again meanwhile first loads the weights that were published last."""
    api_key_from: str = ""
    """sglang, vllm: where the server's key is, as env:NAME or file:PATH; the key itself is no setting."""
    timeout_seconds: float = Field(600.0, gt=0, le=1e6)
    """sglang, vllm: seconds that a request may take in all, up to 1,024 tokens; longer ones get proportionally more. A
    request that takes longer is sent once more."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Sampling temperature; log-probs in rollout and training include it."""

    @property
    def least_head_dim(self) -> int:
        """Least width of heads that the sampler takes: vLLM's attention on a CPU needs one."""
        return 0 if self.engine in ("embedded", "serve") else LEAST_SERVED_HEAD

    @property
    def responses_per_step(self) -> int:
        """Responses sampled at once, over all ranks."""
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def keeps_cache(self) -> bool:
        """Whether a rank keeps the keys and values of unfinished responses while a step trains."""
        return self.on_update == "keep" and self.engine == "embedded"

    @property
    def window_tokens(self) -> int:
        """Most tokens that a step adds to a response."""
        return self.window or self.max_response

    @property
    def max_windows(self) -> int:
        """Most windows of a response; with `refill` the first may be shorter, which adds one."""
        return self.max_response // self.window_tokens + self.refill

    @field_validator("url", mode="before")
    @classmethod
    def _split_addresses(cls, value: Any) -> Any:
        """Return the addresses of a text, which commas separate; what is no text is checked as it is."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("url")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url {url[:200]!r} must begin with http:// or https://, as in http://127.0.0.1:30000")
        bare = [url.rstrip("/") for url in value]
        if twice := next((url for url in bare if bare.count(url) > 1), None):
            raise ValueError(f"url names {twice[:200]!r} twice: name each server once")
        return value

    @field_validator("server_options")
    @classmethod
    def _are_words(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"server_options {value!r} are no words of a command: {error}") from error
        return value

    @field_validator("api_key_from")
    @classmethod
    def _names_a_place(cls, value: str) -> str:
        if not re.fullmatch(r"(env:[A-Za-z_][A-Za-z0-9_]*|file:.+)?", value):  # it may be the key: not repeated
            raise ValueError("write env:NAME of an environment variable, or file:PATH, and not the key itself")
        return value
