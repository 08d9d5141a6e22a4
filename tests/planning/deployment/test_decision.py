from dataclasses import replace

import pytest

from relibra import PlanError
from relibra.planning.deployment.accelerator import accelerator
from relibra.planning.deployment.colocated import search_colocated
from relibra.planning.deployment.decision import decide
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import SearchSpace
from relibra.planning.deployment.served_model import PAPER_MODELS
from relibra.planning.deployment.service_level import ServiceLevel

LEVEL = ServiceLevel(seconds_per_token=0.15, context=650)


def decided(model, gpus, level=LEVEL, **space):
    space = SearchSpace(**{"node_counts": (), "experts_per_node": (1, 2), **space})
    return decide(PAPER_MODELS[model], level, [accelerator(name) for name in gpus], space, Efficiency())


def test_two_kinds_of_gpus_are_worth_separating():
    decision = decided("scaled-moe", ["h20", "l40s"])
    assert decision.disaggregate
    assert decision.gain > 1.3
    assert [plan.kind for plan in decision.colocated] == ["expert", "tensor"]


def test_one_kind_of_gpu_may_not_be():
    decision = decided("dbrx", ["a800"])
    assert not decision.disaggregate
    assert 0.9 < decision.gain < 1


def test_colocated_plans_keep_latency_and_memory():
    for kind in ("tensor", "expert"):
        plan = search_colocated(PAPER_MODELS["dbrx"], LEVEL, [accelerator("h800")], "gpus", Efficiency(), (kind,))
        assert plan.iteration_seconds <= 0.15
        gpu_bytes = 2 * (PAPER_MODELS["dbrx"].expert_values * 16) / plan.gpus
        assert gpu_bytes < 0.9 * 80e9


@pytest.mark.parametrize("level", [{"seconds_per_token": 1e-5}, {"context": 1e9}])
def test_what_fits_nowhere_is_an_error(level):
    with pytest.raises(PlanError, match="none answers within"):
        decided("dbrx", ["l40s"], replace(LEVEL, **level))
    with pytest.raises(PlanError, match="on at most 2 GPUs"):
        decided("dbrx", ["l40s"], most_gpus=2)
