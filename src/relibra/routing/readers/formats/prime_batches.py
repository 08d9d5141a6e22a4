"""Read micro-batches of prime-rl: `rollouts/step_N/rank_R.bin`, written with the file-system transport.

Follows prime-rl 559b447 (2026-08-21): MessagePack of a list of `MicroBatch`, each an array of its fields in order:
input_ids, loss_mask, advantages, inference_logprobs, position_ids, sequence_lengths, temperatures, env_names, seq_lens,
ref_logprobs, routed_experts (data, shape [tokens, layers, K], dtype). Samples of a micro-batch follow one another; the
row of a sample's last token is a copy or zero, and padding (tokens whose env_name is empty) belongs to the last sample.
Micro-batches without a token that is trained repeat another one to fill ranks up: they are left out.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from numpy import ndarray

from relibra.errors import TraceError
from relibra.routing.readers.encodings.msgpack import MessagePack
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.formats.wire_routes import shaped

MAX_SEQUENCES = 1 << 20
"""Most samples of a micro-batch."""
_FIELDS = ("loss_mask", "sequence_lengths", "env_names")
# Places of fields; trailing fields with default values are not written.
_LOSS_MASK, _SEQUENCE_LENGTHS, _ENV_NAMES, _ROUTED_EXPERTS = 1, 5, 7, 10


@dataclass(frozen=True, kw_only=True, eq=False)
class _MicroBatch:
    """What is read of a micro-batch.

    trained    whether loss_mask is true anywhere
    lengths    tokens of each sample
    tokens     entries of env_names, of which the last `padding` are empty
    routes     [tokens, layers, choices]; None: not recorded
    """

    trained: bool
    lengths: list[int]
    tokens: int
    padding: int
    routes: ndarray | None


def read_prime_batches(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield the samples of the micro-batches of one rank.

    raises    TraceError for a damaged file, another release's fields, and micro-batches without routes
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise TraceError(f"{path} is empty: expected micro-batches")
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    try:
        reader = MessagePack(data)
        for place in range(reader.array_length()):
            where = f"{path}, micro-batch {place}"
            micro_batch = _micro_batch(where, reader)
            if micro_batch.trained:
                yield from _samples(where, micro_batch)
    except TraceError as error:
        where = "" if str(error).startswith(str(path)) else f"{path} is no list of micro-batches: "
        raise TraceError(f"{where}{error}") from error


def _micro_batch(where: str, reader: MessagePack) -> _MicroBatch:
    """Read the fields of one micro-batch."""
    count = reader.array_length()
    if count <= _ENV_NAMES:
        raise TraceError(f"a micro-batch has {count} fields, without {', '.join(_FIELDS)} in place")
    trained, lengths, names = False, list[int](), (0, 0)
    routes: ndarray | None = None
    for place in range(count):
        if place == _LOSS_MASK:
            trained = reader.any_true()
        elif place == _SEQUENCE_LENGTHS:
            lengths = reader.whole_numbers(MAX_SEQUENCES)
        elif place == _ENV_NAMES:
            names = reader.texts()
        elif place == _ROUTED_EXPERTS and not reader.is_none():
            routes = _routes(f"{where}: routed_experts", reader)
        elif place != _ROUTED_EXPERTS:
            reader.skip()
    return _MicroBatch(trained=trained, lengths=lengths, tokens=names[0], padding=names[1], routes=routes)


def _routes(where: str, reader: MessagePack) -> ndarray:
    """Read (data, shape, dtype)."""
    if reader.array_length() != 3:
        raise TraceError(f"{where} is not (data, shape, dtype)")
    data, shape, dtype = reader.binary(), reader.whole_numbers(3), reader.text()
    return shaped(where, data, shape, dtype)


def _samples(where: str, found: _MicroBatch) -> Iterator[RoutedSample]:
    lengths, padding, routes = found.lengths, found.padding, found.routes
    if routes is None:
        raise TraceError(f"{where} has no routes: record with trainer.enable_router_replay=true")
    if not sum(lengths) == len(routes) == found.tokens:
        raise TraceError(
            f"{where}: sequence_lengths do not sum to the {len(routes):,} rows of routes and {found.tokens:,} env_names"
        )
    if not lengths or padding >= lengths[-1]:
        raise TraceError(f"{where} has {padding:,} tokens of padding, and its last sample is no longer")
    first = 0
    for sample, length in enumerate(lengths):
        tokens = length - padding * (sample == len(lengths) - 1)
        yield RoutedSample(
            where=f"{where}, sample {sample}",
            ids_TLK=routes[first : first + tokens],
            tokens=tokens,
            last_absent=True,
        )
        first += length
