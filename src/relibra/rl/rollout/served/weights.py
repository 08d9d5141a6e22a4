"""New weights for a server: a fresh folder per version, loaded, caches dropped, version read back."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import httpx
from safetensors import SafetensorError

from relibra.errors import EngineError
from relibra.files import sync_folder
from relibra.rl.rollout.served.engine import ServerEngine, shown
from relibra.rl.rollout.served.requests import refused_with

_FOLDER = re.compile(r"version-\d{6,}-[0-9a-f]{8}")


def publish_weights(model: Any, folder: Path, engine: ServerEngine, weight_version: int) -> None:
    """Write a `transformers` model into a fresh folder, let the server load it, and drop the server's caches.

    folder    visible to the server under the same absolute path; it holds one folder per version, the last one stays
    raises    EngineError when the folder cannot be written or the server does not load it
    """
    written = write_version(model, folder, engine, weight_version)
    asyncio.run(_load(engine, written, str(weight_version)))
    engine.published.version = weight_version
    for old in folder.iterdir():
        if _FOLDER.fullmatch(old.name) and old.name != written.name:
            shutil.rmtree(old, ignore_errors=True)


def write_version(model: Any, folder: Path, engine: ServerEngine, weight_version: int) -> Path:
    """Write a model into a new folder inside `folder`, which all users may read, and return its absolute path.

    It has its name only when it is complete.

    raises    EngineError where it cannot be written
    """
    path = folder.absolute() / f"version-{weight_version:06d}-{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.mkdir(parents=True)
        try:
            model.save_pretrained(temporary)
            for file in temporary.iterdir():
                file.chmod(0o644)  # safetensors writes files that only their owner may read
            temporary.chmod(0o755)
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot write weights for {engine.url} into {folder} (rollout.server_weights): {error}"
        ) from error
    return path


async def _load(engine: ServerEngine, folder: Path, version: str) -> None:
    async with engine.connections(1) as client:
        if engine.dialect == "sglang":
            body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
            answer = await engine.call(client, "/update_weights_from_disk", body)
            if not isinstance(answer, dict) or answer.get("success") is not True:
                said = answer.get("message") if isinstance(answer, dict) else answer
                raise EngineError(f"{engine.url} did not load {folder}: {shown(said, 300)}")
            return
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await engine.call(client, "/collective_rpc", load)
        await _drop_caches(engine, client)
        await _set_version(engine, client, version)


async def _drop_caches(engine: ServerEngine, client: httpx.AsyncClient) -> None:
    """Drop the keys and values that the weights before computed.

    raises    EngineError where the server keeps them: it does while a request runs
    """
    for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true"):
        answer = await engine.call(client, path, {})
        if not isinstance(answer, dict) or answer.get("success", True) is True:  # old servers say nothing
            return
    raise EngineError(
        f"{engine.url} did not drop its caches after an update of the weights: does another client use it? Give this "
        "run a server of its own"
    )


async def _set_version(engine: ServerEngine, client: httpx.AsyncClient, version: str) -> None:
    """Set the version of the weights, and read it back; servers before 0.29 have none.

    raises    EngineError where another one comes back
    """
    try:
        await engine.call(client, "/update_weight_version", {"new_version": version})
        answer = await engine.call(client, "/weight_info")
    except EngineError as error:
        if refused_with(error) == 404:
            return
        raise
    found = answer.get("weight_version") if isinstance(answer, dict) else None
    if str(found) != version:
        raise EngineError(
            f"{engine.url} says that its weights have version {shown(found)}: expected {version}, which it was just "
            "told to load; does another run use it?"
        )
