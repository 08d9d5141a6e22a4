"""What the page of a run says about its settings."""

from __future__ import annotations

from relibra.reporting.data.settings import LONGEST, compare_settings, list_settings, setting_tables
from relibra.reporting.html.page import render
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


def test_main_settings_come_first_then_what_was_changed_then_all() -> None:
    tables = setting_tables(CONFIG)
    main, everything = tables["main"], tables["all"]
    assert list(main)[:2] == ["model.path", "model size num_experts"]
    assert (main["run.steps"], main["rollout.prompts_per_step"], main["update.learning_rate"]) == ("60", "32", "0.0002")
    assert tables["changed"] == {"update.learning_rate": "0.0002"}
    assert everything["version of torch"] == "2.8"
    assert "/home/me/runs" not in everything.values()
    page = render("settings.html", settings=tables)
    parts = [page.index(f'aria-label="{name} settings"') for name in ("Main", "Changed", "All")]
    assert parts == sorted(parts)
    assert HOSTILE not in page


def test_odd_files_are_shown_as_they_are() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    odd = {"a": 1, "b": {"x": "y" * 999, "z": deep}, "changed": "all", "c": None}
    listed = list_settings(odd)
    assert (listed["a"], listed["c"], len(listed["b.x"])) == ("1", "none", LONGEST)
    assert setting_tables(odd) == {"all": listed, "main": {}, "changed": {}}
    assert render("settings.html", settings={"all": {}, "main": {}, "changed": {}}).strip() == ""


def test_settings_of_two_runs_are_compared() -> None:
    assert compare_settings([{}, {}], ["one", "two"]) == ([], "")
    assert compare_settings([{"a": 1}, {}], ["one", "two"])[1].endswith("two has no config.json.")
    rows, note = compare_settings([{"s": {str(number): 1 for number in range(5)}}, {"t": {}}], ["one", "two"])
    assert note == "5 settings differ"
    assert rows[0] == ["s.0", "1", "–"]
