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
    """Yield the samples of a dump.

    raises    TraceError for a damaged file, another dump, and a sample without routes
    """
    with TorchArchive(path) as archive:
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
    tokens = _length(where, archive, sample.get("tokens"))
    response = sample.get("response_length")
    if type(response) is not int or not 0 <= response <= tokens:
        raise TraceError(
            f"{where} has a response of {excerpt(response)} tokens: allowed are 0 to its {tokens:,} tokens"
        )
    versions = sample.get("weight_versions")
    last = versions[-1] if isinstance(versions, list) and versions else "0"
    last = str(last) if isinstance(last, int) and 0 <= last < 1 << 62 else last
    group, index = sample.get("group_index"), sample.get("index")
    return RoutedSample(
        where=where,
        ids_TLK=archive.array(f"{where}: rollout_routed_experts", sample["rollout_routed_experts"]),
        tokens=tokens,
        prompt_tokens=tokens - response,
        sample_id=index if type(index) is int and abs(index) < 1 << 62 else None,
        group=str(group) if type(group) is int and abs(group) < 1 << 62 else None,
        version=int(last) if isinstance(last, str) and len(last) < 18 and last.isdecimal() else 0,
    )


def _length(where: str, archive: TorchArchive, tokens: Any) -> int:
    """Return the number of tokens, a list or a tensor."""
    if isinstance(tokens, list):
        return len(tokens)
    if isinstance(tokens, InertObject):
        return int(archive.array(f"{where}: tokens", tokens).size)
    raise TraceError(f"{where} has no list of tokens")
