"""Settings of a run, from its config.json: what was trained, and in what two runs differ.

Any value may be missing or of another type: files of other versions are shown as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from relibra.printable import plural

LONGEST = 200
"""Characters of a value that are shown."""
ABOUT = {"versions": "version of", "model_sizes": "model size"}
"""Parts of config.json that are no settings, and what their entries are."""
NO_SETTINGS = ("changed", "run.name", "run.folder")
"""Left out: a list of names, and where the run is."""


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


def changed_settings(config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the settings that are not the defaults for the same model and preset; None where the file names none."""
    names = config.get("changed")
    if not isinstance(names, list):
        return None
    settings = list_settings(config)
    return {name: settings[name] for name in names if isinstance(name, str) and name in settings}


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return rows of name and value in each run, where values differ or a run lacks the setting.

    >>> differing_settings([{"plan": {"slots": 1, "pack": True}}, {"plan": {"slots": 4, "pack": True}}])
    [['plan.slots', '1', '4']]
    """
    listed = [list_settings(config) for config in configs]
    rows = [
        [name, *(settings.get(name, "–") for settings in listed)]
        for name in dict.fromkeys(name for settings in listed for name in settings)
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


def describe_differences(configs: Sequence[Mapping[str, Any]], names: Sequence[str], shown: int = 3) -> str:
    """Return how many settings differ, and the values of the first.

    names   of the runs
    """
    if not all(configs):
        lacking = [name for name, config in zip(names, configs, strict=True) if not config]
        return f"Settings cannot be compared: {' and '.join(lacking)} has no config.json."
    rows = [row for row in differing_settings(configs) if not row[0].startswith(tuple(ABOUT.values()))]
    if not rows:
        return "Their settings are the same."
    told = "; ".join(f"{name} {' and '.join(values)}" for name, *values in rows[:shown])
    more = f" and {len(rows) - shown} more" * (len(rows) > shown)
    return f"They differ in {plural(len(rows), 'setting')}: {told}{more}."


def describe_settings(config: Mapping[str, Any]) -> str:
    """Return in a sentence what was trained, on what and how; "" without settings.

    >>> describe_settings({"run": {"steps": 8}, "task": {"name": "arithmetic"}, "parallel": {"ranks": 4}})
    'Built-in model, task arithmetic, 8 steps, 4 ranks.'
    """

    def value(section: str, key: str) -> str:
        values = config.get(section)
        found = values.get(key) if isinstance(values, Mapping) else None
        return "" if found in (None, "") else setting_text(found)

    if not any(isinstance(values, Mapping) for values in config.values()):
        return ""
    experts, taken = (value("model_sizes", key) or value("model", key) for key in ("num_experts", "experts_per_token"))
    responses, longest = value("rollout", "responses_per_prompt"), value("rollout", "max_response")
    facts = [
        value("model", "path") or "built-in model",
        f"{taken} of {experts} experts per token" if experts and taken else "",
        _when("task", value("task", "name")),
        _when("algorithm", value("algorithm", "preset")),
        _when(value("run", "steps"), "steps"),
        f"{value('rollout', 'prompts_per_step')} prompts with {responses} responses each" if responses else "",
        f"up to {longest} tokens" if longest else "",
        _when("learning rate", value("update", "learning_rate")),
        _when(value("parallel", "ranks"), "ranks"),
        "balanced live" if value("plan", "balancer") == "live" else _when("plans by", value("plan", "balancer")),
    ]
    sentence = ", ".join(fact for fact in facts if fact)
    return f"{sentence[:1].upper() if not value('model', 'path') else sentence[:1]}{sentence[1:]}."


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


def _when(first: str, second: str) -> str:
    return f"{first} {second}" if first and second else ""
