"""New weights for servers: a fresh folder per version, readable for others, removed after the next."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
from pathlib import Path

from relibra.files import let_all_read
from relibra.rl.model.policy import Policy, write_weights
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.loading import ADAPTER
from relibra.rl.rollout.served.pool import on_every_server
from relibra.rl.run.ranks import broadcast_json

_FOLDER = re.compile(rf"(version|{ADAPTER})-\d{{6,}}-[0-9a-f]{{8}}")


def publish_weights(written: Path, engine: ServerEngine, weight_version: int) -> None:
    """Let all servers load a version, drop their caches, and remove the versions beside it.

    They load an adapter under the name of the folder, beside the weights that they have.

    A server that does not answer is left out, while there is another: it loads the weights when it answers again.

    written   folder of this version, visible to the servers under the same absolute path
    raises    EngineError when a server does not load it, or none answers
    """

    async def load(server: ServerClient) -> None:
        async with server.connections(1) as client:
            await server.load(client, written, weight_version)

    asyncio.run(on_every_server(engine.servers, load, retry_seconds=engine.retry_seconds))
    engine.published.version, engine.published.folder = weight_version, written
    for old in written.parent.iterdir():
        if _FOLDER.fullmatch(old.name) and old.name != written.name:
            shutil.rmtree(old, ignore_errors=True)


def write_version(policy: Policy, folder: Path, weight_version: int, *, setting: str, as_adapter: bool = False) -> Path:
    """Write the trained weights into a new folder inside `folder`, which all users may read; collective.

    It has its name only when it is complete.

    setting      that names `folder`, for messages
    as_adapter   write the adapters alone
    returns      its absolute path
    raises       ConfigError, on all ranks, where it cannot be written
    """
    kind = ADAPTER if as_adapter else "version"
    name = broadcast_json(f"{kind}-{weight_version:06d}-{secrets.token_hex(4)}")
    path = folder.absolute() / str(name)
    write_weights(policy, path, dtype=None, finish=let_all_read, setting=setting, as_adapter=as_adapter)
    return path
