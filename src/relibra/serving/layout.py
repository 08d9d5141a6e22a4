"""`WorkerLayout`: how many workers of each role serve a model, and which experts each expert worker holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from relibra.errors import ConfigError
from relibra.field_checks import check_fields

Transport = Literal["shared", "tcp"]
"""How rows travel: through memory that both processes map, or over TCP."""
WorkerCount = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True, kw_only=True)
class WorkerLayout:
    """Workers of one served model.

    attention       attention workers: data parallel, each with all weights except those of experts
    experts         expert workers: each holds some experts of every layer
    micro_batches   of each attention worker: the attention of one runs while experts run another
    spare_experts   experts that each expert worker holds beyond its share, so that others have copies
    transport       of rows between the two
    max_tokens      most tokens of one forward pass of one micro-batch: sizes every buffer
    max_batch       most requests that one attention worker decodes at once, over its micro-batches
    max_length      most tokens of one request, prompt and answer
    kv_tokens       tokens of the KV cache of one attention worker: of each micro-batch, its requests under way x the
                    tokens that the longest of them may reach
    timeout         seconds that one side waits for the other before it gives up
    """

    attention: WorkerCount = 1
    experts: WorkerCount = 1
    micro_batches: Annotated[int, Field(ge=1, le=4)] = 2
    spare_experts: Annotated[int, Field(ge=0)] = 0
    transport: Transport = "shared"
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    max_batch: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    max_length: Annotated[int, Field(ge=1, le=1 << 24)] = 4096
    kv_tokens: Annotated[int, Field(ge=1, le=1 << 40)] = 65536
    timeout: Annotated[float, Field(gt=0)] = 60.0

    def __post_init__(self) -> None:
        """Raise ConfigError for values out of range."""
        check_fields(WorkerLayout, vars(self), "relibra serve", ConfigError)
        if self.max_length * self.micro_batches > self.kv_tokens:
            raise ConfigError(
                f"--kv-tokens {self.kv_tokens} leaves {self.kv_tokens // self.micro_batches} tokens to each of "
                f"{self.micro_batches} micro-batches, less than --max-length {self.max_length}: raise it, or lower the "
                "length"
            )

    @property
    def micro_batch_kv_tokens(self) -> int:
        """Tokens of the KV cache of one micro-batch."""
        return self.kv_tokens // self.micro_batches

    @property
    def max_running(self) -> int:
        """Most requests that one micro-batch decodes at once."""
        return -(-self.max_batch // self.micro_batches)


def split_experts(num_experts: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each worker, in ascending order; the first workers take the remainder.

    raises   ConfigError with more workers than experts

    >>> split_experts(5, 2)
    ((0, 1, 2), (3, 4))
    """
    if workers > num_experts:
        raise ConfigError(
            f"--experts {workers} is more than the {num_experts} experts of a layer: use at most {num_experts} workers"
        )
    base, rest = divmod(num_experts, workers)
    ends = [sum(base + (w < rest) for w in range(n)) for n in range(workers + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))
