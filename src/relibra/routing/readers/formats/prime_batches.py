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
from pathlib import Path
from typing import Any

from relibra.errors import TraceError
from relibra.routing.readers.encodings.msgpack import MessagePack
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.formats.wire_routes import shaped

# Places of fields; trailing fields with default values are not written.
_READ = {1: "loss_mask", 5: "sequence_lengths", 7: "env_names", 10: "routed_experts"}


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
            fields = _fields(reader)
            if any(fields["loss_mask"]):
                yield from _samples(f"{path}, micro-batch {place}", fields)
    except TraceError as error:
        where = "" if str(error).startswith(str(path)) else f"{path} is no list of micro-batches: "
        raise TraceError(f"{where}{error}") from error


def _fields(reader: MessagePack) -> dict[str, Any]:
    """Return the fields of one micro-batch that are read."""
    count, found = reader.array_length(), dict.fromkeys(_READ.values())
    for place in range(count):
        if place in _READ:
            found[_READ[place]] = reader.value()
        else:
            reader.skip()
    lists = ("loss_mask", "sequence_lengths", "env_names")
    if not all(isinstance(found[name], list) for name in lists):
        raise TraceError(
            f"a micro-batch has {count} fields, without loss_mask, sequence_lengths and env_names in place"
        )
    return found


def _samples(where: str, fields: dict[str, Any]) -> Iterator[RoutedSample]:
    lengths, names, packed = fields["sequence_lengths"], fields["env_names"], fields["routed_experts"]
    if packed is None:
        raise TraceError(f"{where} has no routes: record with trainer.enable_router_replay=true")
    if not isinstance(packed, list) or len(packed) != 3 or not isinstance(packed[0], memoryview):
        raise TraceError(f"{where}: routed_experts is not (data, shape, dtype)")
    routes = shaped(f"{where}: routed_experts", *packed)
    if not all(type(n) is int and n >= 0 for n in lengths) or not sum(lengths) == len(routes) == len(names):
        raise TraceError(
            f"{where}: sequence_lengths do not sum to the {len(routes):,} rows of routes and {len(names):,} env_names"
        )
    padding = next((n for n, name in enumerate(reversed(names)) if name != ""), len(names))
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
