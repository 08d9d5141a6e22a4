"""The section of a run's settings, and the section that compares those of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relibra.reporting.html.html import details, paragraph, section, table
from relibra.reporting.settings.listing import (
    changed_settings,
    describe_differences,
    describe_settings,
    differing_settings,
    list_settings,
)


def settings_section(config: Mapping[str, Any]) -> str:
    """Show what was trained and how, the settings that were changed, and all settings folded; "" without any."""
    settings = list_settings(config)
    if not settings:
        return ""
    changed = changed_settings(config)
    header = ("setting", "value")
    rows = [] if changed is None else list(changed.items())
    return section(
        "settings",
        "Settings",
        paragraph(describe_settings(config)),
        paragraph("Settings that differ from the defaults for this model and preset:", "how") if rows else "",
        table("Changed settings", header, rows, text_columns=(0, 1)) if rows else "",
        details(
            f"All {len(settings)} settings, sizes and versions",
            table("All settings", header, list(settings.items()), text_columns=(0, 1)),
        ),
    )


def differences_section(configs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Show the settings in which runs differ; "" where no run has any."""
    if not any(configs):
        return ""
    rows = differing_settings(configs)
    return section(
        "settings",
        "Settings that differ",
        table("Settings that differ", ("", *names), rows, text_columns=range(1 + len(names)))
        if rows and all(configs)
        else paragraph(describe_differences(configs, names)),
    )
