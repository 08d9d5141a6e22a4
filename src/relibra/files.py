"""Files that are either whole or absent: write under a temporary name, fsync, rename; reads of bounded size; TOML."""

from __future__ import annotations

import json
import os
import secrets
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relibra.errors import RelibraError

MAX_TOML_BYTES = 1 << 20


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
    """Write a whole text file atomically; lone surrogates, which UTF-8 does not have, are written as escapes."""
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
        raise error(f"{path} cannot be read ({failure.strerror}): expected {what}") from failure
    if len(data) > most_bytes:
        raise error(f"{path} is larger than {most_bytes:,} bytes: expected {what}")
    return data


def read_toml(path: Path, error: type[RelibraError], what: str) -> dict[str, Any]:
    """Return the content of a TOML file; raises `error` as `read_bounded`, and for anything that is no TOML."""
    data = read_bounded(path, MAX_TOML_BYTES, error, what)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as failure:  # also bad UTF-8, numbers of thousands of digits, deep nesting
        raise error(f"{path} is not valid TOML: {failure}") from failure


def toml_value(value: Any) -> str:
    """Return a value as TOML, which has no null; it reads back the same, lone surrogates escaped as in `write_text`.

    >>> toml_value({"a": [1, 2.5, True], "b": "ü"})
    '{"a" = [1, 2.5, true], "b" = "ü"}'
    """
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml_value(name)} = {toml_value(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):  # TOML takes no lone surrogates in any form, and DEL only escaped
        value = value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value) if isinstance(value, float) else int(value))


def let_all_read(folder: Path) -> None:
    """Let all users read a folder and its files: a server may belong to another user."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of a folder to disk, so that a rename in it is durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
