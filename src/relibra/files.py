"""Files that are either whole or absent: write under a temporary name, fsync, rename; and reads of bounded size."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relibra.errors import RelibraError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is fsynced and renamed to `path`, otherwise removed.

    A reader sees the old file or the new one, whenever the writer is killed. What a SIGKILL leaves behind is a hidden
    `.NAME.*.tmp` file that no reader of ours opens.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.tmp")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, 0o666))
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)  # a writer may have put a file of its own there, readable by nobody else
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file atomically; halves of surrogate pairs, which UTF-8 does not have, are written escaped."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_bounded(path: Path, most_bytes: int, error: type[RelibraError], what: str) -> bytes:
    """Return the bytes of a file.

    what      it should be, for the message, such as "a deployment plan"
    raises    `error` where it cannot be read or has more than `most_bytes`
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as failure:
        raise error(f"{path} cannot be read ({failure.strerror}): name {what}") from failure
    if len(data) > most_bytes:
        raise error(f"{path} is larger than {most_bytes:,} bytes: name {what}")
    return data


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk, so that a rename in it is durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
