"""What the page of a run says about its settings."""

from __future__ import annotations

import re

from relibra.reporting.settings.listing import LONGEST, describe_differences, describe_settings, list_settings
from relibra.reporting.settings.sections import differences_section, settings_section
from tests.reporting.recordings import HOSTILE

CONFIG = {
    "run": {"name": "demo", "folder": "/home/me/runs", "steps": 60},
    "task": {"name": "arithmetic", "answer_column": HOSTILE},
    "model": {"path": ""},
    "rollout": {"prompts_per_step": 32, "responses_per_prompt": 8, "max_response": 80},
    "update": {"learning_rate": 2e-4},
    "model_sizes": {"num_experts": 16, "experts_per_token": 2},
    "changed": ["update.learning_rate", "run.name", "task.gone", 7],
    "versions": {"torch": "2.8"},
}


def _cells(html: str) -> list[str]:
    return re.findall("<td[^>]*>(.*?)</td>", html)


def test_what_was_trained_comes_first_then_what_was_changed_then_all() -> None:
    page = settings_section(CONFIG)
    sentence, changed, everything = (
        page.index(text) for text in ("Built-in model", "Settings that differ", "<details>")
    )
    assert sentence < changed < everything
    for words in ("2 of 16 experts per token", "60 steps", "32 prompts with 8 responses each", "learning rate 0.0002"):
        assert words in describe_settings(CONFIG)
    assert _cells(page[changed:everything]) == ["update.learning_rate", "0.0002"]
    cells = _cells(page[everything:])
    assert dict(zip(cells[::2], cells[1::2], strict=True))["version of torch"] == "2.8"
    assert "/home/me" not in page
    assert HOSTILE not in page


def test_odd_files_are_shown_as_they_are() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    odd = {"a": 1, "b": {"x": "y" * 999, "z": deep}, "changed": "all", "c": None}
    listed = list_settings(odd)
    assert (listed["a"], listed["c"], len(listed["b.x"])) == ("1", "none", LONGEST)
    assert settings_section(odd)
    assert settings_section({}) == ""
    assert differences_section([{}, {}], ["one", "two"]) == ""
    assert "differ in 5 settings: s.0 1 and –; s.1 1 and –; s.2 1 and – and 2 more" in describe_differences(
        [{"s": {str(number): 1 for number in range(5)}}, {"t": {}}], ["one", "two"]
    )
