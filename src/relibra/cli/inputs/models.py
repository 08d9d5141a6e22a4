"""The sizes of the model named by --model, or of the default."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.errors import ConfigError
from relibra.files import read_bounded

if TYPE_CHECKING:
    from relibra.simulation import ModelShape

_MAX_BYTES = 1 << 20
_EXAMPLE = "HIDDENxWIDTH of one of its experts, for example 2880x2880"


def choose_model(name: str | None, trace: Path) -> ModelShape:
    """Return the sizes of the named model, else of the one whose run recorded the trace, else of Qwen3-30B-A3B.

    raises    ConfigError for an unknown name
    """
    from relibra.reporting.data.planned_step import default_model

    return open_model(name) if name else default_model(trace)


def open_model(name: str, *, option: str = "--model", also: tuple[str, ...] = ()) -> ModelShape:
    """Return the sizes of a known model, of a config.json (or its folder), or of a model of one expert HIDDENxWIDTH.

    option    where the name was given, for messages
    also      further names that are allowed there
    raises    ConfigError for anything else
    """
    from relibra.planning.costs.expert_shape import ExpertShape
    from relibra.simulation import MODEL_SHAPES, ModelShape, model_shape_from_config

    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    if sizes := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", name):
        hidden, width = int(sizes[1]), int(sizes[2])
        if not hidden or not width:
            raise ConfigError(f"{option} {name!r}: HIDDEN and WIDTH of an expert must be at least 1")
        expert, heads = ExpertShape(hidden=hidden, width=width), max(1, hidden // 128)
        return ModelShape(
            name=name, moe_layers=1, hidden=hidden, query_heads=heads, kv_heads=heads, head_dim=128, experts=1,
            top_k=1, expert=expert, vocabulary=1,
        )  # fmt: skip
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file() and (path.suffix == ".json" or "/" in name):
        raise ConfigError(f"{option} {name}: there is no file {path}: give the path of a config.json")
    if not path.is_file():
        raise ConfigError(
            f"{option} {name!r} is unknown: allowed are {', '.join((*also, *MODEL_SHAPES))}, the path of a config.json"
            f"{'' if also else f', or {_EXAMPLE}'}"
        )
    try:
        config = json.loads(read_bounded(path, _MAX_BYTES, ConfigError, "a config.json").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {name}: {path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{option} {name}: {path} is not a JSON object of settings")
    return model_shape_from_config(config, str(config.get("model_type", path.parent.name)))
