"""What people put around a model works with a plan as without, or is refused in a sentence."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP
from tests.parallel.against_dense import assert_equals_dense
from tests.parallel.ranks_at_work import load, on_ranks
from tests.parallel.refusals import execute, message_of
from tests.parallel.steps import step

TIED = {"tie_word_embeddings": True}


@pytest.mark.slow
def test_what_is_around_a_model_changes_no_gradient(tmp_path):
    case = step(unrouted_last=True)
    cases = {
        "torch.compile": replace(case, wrap="compiled"),
        "torch.compile, checkpointed": replace(case, wrap="compiled", checkpointing=True),
        "reentrant checkpoints": replace(case, wrap="reentrant"),
        "reentrant checkpoints, canonical": replace(case, wrap="reentrant", sums="canonical"),
        "autocast": replace(case, autocast=True),
        "autocast, checkpointed, canonical": replace(case, autocast=True, checkpointing=True, sums="canonical"),
        "gradients accumulated": replace(case, accumulate=True),
        "adapters on attention": replace(case, wrap="adapted attention"),
        "tied embeddings": replace(case, model=TIED),
        "eager experts": replace(case, wrap="eager experts"),
        "batched experts": replace(case, wrap="batched experts"),
    }
    for name, results_R in on_ranks(2, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_replicas_of_the_whole_sharding_equal_the_dense_model(tmp_path):
    schedule = ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4)
    groups = step(2, lengths=range(5, 13), schedule=schedule)
    cases = {"HSDP": replace(groups, num_ranks=4, distributed={"dp_replicate_size": 2})}
    for name, results_R in on_ranks(4, cases, tmp_path).items():
        assert_equals_dense(cases[name], results_R)


@pytest.mark.slow
def test_mixed_precision_gives_what_it_gives_without_a_plan(tmp_path):
    case = replace(step(), distributed={"fsdp_mixed_precision": True})
    home = replace(case, follow_plan=False, implementation="all_to_all")
    found = on_ranks(2, {"planned": case, "all_to_all": home}, tmp_path)
    for ours, theirs in zip(found["planned"], found["all_to_all"], strict=True):
        assert ours["logits"].keys() == theirs["logits"].keys()
        for name, gradient in theirs["gradients"].items():
            assert ours["gradients"][name].dtype == gradient.dtype == torch.float32
            torch.testing.assert_close(ours["gradients"][name], gradient, rtol=0.05, atol=0.01, msg=name)


def refused_adapters(case, folder):
    """Return what a plan says to a model, and what a step without a plan does."""
    model = load(case, folder)
    return {"message": message_of(lambda: execute(case, model)), "rank": dist.get_rank()}


@pytest.mark.slow
def test_adapters_that_replicas_would_lack_are_refused(tmp_path):
    cases = {name: replace(step(), wrap=name) for name in ("wrapped experts", "adapted experts")}
    for name, results_R in on_ranks(2, cases, tmp_path, refused_adapters).items():
        for found in results_R:
            assert found["message"].startswith("EngineError: experts 'model.layers.1.mlp.experts"), (name, found)
            assert "replicas of a plan would lack" in found["message"]


def test_experts_on_another_device_are_refused():
    layer = SimpleNamespace(
        experts=SimpleNamespace(down_proj=torch.empty(1)),
        parameter_names=["down_proj"],
        ep_mesh=SimpleNamespace(device_type="cuda"),
    )
    with pytest.raises(EngineError, match=r"'experts' are on 'cpu' .* computed on 'cuda' \(fsdp_cpu_offload\)"):
        BalancedEP.refuse_offloading(layer, "experts")
    layer.ep_mesh.device_type = "cpu"
    BalancedEP.refuse_offloading(layer, "experts")
