"""Files that are either whole or absent: write under a temporary name, fsync, rename."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk, so that a rename in it is durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
