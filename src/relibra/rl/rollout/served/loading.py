"""How a server loads weights from a folder: loaded, caches dropped, version set and read back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from relibra.errors import EngineError
from relibra.rl.rollout.served.dialects import Dialect
from relibra.rl.rollout.served.requests import refused_with

_VERSION_PATHS: dict[Dialect, str] = {"sglang": "/model_info", "vllm": "/weight_info"}


ADAPTER = "adapter"
"""Begins the names of folders with an adapter."""

_NOT_FLUSHED = "cache was not flushed"
"""What SGLang says of an update whose weights are loaded, and whose caches are those of the weights before."""


Call = Callable[..., Awaitable[Any]]
"""Sends JSON (without: GET) to a path of a server, and returns the JSON of the answer; raises EngineError."""


def shown(value: Any, longest: int = 40) -> str:
    """Return a value of an answer for a message; only the type of one that may be long or deep."""
    return repr(value)[:longest] if isinstance(value, str | int | float) else f"({type(value).__name__})"


def adapter_name(folder: Path | None) -> str | None:
    """Return the name of the adapter in a folder, which servers know it by; None: it holds a whole model."""
    return folder.name if folder is not None and folder.name.startswith(f"{ADAPTER}-") else None


async def load_weights(
    call: Call, dialect: Dialect, url: str, folder: Path, version: int, before: Path | None = None
) -> None:
    """Let a server load a model and drop its caches, or an adapter and drop that in `before`; and know the version.

    raises   EngineError that names `url`
    """
    if adapter_name(folder) is not None:
        await _load_adapter(call, dialect, url, folder)
        if (earlier := adapter_name(before)) not in (None, folder.name):
            with suppress(EngineError):  # a server that was started again does not know it
                await call(_ADAPTER_PATHS[dialect][1], {"lora_name": earlier})
        await _set_version(call, dialect, str(version))
    elif dialect == "sglang":
        await _load_into_sglang(call, url, folder, version)
    else:
        await call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        await drop_caches(call, url)
        await _set_version(call, dialect, str(version))
    await check_version(call, dialect, url, version)


async def check_version(call: Call, dialect: Dialect, url: str, version: int) -> None:
    """Raise EngineError where a server says that its weights have another version."""
    found = await read_version(call, dialect)
    if found not in (str(version), None):
        raise EngineError(
            f"{url} says that its weights have version {shown(found)}: expected {version}, which it was just told to "
            "load; does another run use it?"
        )


_ADAPTER_PATHS: dict[Dialect, tuple[str, str]] = {
    "sglang": ("/load_lora_adapter", "/unload_lora_adapter"),
    "vllm": ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
}


async def _load_adapter(call: Call, dialect: Dialect, url: str, folder: Path) -> None:
    """Let a server load an adapter under its folder's name, by which it keeps caches; raises EngineError."""
    try:
        answer = await call(_ADAPTER_PATHS[dialect][0], {"lora_name": folder.name, "lora_path": str(folder)})
    except EngineError as error:
        if refused_with(error) == 404:
            raise EngineError(
                f"{url} does not load adapters while it runs: start it with the environment variable "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, or in float32"
            ) from error
        if refused_with(error) != 200:  # vLLM answers in words
            raise
        return
    if isinstance(answer, dict) and answer.get("success", True) is not True:
        raise EngineError(f"{url} did not load {folder}: {shown(answer.get('error_message'), 300)}")


async def _load_into_sglang(call: Call, url: str, folder: Path, version: int) -> None:
    """Let an SGLang server load a folder and drop its caches, aborting requests that hold them; raises EngineError."""
    body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
    try:
        answer = await call("/update_weights_from_disk", body)
    except EngineError as error:
        if refused_with(error) != 400 or _NOT_FLUSHED not in str(error):
            raise
        answer = await call("/update_weights_from_disk", {**body, "abort_all_requests": True})
    if not isinstance(answer, dict) or answer.get("success") is not True:
        reply = answer.get("message") if isinstance(answer, dict) else answer
        raise EngineError(f"{url} did not load {folder}: {shown(reply, 300)}")


async def read_version(call: Call, dialect: Dialect) -> str | None:
    """Return the version of the weights of a server; None: it has none, as vLLM before 0.29."""
    try:
        answer = await call(_VERSION_PATHS[dialect])
    except EngineError as error:
        if refused_with(error) == 404:
            return None
        raise
    return str(answer["weight_version"]) if isinstance(answer, dict) and "weight_version" in answer else ""


async def drop_caches(call: Call, url: str) -> None:
    """Drop keys and values of earlier weights; raises EngineError where they stay, as while a request runs."""
    for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true"):
        answer = await call(path, {})
        if not isinstance(answer, dict) or answer.get("success", True) is True:  # old servers say nothing
            return
    raise EngineError(
        f"{url} did not drop its caches after an update of the weights: does another client use it? Give this run a "
        "server of its own"
    )


async def _set_version(call: Call, dialect: Dialect, version: str) -> None:
    """Set the version of the weights of a server, unless it has none, as vLLM before 0.29."""
    body = {"new_version": version} | ({"abort_all_requests": False} if dialect == "sglang" else {})
    try:
        await call("/update_weight_version", body)
    except EngineError as error:
        if refused_with(error) != 404:
            raise
