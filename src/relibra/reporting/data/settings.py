"""Settings of a run, from its config.json: what was trained, and in what two runs differ.

Any value may be missing or of another type: files of other versions are shown as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 200
"""Characters of a value that are shown."""
ABOUT = {"versions": "version of", "model_sizes": "model size"}
"""Parts of config.json that are no settings, and what their entries are."""
NO_SETTINGS = ("changed", "run.name", "run.folder")
"""Left out: a list of names, and where the run is."""
MAIN_SETTINGS = (
    *("model.path", "model size num_experts", "model size experts_per_token", "task.name", "algorithm.preset"),
    *("run.steps", "rollout.prompts_per_step", "rollout.responses_per_prompt", "rollout.max_response"),
    *("update.learning_rate", "parallel.ranks", "plan.balancer"),
)
"""What was trained, on what and how."""


def list_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return settings by name, then sizes of the model and versions of packages; values as text.

    >>> list_settings({"update": {"epochs": 1}, "versions": {"torch": "2"}, "run": {"name": "demo"}})
    {'update.epochs': '1', 'version of torch': '2'}
    """
    found = {
        _name(section, key): setting_text(value)
        for section, values in config.items()
        for key, value in (values.items() if isinstance(values, Mapping) else [("", values)])
    }
    ordered = sorted(found, key=lambda name: name.startswith(tuple(ABOUT.values())))
    return {name: found[name] for name in ordered if name not in NO_SETTINGS}


def setting_tables(config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return "all" settings, the "main" ones, and those "changed" from the defaults for the same model and preset.

    >>> setting_tables({"run": {"steps": 8}, "plan": {"slots": 1}, "changed": ["plan.slots"]})["changed"]
    {'plan.slots': '1'}
    """
    settings, changed = list_settings(config), config.get("changed")
    names = [name for name in changed if isinstance(name, str)] if isinstance(changed, list) else []
    return {
        "all": settings,
        "main": {name: settings[name] for name in MAIN_SETTINGS if name in settings},
        "changed": {name: settings[name] for name in names if name in settings},
    }


def compare_settings(configs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[list[list[str]], str]:
    """Return rows of name and value in each run, where they differ or a run lacks the setting, and what this means.

    names   of the runs; without any configuration there is neither a row nor a meaning

    >>> compare_settings([{"plan": {"slots": 1, "pack": True}}, {"plan": {"slots": 4, "pack": True}}], ["a", "b"])
    ([['plan.slots', '1', '4']], '1 setting differs')
    """
    lacking = [name for name, config in zip(names, configs, strict=True) if not config]
    if lacking:
        none_known = len(lacking) == len(names)
        return [], "" if none_known else f"Settings cannot be compared: {' and '.join(lacking)} has no config.json."
    listed = [list_settings(config) for config in configs]
    all_names = dict.fromkeys(name for settings in listed for name in settings)
    rows = [[name, *(settings.get(name, "–") for settings in listed)] for name in all_names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    number = sum(not row[0].startswith(tuple(ABOUT.values())) for row in rows)
    differ = "1 setting differs" if number == 1 else f"{number} settings differ"
    return rows, differ if number else "Their settings are the same."


def setting_text(value: object) -> str:
    """Return a value as text, cut where it is long.

    >>> setting_text(True), setting_text(None), setting_text("a b"), setting_text(1e-06), setting_text("")
    ('true', 'none', 'a b', '1e-06', '(empty)')
    """
    text = (value or "(empty)") if isinstance(value, str) else "none" if value is None else _json(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _json(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def _name(section: str, key: str) -> str:
    if not key:
        return section
    return f"{ABOUT[section]} {key}" if section in ABOUT else f"{section}.{key}"
