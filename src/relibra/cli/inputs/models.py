"""The model named by --model: the sizes of one expert, or of the whole model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from relibra.cli.outputs.terminal import plural
from relibra.errors import ConfigError

if TYPE_CHECKING:
    from relibra.planning.costs.expert_shape import ExpertShape
    from relibra.simulation import ModelShape

_EXAMPLE = "HIDDENxWIDTH of one of its experts, for example 2880x2880"


def open_expert(name: str) -> ExpertShape:
    """Return the expert of a known model, or of the sizes HIDDENxWIDTH.

    raises    ConfigError for anything else
    """
    from relibra.planning.costs.expert_shape import EXPERT_SHAPES, ExpertShape

    if sizes := _expert_sizes(name):
        if 0 in sizes:
            raise ConfigError(f"--model {name!r}: HIDDEN and WIDTH of an expert must be at least 1")
        return ExpertShape(hidden=sizes[0], width=sizes[1])
    if name not in EXPERT_SHAPES:
        raise ConfigError(f"--model {name!r} is unknown: allowed are {', '.join(EXPERT_SHAPES)}, or {_EXAMPLE}")
    return EXPERT_SHAPES[name]


def open_model(name: str) -> ModelShape:
    """Return the sizes of a known model, of a config.json (or its folder), or of a model of one expert HIDDENxWIDTH.

    raises    ConfigError for anything else
    """
    from relibra.simulation import MODEL_SHAPES, ModelShape, model_shape_from_config

    if name in MODEL_SHAPES:
        return MODEL_SHAPES[name]
    if _expert_sizes(name):
        expert = open_expert(name)
        heads = max(1, expert.hidden // 128)
        return ModelShape(
            name=name, moe_layers=1, hidden=expert.hidden, query_heads=heads, kv_heads=heads, head_dim=128, experts=1,
            top_k=1, expert=expert, vocabulary=1,
        )  # fmt: skip
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file() and (path.suffix == ".json" or "/" in name):
        raise ConfigError(f"--model {name}: there is no file {path}: give the path of a config.json")
    if not path.is_file():
        raise ConfigError(
            f"--model {name!r} is unknown: allowed are {', '.join(MODEL_SHAPES)}, the path of a config.json, or "
            f"{_EXAMPLE}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--model {name}: {path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {name}: {path} is not a JSON object of settings")
    return model_shape_from_config(config, str(config.get("model_type", path.parent.name)))


def _expert_sizes(name: str) -> tuple[int, int] | None:
    sizes = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", name)
    return (int(sizes[1]), int(sizes[2])) if sizes else None


def other_model_in_words(model: ModelShape, routed: ModelShape) -> str:
    """Return a warning if routes and sizes are of different models; empty if they may be of the same."""
    if model.experts == 1:  # only the sizes of an expert were given
        return ""
    own = (model.top_k, model.experts, model.moe_layers)
    if own[:2] == (routed.top_k, routed.experts) and routed.moe_layers <= model.moe_layers:
        return ""
    return (
        f"these routes are of another model: {model.name} picks {model.top_k} of {model.experts} experts in "
        f"{plural(model.moe_layers, 'expert layer')}; experts, choices and layers are taken from the routes, all "
        f"other sizes from {model.name}; name the recorded model with --model"
    )


def model_in_words(model: ModelShape, routed: ModelShape) -> str:
    """Return which model is simulated, and which of its sizes come from the routes."""
    same = (model.moe_layers, model.experts, model.top_k) == (routed.moe_layers, routed.experts, routed.top_k)
    if same:
        return f"model {model.name}"
    part = f" ({routed.part_in_words})" if routed.part_in_words else ""
    return (
        f"sizes of {model.name}; from the routes {plural(routed.moe_layers, 'expert layer')}{part}, "
        f"{routed.top_k} of {plural(routed.experts, 'expert')} per token"
    )
