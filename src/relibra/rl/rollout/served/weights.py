"""New weights for servers: a fresh folder per version, readable for others, removed after the next."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from relibra.errors import EngineError
from relibra.files import sync_folder
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.pool import on_every_server

_FOLDER = re.compile(r"version-\d{6,}-[0-9a-f]{8}")


def publish_weights(model: Any, folder: Path, engine: ServerEngine, weight_version: int) -> Path:
    """Write a `transformers` model into a fresh folder, let all servers load it, and drop their caches.

    A server that does not answer is left out, while there is another: it loads the weights when it answers again.

    folder    visible to the servers under the same absolute path; it holds one folder per version, the last one stays
    returns   the folder of this version
    raises    EngineError when the folder cannot be written, a server does not load it, or none answers
    """
    written = write_version(model, folder, engine.names, weight_version)

    async def load(server: ServerClient) -> None:
        async with server.connections(1) as client:
            await server.load(client, written, weight_version)

    asyncio.run(on_every_server(engine.servers, load, retry_seconds=engine.retry_seconds))
    engine.published.version, engine.published.folder = weight_version, written
    for old in folder.iterdir():
        if _FOLDER.fullmatch(old.name) and old.name != written.name:
            shutil.rmtree(old, ignore_errors=True)
    return written


def write_version(model: Any, folder: Path, servers: str, weight_version: int) -> Path:
    """Write a model into a new folder inside `folder`, which all users may read, and return its absolute path.

    It has its name only when it is complete.

    servers   their addresses, for messages
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
            f"cannot write weights for {servers} into {folder} (rollout.server_weights): {error}"
        ) from error
    return path
