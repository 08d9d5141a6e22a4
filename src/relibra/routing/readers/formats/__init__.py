"""Recordings of engines and frameworks: one file per format yields `RoutedSample`s, `normalise` makes a trace of them.

`import_samples` selects the reader; each file's first lines say which released version it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from relibra.errors import TraceError
from relibra.routing.array_sizes import memory_errors
from relibra.routing.import_choices import Format, ShortRows, ZeroRows
from relibra.routing.readers.formats.answers import read_answers
from relibra.routing.readers.formats.megatron_trace import read_megatron_trace
from relibra.routing.readers.formats.padded_batch import read_nemo_batch, read_skyrl_batch, read_verl_batch
from relibra.routing.readers.formats.prime_batches import read_prime_batches
from relibra.routing.readers.formats.routed_sample import ImportRules, RoutedSample
from relibra.routing.readers.formats.sglang_recorder import read_sglang_recorder
from relibra.routing.readers.formats.slime_dump import read_slime_dump

READERS: Mapping[Format, Callable[[Path, ImportRules], Iterator[RoutedSample]]] = {
    Format.ANSWERS: read_answers,
    Format.VERL: read_verl_batch,
    Format.SLIME: read_slime_dump,
    Format.SKYRL: read_skyrl_batch,
    Format.NEMO_RL: read_nemo_batch,
    Format.PRIME_RL: read_prime_batches,
    Format.MEGATRON: read_megatron_trace,
    Format.SGLANG_RECORDER: read_sglang_recorder,
}


def import_samples(paths: Sequence[Path], format: Format, rules: ImportRules) -> Iterator[RoutedSample]:
    """Yield the samples of files of one format; raises TraceError for damage, and for what could mean two things."""
    for path in paths:
        with memory_errors(str(path), TraceError):
            if not path.is_file():
                raise TraceError(
                    f"{path} {'is no file' if path.exists() else 'does not exist'}: name the files to import"
                )
            yield from READERS[format](path, rules)


__all__ = ["READERS", "Format", "ImportRules", "RoutedSample", "ShortRows", "ZeroRows", "import_samples"]
