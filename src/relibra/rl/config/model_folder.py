"""What is wrong with `model.path`, before anything is loaded. Imports no torch."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from relibra.environment import hub_cache_folder
from relibra.errors import ConfigError

HUB = "hub:"
"""Begins a `model.path` that may be downloaded: hub:owner/name."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece.model", "sentencepiece*", "tekken.json")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.index.json")
_MAX_JSON_BYTES = 1 << 20
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def names_hub(path: str) -> bool:
    """Return whether a `model.path` names the hub, so that it may be downloaded."""
    return path.startswith(HUB)


def check_model_path(path: str) -> None:
    """Raise ConfigError unless there is a folder with a model and its tokenizer, a downloaded model, or a hub name.

    Weights, tokenizer and config.json are looked at by name only.
    """
    name, folder = path.removeprefix(HUB), Path(path).expanduser()
    if names_hub(path):
        if not _HUB_NAME.fullmatch(name):
            raise ConfigError("model.path", got=path, allowed="no name on the hub", next_step="write hub:owner/name")
    elif folder.is_dir():
        if found := _what_is_wrong(path, folder):
            raise ConfigError("model.path", got=path, allowed=found[0], next_step=found[1])
    elif folder.exists():
        raise ConfigError("model.path", got=path, allowed="a file", next_step="set a folder written by save_pretrained")
    elif _downloaded_config(name) is None:
        why = "no folder, and no model of that name was downloaded before"
        near = _similar(folder)
        hub = f"to download one, name the hub: model.path={HUB}owner/name"
        instead = f"did you mean {near!r}? {hub}" if near else hub
        raise ConfigError("model.path", got=path, allowed=why, next_step=instead)


def _what_is_wrong(path: str, folder: Path) -> tuple[str, str] | None:
    """Return what a folder lacks or holds instead of a model, and what to do; None: it has a model and a tokenizer."""
    if (folder / "config.json").is_file():
        if not any(True for form in _WEIGHT_FILES for _ in folder.glob(form)):
            return f"has no weights ({', '.join(_WEIGHT_FILES[:2])})", "write them with save_pretrained"
        if not any(True for form in _TOKENIZER_FILES for _ in folder.glob(form)):
            return "has no tokenizer (tokenizer.json, tokenizer_config.json)", "write it with tokenizer.save_pretrained"
        return None
    if (folder / "adapter_config.json").is_file():
        merge = "merge it (peft: merge_and_unload, then save_pretrained with the tokenizer)"
        return f"holds an adapter{_base_model(folder)}, not a model", merge
    if (folder / "policy" / "config.json").is_file():
        return "is the folder of a run", f"its model is in {path}/policy"
    return "has no config.json", "set a folder written by save_pretrained"


def check_expert_ranks(path: str, ranks: int) -> None:
    """Raise ConfigError if `parallel.ranks` does not divide the experts that a model's config.json has."""
    experts = expert_count(path)
    if experts % ranks:
        why = (
            f"does not divide the {experts} experts of model.path {path!r}: every rank needs the same number of experts"
        )
        raise ConfigError("parallel.ranks", got=ranks, allowed=why)


def expert_count(path: str) -> int:
    """Return the experts of a layer that a model's config.json has; 0: it has none, or cannot be read."""
    sizes = read_model_sizes(path)
    if sizes.get("is_moe") is False:  # Doge: a dense model whose configuration has a number of experts all the same
        return 0
    return max(0, next((sizes[name] for name in _EXPERTS if isinstance(sizes.get(name), int)), 0))


def read_model_sizes(path: Any) -> dict[str, Any]:
    """Return config.json of a folder or a downloaded model, or its text part if it has one; {}: none can be read.

    path   `model.path`, which may be of any type before settings are validated
    """
    if not isinstance(path, str):
        return {}
    name = path.removeprefix(HUB)
    try:
        folder = Path(name).expanduser()
        file = _downloaded_config(name) if names_hub(path) or not folder.is_dir() else folder / "config.json"
        if file is None or file.stat().st_size > _MAX_JSON_BYTES:
            return {}
        body = json.loads(file.read_bytes())
    except (OSError, ValueError, RuntimeError):  # also an unknown home, deep JSON
        return {}
    sizes = body.get("text_config") or body if isinstance(body, dict) else {}
    return sizes if isinstance(sizes, dict) else {}


def _base_model(folder: Path) -> str:
    """Return " of " and the model that an adapter belongs to; empty where its file does not say."""
    file = folder / "adapter_config.json"
    try:
        body = json.loads(file.read_bytes()) if file.stat().st_size <= _MAX_JSON_BYTES else {}
        base = body["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return f" of {base[:200]!r}" if isinstance(base, str) and base else ""


def _downloaded_config(name: str) -> Path | None:
    """Return the newest config.json of a model in the cache of the hub's library; None: it was not downloaded."""
    if not _HUB_NAME.fullmatch(name):
        return None
    folder = hub_cache_folder() / f"models--{name.replace('/', '--')}" / "snapshots"
    return max(folder.glob("*/config.json"), key=lambda file: (file.stat().st_mtime, str(file)), default=None)


def _similar(folder: Path) -> str:
    """Return a folder beside a missing one whose name is most like it; empty: none is."""
    whole = there = folder
    while not there.is_dir() and there != there.parent:  # the first part that does not exist is misspelt
        folder, there = there, there.parent
    try:
        names = [entry.name for entry in there.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    near = get_close_matches(folder.name, names, n=1)
    if not near:
        return ""
    meant = there / near[0]
    rest = meant / whole.relative_to(folder)
    return str(rest if rest.is_dir() else meant)
