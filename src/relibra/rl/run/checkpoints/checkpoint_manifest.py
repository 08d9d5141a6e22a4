"""The manifest of a checkpoint: size and SHA-256 of its files, to detect damage before reading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from relibra.files import sync_folder, write_text

MANIFEST = "manifest.json"
FORMAT = 1

Digest = tuple[int, str]
"""Size in bytes, SHA-256."""


class _Manifest(Struct):
    format: int
    files: dict[str, Digest]


def digest_files(folder: Path, share: int, shares: int) -> dict[str, Digest]:
    """Return size and SHA-256 of a share of the files below a folder, by relative path, and sync them to the disk.

    share   index among `shares`: files are distributed in the order of their names
    """
    return {name: _digest(folder / name, sync=True) for name in _files(folder)[share::shares]}


def write_manifest(folder: Path, files: Mapping[str, Sequence[int | str]]) -> None:
    """Write the manifest of a folder whose files are synced; `files` as of `digest_files`."""
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_folder(path)
    text = json.dumps({"format": FORMAT, "files": dict(sorted(files.items()))}, indent=1)
    write_text(folder / MANIFEST, text + "\n")


def find_damage(folder: Path, share: int, shares: int) -> str | None:
    """Compare a share of the files of a folder with its manifest; return the first difference, or None.

    share   index among `shares`, as in `digest_files`
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=_Manifest)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__})"
    if manifest.format != FORMAT:
        return f"its format is {manifest.format}, this version of relibra reads {FORMAT}"
    wanted = manifest.files
    if extra := set(_files(folder)) - set(wanted):
        return f"{min(extra)} is not in its manifest"
    for name in sorted(wanted)[share::shares]:
        try:
            found = _digest(folder / name, sync=False)
        except (OSError, ValueError) as error:  # a name may hold anything
            return f"{name}: {getattr(error, 'strerror', None) or error}"
        if found[0] != wanted[name][0]:
            return f"{name} has {found[0]} bytes instead of {wanted[name][0]}"
        if found != wanted[name]:
            return f"{name} has changed contents (SHA-256)"
    return None


def _files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def _digest(path: Path, *, sync: bool) -> Digest:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
