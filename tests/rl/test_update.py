"""The update does not depend on how samples are cut into micro-batches or dealt to ranks."""

import numpy as np
import pytest
import torch

from relibra.rl.policy import clip_gradients
from relibra.rl.ranks import joined_ranks

from .ranks_at_work import CPU, meeting, tiny_config, train_on_one_rank, train_on_ranks

SCENARIOS = {
    "replayed": ("update.micro_batch_tokens=40",),
    "routed_anew": ("update.replay=off", "update.mini_batches=1"),
    # a mini-batch is one group here, so one of the ranks has nothing to do in each
    "one_rank_idle": ("rollout.prompts_per_step=3", "update.mini_batches=3"),
    # rank 1 has no prompt, no sample and no trace at all
    "one_rank_empty": ("rollout.prompts_per_step=1", "rollout.responses_per_prompt=6", "update.mini_batches=1"),
}
SECONDS = "seconds"


def assert_same_weights(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(other[name], one[name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def assert_weights_moved(outcome):
    """Guard against tests that compare models nobody trained."""
    assert any(row["grad_norm"] > 1e-2 for row in outcome["metrics"])


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return train_on_ranks(2, SCENARIOS, tmp_path_factory.mktemp("two-ranks"))


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-rank")
    return {
        name: train_on_one_rank(tiny_config("parallel.ranks=1", *overrides), folder / name)
        for name, overrides in SCENARIOS.items()
    }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_train_what_one_trains(scenario, on_one_rank, on_two_ranks):
    alone = on_one_rank[scenario]
    assert_weights_moved(alone)
    for outcome in on_two_ranks[scenario]:
        assert_same_weights(alone["weights"], outcome["weights"], 1e-5)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_metrics_are_those_of_the_whole_step_on_every_rank(scenario, on_one_rank, on_two_ranks):
    alone, (first, second) = on_one_rank[scenario], on_two_ranks[scenario]
    for one, a, b in zip(alone["metrics"], first["metrics"], second["metrics"], strict=True):
        assert {**a, SECONDS: 0} == {**b, SECONDS: 0}
        same = one.keys() - {SECONDS, "rank_skew", "expert_skew", "k3_kl"}  # skews are means over other micro-batches
        assert {name: a[name] for name in same} == pytest.approx({name: one[name] for name in same}, abs=1e-5)
        assert max(abs(one["k3_kl"]), abs(a["k3_kl"])) < 1e-8


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_copy_is_the_trained_model_after_a_sync(scenario, on_one_rank, on_two_ranks):
    for outcome in (on_one_rank[scenario], *on_two_ranks[scenario]):
        assert outcome["copy_is_off_by"] < 1e-5


def test_only_replay_reports_router_disagreement(on_two_ranks):
    assert on_two_ranks["routed_anew"][0]["metrics"][0]["router_disagreement"] is None
    assert on_two_ranks["replayed"][0]["metrics"][0]["router_disagreement"] == 0


def test_the_cut_into_micro_batches_changes_nothing(tmp_path):
    outcomes = [
        train_on_one_rank(
            tiny_config("parallel.ranks=1", f"update.micro_batch_tokens={tokens}"),
            tmp_path / str(tokens),
        )
        for tokens in (1, 60, 100_000)
    ]
    assert_weights_moved(outcomes[0])
    for other in outcomes[1:]:
        assert_same_weights(outcomes[0]["weights"], other["weights"], 1e-6)
        losses = [[row["loss"] for row in outcome["metrics"]] for outcome in (outcomes[0], other)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_gradients_are_clipped_as_torch_does(max_norm):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
    gradients = [torch.from_numpy(np.random.default_rng(i).normal(size=p.shape)) for i, p in enumerate(parameters)]
    norms = []
    clipped = []
    for clip in (torch.nn.utils.clip_grad_norm_, clip_gradients):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.float().clone()
        with joined_ranks(60.0, CPU, meeting()):
            norms.append(float(clip([*parameters, torch.nn.Parameter(torch.zeros(1))], max_norm)))
        clipped.append([parameter.grad for parameter in parameters])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    for theirs, ours in zip(*clipped, strict=True):
        torch.testing.assert_close(ours, theirs)
