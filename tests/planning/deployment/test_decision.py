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


@pytest.mark.parametrize(
    ("gpu", "level", "space", "advised", "spared"),
    [
        ({}, {"seconds_per_token": 1e-5}, {}, ["more time"], ["GPUs", "memory", "less context"]),
        ({}, {}, {"most_gpus": 2}, ["more GPUs"], ["more time", "memory"]),
        ({}, {"seconds_per_token": 1e-5}, {"most_gpus": 2}, ["more time", "more GPUs"], ["memory"]),
        ({}, {"context": 1e9}, {}, ["less context"], ["more time", "more GPUs"]),
        ({"memory_bytes": 1e8}, {}, {}, ["the model does not fit"], ["more time", "more GPUs", "less context"]),
    ],
    ids=["time", "gpus", "time and gpus", "context", "memory"],
)
def test_what_fits_nowhere_is_an_error_that_advises_what_helps(gpu, level, space, advised, spared):
    level, space = replace(LEVEL, **level), SearchSpace(node_counts=(), experts_per_node=(1, 2), **space)
    with pytest.raises(PlanError) as caught:
        decide(PAPER_MODELS["dbrx"], level, [replace(accelerator("l40s"), **gpu)], space, Efficiency())
    said = str(caught.value)
    assert all(words in said for words in advised), said
    assert not any(words in said for words in spared), said
    assert "(s)" not in said
