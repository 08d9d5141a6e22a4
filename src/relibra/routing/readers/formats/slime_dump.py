"""Read rollout dumps of slime: `--save-debug-rollout-data PATH`, or `rollout_data/` of `--dump-details`.

Follows slime 624b824 (2026-08-21): a torch file with `{"rollout_id", "samples": [...]}`; a sample is the
dictionary of its `Sample`, with `tokens`, `response_length`, `index`, `group_index`, `weight_versions` and
`rollout_routed_experts` [n-1, all decoder layers, K] int32. miles writes the same; its rows of -1 are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relibra.errors import TraceError
from relibra.routing.readers.encodings.excerpts import excerpt
from relibra.routing.readers.encodings.inert_pickle import InertObject
from relibra.routing.readers.encodings.torch_archive import TorchArchive, as_mapping
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample


def read_slime_dump(path: Path, rules: ImportRules) -> Iterator[RoutedSample]:  # noqa: ARG001 - as every reader
    """Yield the samples of a dump."""
    archive = TorchArchive(path)
    samples = as_mapping(archive.value).get("samples")
    if not isinstance(samples, list):
        raise TraceError(f"{path} has no list 'samples': expected a rollout dump (--save-debug-rollout-data)")
    for place, sample in enumerate(samples):
        yield _sample(f"{path}, sample {place}", archive, sample)


def _sample(where: str, archive: TorchArchive, sample: Any) -> RoutedSample:
    if not isinstance(sample, Mapping):
        raise TraceError(f"{where} is {type(sample).__name__}: expected a dictionary")
    if sample.get("rollout_routed_experts") is None:
        raise TraceError(f"{where} has no rollout_routed_experts: record with --use-rollout-routing-replay")
    tokens = sample.get("tokens")
    if not isinstance(tokens, list | InertObject):
        raise TraceError(f"{where} has no list of tokens")
    length = len(tokens) if isinstance(tokens, list) else archive.array(f"{where}: tokens", tokens).size
    response = sample.get("response_length")
    if type(response) is not int or not 0 <= response <= length:
        raise TraceError(
            f"{where} has a response of {excerpt(response)} tokens: allowed are 0 to its {length:,} tokens"
        )
    versions = sample.get("weight_versions")
    version = versions[-1] if isinstance(versions, list) and versions else None
    version = version if _number(version) is None else str(version)
    group, index = _number(sample.get("group_index")), _number(sample.get("index"))
    return RoutedSample(
        where=where,
        ids_TLK=archive.array(f"{where}: rollout_routed_experts", sample["rollout_routed_experts"]),
        tokens=length,
        prompt_tokens=length - response,
        sample_id=index,
        group=None if group is None else str(group),
        version=int(version) if isinstance(version, str) and len(version) < 18 and version.isdecimal() else 0,
    )


def _number(value: Any) -> int | None:
    """Return the value if it is a whole number of 63 bits, else None."""
    return value if type(value) is int and abs(value) < 1 << 62 else None
