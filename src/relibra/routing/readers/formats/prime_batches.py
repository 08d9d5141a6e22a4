"""Read micro-batches of prime-rl: `rollouts/step_N/rank_R.bin`, written with the file-system transport.

Follows prime-rl 559b447 (2026-08-21): MessagePack of a list of `MicroBatch`, each an array of its fields in order; last
fields with default values are not written. Samples of a micro-batch follow one another; the row of a sample's last
token is a copy or zero, and padding (tokens whose env_name is empty) belongs to the last sample. Micro-batches without
a token that is trained repeat another one to fill ranks up: they are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from relibra.errors import TraceError
from relibra.routing.readers.encodings.json_text import Count
from relibra.routing.readers.encodings.mapped_file import map_file
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.formats.wire_routes import shaped

MAX_TOKENS = 1 << 22
"""Most tokens of a micro-batch, and most micro-batches of a file: a value takes up to 60 times its bytes in memory."""
_Most = Meta(max_length=MAX_TOKENS)


class _MicroBatch(Struct, array_like=True):
    """Fields of a micro-batch; a `Raw` one is passed over. Routes are (data, shape [tokens, layers, K], type)."""

    input_ids: Raw
    loss_mask: Annotated[list[bool | Literal[0, 1]], _Most]
    advantages: Raw
    inference_logprobs: Raw
    position_ids: Raw
    sequence_lengths: Annotated[list[Count], _Most]
    temperatures: Raw
    env_names: Annotated[list[str], _Most]
    seq_lens: Raw = Raw()
    ref_logprobs: Raw = Raw()
    routed_experts: tuple[memoryview, tuple[Count, Count, Count], str] | None = None


def read_prime_batches(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield the samples of one rank; raises TraceError for a damaged file, other fields, and batches without routes."""
    where = f"{path} is no list of micro-batches"
    try:
        batches = msgspec.msgpack.decode(map_file(path, "micro-batches"), type=Annotated[list[Raw], _Most])
        for place, batch in enumerate(batches):
            where = f"{path}, micro-batch {place}"
            found = msgspec.msgpack.decode(batch, type=_MicroBatch)
            if any(found.loss_mask):
                yield from _samples(where, found)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{where}: {error}; expected what prime-rl 559b447 writes: loss_mask $[1] as booleans, sequence_lengths "
            "$[5] as whole numbers, env_names $[7] as texts, routed_experts $[10] as (data, shape, type)"
        ) from error


def _samples(where: str, found: _MicroBatch) -> Iterator[RoutedSample]:
    if found.routed_experts is None:
        raise TraceError(f"{where} has no routes: record with trainer.enable_router_replay=true")
    routes = shaped(f"{where}: routed_experts", *found.routed_experts)
    lengths, names = found.sequence_lengths, found.env_names
    if not sum(lengths) == len(routes) == len(names):
        raise TraceError(
            f"{where}: sequence_lengths do not sum to the {len(routes):,} rows of routes and {len(names):,} env_names"
        )
    padding = sum(1 for _ in takewhile(lambda name: not name, reversed(names)))
    if not lengths or padding >= lengths[-1]:
        raise TraceError(f"{where} has {padding:,} tokens of padding: its last sample must be longer")
    lengths[-1] -= padding
    for sample, (first, tokens) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
        yield RoutedSample(
            where=f"{where}, sample {sample}", ids_TLK=routes[first : first + tokens], tokens=tokens, last_absent=True
        )
