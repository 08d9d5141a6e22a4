"""Rows of a `.jsonl` or `.parquet` file. JSON lines are read on demand; only their offsets are in memory."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.errors import ConfigError, in_a_line


class WrittenFloat(float):
    """A number of a JSON file that remembers how it was written."""

    def __new__(cls, written: str) -> WrittenFloat:
        """Read it as JSON does."""
        number = super().__new__(cls, written)
        number.written = written
        return number

    written: str


@dataclass(frozen=True, eq=False)
class JsonLines:
    """A file with one JSON object per line; blank lines are skipped. Lines are parsed on access.

    path       as the user wrote it, for messages
    file       absolute, because a reward function may change the working folder
    digest     of all lines that are not blank
    offset_r   byte offset of each row
    line_r     line number of each row, from 1
    """

    path: Path
    file: Path
    digest: str
    offset_r: Int64[ndarray, " r"]
    line_r: Int64[ndarray, " r"]

    @classmethod
    def open(cls, path: Path) -> JsonLines:
        """Index the lines of a file."""
        offsets, lines = array("q"), array("q")
        offset, digest = 0, sha256()
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if row := line.strip():
                    digest.update(row + b"\n")
                    offsets.append(offset)
                    lines.append(number)
                offset += len(line)
        offset_r, line_r = np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64)
        return cls(path, path.absolute(), digest.hexdigest(), offset_r, line_r)

    def __len__(self) -> int:
        return len(self.offset_r)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all rows in order; raises ConfigError as `row` does."""
        with self.file.open("rb") as file:
            for index, line in enumerate(line for line in file if line.strip()):
                yield self._parsed(line, index)

    def row(self, index: int) -> dict[str, Any]:
        """Return one row; raises ConfigError if the line is no JSON object."""
        with self.file.open("rb") as file:
            file.seek(self.offset_r[index])
            return self._parsed(file.readline(), index)

    def name(self, index: int) -> str:
        """Return file and line of a row, for error messages."""
        return f"{self.path}, line {self.line_r[index]}"

    def _parsed(self, line: bytes, index: int) -> dict[str, Any]:
        try:
            row = json.loads(line, parse_float=WrittenFloat)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.name(index)}: not UTF-8 ({error.reason}); save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self.name(index)}: not JSON ({error}); a .jsonl file holds one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{self.name(index)}: got a JSON {type(row).__name__}; a .jsonl file holds one JSON object per line"
            )
        return row


@dataclass(frozen=True, eq=False)
class Parquet:
    """A Parquet file in memory, as a `pyarrow.Table`; `digest` is that of the file."""

    path: Path
    digest: str
    table: Any

    @classmethod
    def open(cls, path: Path) -> Parquet:
        """Read the file; raises ConfigError if pyarrow is missing or the file is no Parquet file."""
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ConfigError(
                f"{path} is read with pyarrow, which is not installed: in the checkout, pip install -e "
                "'.[data]', or use .jsonl"
            ) from error
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        with _readable(path):
            table = parquet.read_table(path)
            for place, field in enumerate(table.schema):
                if str(field.type) == "float":  # of 32 bits: by way of text a 0.1 of the file is Python's 0.1
                    doubles = table.column(place).cast("string").cast("double")
                    table = table.set_column(place, field.name, doubles)
            return cls(path, digest, table)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all rows in order."""
        for batch in self.table.to_batches(max_chunksize=1024):
            with _readable(self.path):
                rows = batch.to_pylist()
            yield from rows

    def row(self, index: int) -> dict[str, Any]:
        """Return one row."""
        with _readable(self.path):
            return self.table.slice(index, 1).to_pylist()[0]

    def name(self, index: int) -> str:
        """Return file and row number (from 1), for error messages."""
        return f"{self.path}, row {index + 1}"


Rows = JsonLines | Parquet
"""Rows by index, each a dictionary of columns; `digest` differs for other rows, or another order."""


def open_rows(path: Path, setting: str) -> Rows:
    """Open a file by its suffix.

    setting   name of the setting, for error messages
    raises    ConfigError if the file is missing, empty, of another type, or unreadable
    """
    kinds: dict[str, Callable[[Path], Rows]] = {".jsonl": JsonLines.open, ".parquet": Parquet.open}
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"{setting} is {str(path)!r}: a file of prompts ends in {' or '.join(kinds)}; convert it, or rename it"
        )
    if not path.is_file():
        raise ConfigError(f"{setting} is {str(path)!r}, and there is no such file: it was looked for from {Path.cwd()}")
    try:
        rows = kind(path)
    except OSError as error:
        raise ConfigError(f"{setting} {str(path)!r} cannot be read: {error}; check the file") from error
    if not len(rows):
        raise ConfigError(f"{setting} {str(path)!r} holds no rows: at least one prompt is needed")
    return rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any error of pyarrow, such as text that is no UTF-8, into a ConfigError."""
    try:
        yield
    except Exception as error:  # pyarrow raises a dozen types
        raise ConfigError(f"{path} is not a readable Parquet file: {in_a_line(error)}") from error


def column(row: Mapping[str, Any], name: str, *, origin: str, remedy: str) -> Any:
    """Return the value in a column of a row.

    origin    file and line, for the error message
    remedy    next step, for the error message
    raises    ConfigError if there is no such column
    """
    if name not in row:
        there = ", ".join(map(repr, row)) or "none"
        raise ConfigError(f"{origin}: no column {name!r}; its columns are {there}: {remedy}")
    return row[name]
