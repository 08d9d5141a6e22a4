"""Recompute: the old log-probs, what differs from the sampler, and the routes that R2 keeps."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from relibra.replay import record_routing
from relibra.rl.algorithms.mismatch import mismatch_metrics
from relibra.rl.batch.schedule import make_schedule
from relibra.rl.batch.token_batch import make_micro_batch, routes_of
from relibra.rl.batch.training_batch import TrainingBatch, executing, replaying
from relibra.rl.config.run_config import load_config
from relibra.rl.update.policy_update import (
    MiniBatchTotals,
    PolicyTargets,
    StepTotals,
    UpdateSums,
    log_probs_and_entropy,
    policy_loss,
    response_logits,
)
from relibra.rl.update.recompute import recompute, reference_log_probs
from tests.replay.tiny_models import tiny_model
from tests.rl.made_up import EXPERTS, LAYERS, of_rank, response_of

RESPONSES = [
    response_of(0, length=4),
    response_of(1, prompt=2, earlier=3, length=2, finished=False),
    response_of(2, prompt=5, length=6),
    response_of(3, prompt=1, earlier=1, length=3),
]
CONFIG = load_config(None, ["algorithm.preset=tppo", "algorithm.correction=icepop"])


@pytest.fixture(scope="module")
def model():
    return tiny_model().train()


def batch_of(responses, *, replayed, tokens=14):
    """Return a training batch of one rank, in two mini-batches."""
    schedule = make_schedule(
        np.array([len(one.tokens_n) - 1 for one in responses]),
        np.arange(len(responses)),
        mini_batches=2,
        micro_batch_tokens=tokens,
        num_ranks=1,
    )
    trace = routes_of(responses, num_experts=EXPERTS, layer_ids=range(LAYERS), source="test") if replayed else None
    return TrainingBatch(
        responses=responses,
        micro_batches=[make_micro_batch(responses, chosen.tolist(), trace) for chosen in of_rank(schedule, 0)],
        schedule=schedule,
        mini_batch_S=schedule.mini_batch_S.astype(np.int64),
        demand=None,
        plan=None,
    )


def run(model, batch, **options):
    with executing(model, batch, CONFIG) as around:
        return recompute(model, batch, around, CONFIG, **options)


def native_log_probs(model, response):
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(response.tokens_n[:-1])[None], use_cache=False).logits[0]
    places = np.arange(response.prompt_length, len(response.tokens_n))
    return logits.log_softmax(-1)[places - 1, response.tokens_n[places]].numpy()


def test_micro_batches_of_a_mini_batch_know_their_numbers():
    batch = batch_of(RESPONSES, replayed=False, tokens=1)
    assert [[number for number, _ in batch.of_mini_batch(m)] for m in (0, 1)] == [[0, 1], [2, 3]]
    [(_, first), (_, second)] = batch.of_mini_batch(1)
    assert sorted([*first.samples_B.tolist(), *second.samples_B.tolist()]) == [2, 3]


def test_log_probs_are_those_of_each_response_by_itself_in_their_order(model):
    found = run(model, batch_of(RESPONSES, replayed=False))
    for response, log_probs_r in zip(RESPONSES, found.log_probs_Sr, strict=True):
        assert log_probs_r == pytest.approx(native_log_probs(model, response), abs=1e-5)
    assert found.routers.pairs == 0, "nothing was replayed"
    assert found.responses == RESPONSES


def test_the_sampler_is_compared_on_the_last_window_only(model):
    batch = batch_of(RESPONSES, replayed=False)
    true_Sr = run(model, batch).log_probs_Sr
    fresh = sum(response.window_length for response in RESPONSES)
    agreeing = []
    for response, log_probs_r in zip(RESPONSES, true_Sr, strict=True):
        sampled_r = log_probs_r.copy()
        sampled_r[: response.length - response.window_length] -= 4.0  # older weights said something else
        agreeing.append(replace(response, log_probs_r=sampled_r))
    found = run(model, batch_of(agreeing, replayed=False))
    metrics = mismatch_metrics(found.mismatch)
    assert metrics["log_ratio_max"] < 1e-5
    assert metrics["masked_share"] == 0
    assert found.tokens == fresh
    sampled_r = agreeing[2].log_probs_r.copy()
    sampled_r[1] -= np.float32(np.log(20.0))
    agreeing[2] = replace(agreeing[2], log_probs_r=sampled_r)
    metrics = mismatch_metrics(run(model, batch_of(agreeing, replayed=False)).mismatch)
    assert metrics["masked_share"] == pytest.approx(1 / fresh)
    assert metrics["log_ratio_max"] == pytest.approx(np.log(20.0), abs=1e-4)


def test_entropy_is_summed_over_the_last_windows(model):
    found = run(model, batch_of(RESPONSES, replayed=False))
    expected = 0.0
    for s, response in enumerate(RESPONSES):
        _, entropy_X = log_probs_and_entropy(model, make_micro_batch(RESPONSES, [s], None), 1.0)
        expected += float(entropy_X[-response.window_length :].sum())
    assert found.entropy == pytest.approx(expected, rel=1e-5)


def test_r2_records_the_routes_that_this_pass_took(model):
    found = run(model, batch_of(RESPONSES, replayed=False), record=True)
    for before, after in zip(RESPONSES, found.responses, strict=True):
        with torch.no_grad(), record_routing(model) as recorder:
            model(input_ids=torch.from_numpy(before.tokens_n[:-1])[None], use_cache=False)
            [experts_NLK] = recorder.take()
        assert after.experts_nLK[:-1].tolist() == experts_NLK.tolist()
        assert len(after.experts_nLK) == len(before.tokens_n)
        assert after.tokens_n is before.tokens_n
    again = run(model, batch_of(found.responses, replayed=True))
    assert again.routers.differing_pairs == 0
    assert again.routers.rows == sum(len(response.tokens_n) - 1 for response in RESPONSES)
    for one, other in zip(found.log_probs_Sr, again.log_probs_Sr, strict=True):
        assert other == pytest.approx(one, abs=1e-6)


def test_r3_replays_the_recorded_routes_and_counts_where_the_router_differs(model):
    batch = batch_of(RESPONSES, replayed=True)
    found = run(model, batch)
    assert found.routers.differing_pairs > 0.5 * found.routers.pairs, "the recorded routes are random ones"
    with executing(model, batch, CONFIG) as around, around(0):
        expected_X, _ = log_probs_and_entropy(model, batch.micro_batches[0], 1.0)
    first = batch.micro_batches[0]
    assert first.gather(found.log_probs_Sr).tolist() == expected_X.tolist()


@pytest.mark.parametrize("replayed", [False, True])
def test_the_first_mini_batch_has_ratio_1_to_the_bit(model, replayed):
    batch = batch_of(RESPONSES, replayed=replayed)
    found = run(model, batch)
    ones = [np.ones(response.length, dtype=bool) for response in RESPONSES]
    targets = PolicyTargets(
        log_probs_old_Sr=found.log_probs_Sr,
        sampled_Sr=found.log_probs_Sr,
        advantage_Sr=[np.ones(response.length, dtype=np.float32) for response in RESPONSES],
        trained_Sr=ones,
        reference_Sr=None,
        positive_S=np.zeros(len(RESPONSES), dtype=bool),
    )
    totals, sums = (
        StepTotals(of_mini_batch=[MiniBatchTotals(tokens=15, responses=4, positive_tokens=0)] * 2),
        UpdateSums(),
    )
    for number, micro_batch in batch.of_mini_batch(0):
        with replaying(model, micro_batch.routes):
            logits_XV = response_logits(model, micro_batch)
        loss = policy_loss(logits_XV, micro_batch, targets, totals, 0, CONFIG, sums)
        share = len(micro_batch.row_X) * 2 / 30
        assert float(loss.detach()) == pytest.approx(-share, abs=1e-6), f"micro-batch {number}: ratios are not 1"
        assert micro_batch.gather(found.log_probs_Sr).tolist() == pytest.approx(
            log_probs_of(logits_XV, micro_batch), abs=0
        )
    assert sums.clipped == 0


def log_probs_of(logits_XV, micro_batch):
    return logits_XV.detach().log_softmax(-1).gather(-1, micro_batch.target_X[:, None])[:, 0].tolist()


def test_the_reference_routes_by_itself_whatever_is_replayed(model):
    reference = tiny_model(seed=5).eval().requires_grad_(False)
    found = reference_log_probs(reference, batch_of(RESPONSES, replayed=True), CONFIG)
    for response, log_probs_r in zip(RESPONSES, found, strict=True):
        assert log_probs_r == pytest.approx(native_log_probs(reference, response), abs=1e-5)


def test_a_rank_without_responses_compares_nothing(model):
    batch = batch_of([RESPONSES[0]], replayed=False)
    idle = replace(batch, responses=[], micro_batches=[make_micro_batch([], [], None)])
    found = recompute(model, idle, lambda _: nullcontext(), CONFIG, record=True)
    assert (found.tokens, found.entropy, found.log_probs_Sr, found.responses) == (0, 0.0, [], [])
    assert mismatch_metrics(found.mismatch) == {}
