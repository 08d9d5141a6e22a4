"""Promises that no other test holds, and the table of all in docs/design.md."""

import ast
import re
from pathlib import Path

import pytest

from relibra.planning.registry import BALANCERS
from relibra.routing.readers import TOKEN_CHOICES
from relibra.routing.readers.formats import Format

ROOT = Path(__file__).parent.parent
PLANNING = ROOT / "src" / "relibra" / "planning"
TABLE = (ROOT / "docs" / "design.md").read_text().split("## What must hold")[1].split("\n## ")[0]
GUIDES = {
    "trainers": ("verl", "slime, miles, vime", "NeMo-RL", "TRL", "Megatron-core", "SFT, pre-training"),
    "servers": ("vLLM", "SGLang"),
    "clusters": ("Slurm", "Ray"),
}
"""Sections of guides to other systems."""


def test_tests_that_hold_the_promises_exist():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TABLE)
    assert len(named) > 20
    for file, name in named:
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_balancers_and_formats_of_today_remain():
    balancers = "static balanced relibra foremoe flashlb ultraep ultraep_shipped moonep moonep_node live feplb llep"
    balancers += " eplb eplb_lp lplb eplb_history laer flexmoe popfetcher"
    assert set(balancers.split()) <= BALANCERS.keys()
    formats = {"answers", "verl", "slime", "skyrl", "nemo-rl", "prime-rl", "megatron", "sglang-recorder"}
    assert formats <= {entry.value for entry in Format}
    assert set(TOKEN_CHOICES) == {".npz", ".npy"}


def test_validation_imports_values_and_no_solver():
    """The code that checks a plan shares no search with the code that makes one."""
    names, reached = ["validation"], set()
    while names:
        name = names.pop()
        reached.add(name)
        found = re.findall(r"^from relibra\.planning\.([\w.]+) import", _source(name), flags=re.MULTILINE)
        names += [module for module in found if module not in reached]
    assert reached == {"validation", "plan", "placement", "loads", "costs.expert_shape"}


def _source(module):
    return (PLANNING / Path(*module.split("."))).with_suffix(".py").read_text()


@pytest.mark.parametrize(("guide", "system"), [(guide, name) for guide, names in GUIDES.items() for name in names])
def test_guides_to_other_systems_name_what_was_not_run(guide, system):
    page = (ROOT / "docs" / "guides" / f"{guide}.md").read_text()
    [section] = re.findall(rf"^## {re.escape(system)}\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    assert re.search(r"\bnot run\b", section, flags=re.IGNORECASE)
