"""Warnings of torch on GPUs that say nothing of us: a new thread's context, and a mode that is called a prototype."""

from pathlib import Path

import pytest

IGNORED = ("ignore:Attempting to run cuBLAS", "ignore:Synchronization debug mode is a prototype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(warning))
