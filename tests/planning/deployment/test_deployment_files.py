import json
from dataclasses import replace

import pytest

from relibra import ConfigError, PlanError
from relibra.planning.deployment.accelerator import accelerator, read_accelerators
from relibra.planning.deployment.deployment_files import read_deployment, write_deployment
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import PAPER_SPACE, search_pair
from relibra.planning.deployment.served_model import PAPER_MODELS
from relibra.planning.deployment.service_level import ServiceLevel

LEVEL = ServiceLevel(seconds_per_token=0.15, context=650)


@pytest.fixture(scope="module")
def plan():
    pair = accelerator("h20"), accelerator("l40s")
    return search_pair(PAPER_MODELS["dbrx"], LEVEL, pair, PAPER_SPACE, Efficiency())


def test_a_plan_is_read_as_it_was_written(plan, tmp_path):
    write_deployment(tmp_path / "plan.json", plan)
    read = read_deployment(tmp_path / "plan.json")
    assert read == plan
    body = json.loads((tmp_path / "plan.json").read_text())
    assert (body["micro_batches"], body["attention"]["nodes"], body["experts"]["nodes"]) == (4, 1, 16)
    assert body["predicted"]["requests"] == plan.batch


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body | {"format": "x"}, "is no deployment plan"),
        (lambda body: body | {"version": 9}, "has version 9"),
        (lambda body: body | {"rows": 5}, "is damaged"),
        (lambda body: body | {"more": 5}, "is damaged"),
        (lambda body: [body], "holds no JSON object"),
    ],
)
def test_other_files_are_refused(plan, tmp_path, change, words):
    write_deployment(tmp_path / "plan.json", plan)
    (tmp_path / "plan.json").write_text(json.dumps(change(json.loads((tmp_path / "plan.json").read_text()))))
    with pytest.raises(PlanError, match=words):
        read_deployment(tmp_path / "plan.json")


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        read_deployment(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        read_deployment(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(" " * (1 << 20) + "{}")
    with pytest.raises(PlanError, match="is larger than"):
        read_deployment(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": 1607}, "Eq. 8"),
        ({"level": replace(LEVEL, seconds_per_token=0.1)}, "Eq. 7"),
        ({"experts_per_node": 2}, "every expert has one node"),
        ({"micro_batches": 0}, "at least 1"),
        ({"model": replace(PAPER_MODELS["dbrx"], width=107520)}, "do not fit"),
    ],
)
def test_plans_that_break_a_rule_are_not_written(plan, tmp_path, changed, words):
    with pytest.raises(PlanError, match=words):
        write_deployment(tmp_path / "plan.json", replace(plan, **changed))
    assert not (tmp_path / "plan.json").exists()


TABLE = """
[Mine]
price = 2
memory_bytes = 80e9
memory_bytes_per_second = 3e12
flops_per_second = 9e14
network_bytes_per_second = 5e10
peer_bytes_per_second = 4e11
watts = 700
node_size = 4
"""


def test_accelerators_of_a_file(tmp_path):
    (tmp_path / "gpus.toml").write_text(TABLE)
    mine = read_accelerators(tmp_path / "gpus.toml")
    assert (accelerator("MINE", mine).price, mine["mine"].node_size) == (2, 4)
    with pytest.raises(ConfigError, match="is unknown: allowed are l20"):
        accelerator("nothing")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TABLE.replace("watts = 700", ""), r"\[Mine\] has no entry 'watts'"),
        (TABLE.replace("price = 2", "pryce = 2"), r"\[Mine\] has (no|unknown) entry 'pr"),
        ("Mine = 1", r"\[Mine\]: it is 1"),
        (TABLE.replace("price = 2", "price = -1"), "price is -1"),
        ("= 3", "is not valid TOML"),
    ],
)
def test_files_without_accelerators_are_refused(text, words, tmp_path):
    (tmp_path / "gpus.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_accelerators(tmp_path / "gpus.toml")
