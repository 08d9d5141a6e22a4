"""Recompute: the old log-probs, what differs from the sampler, and the routes that R2 keeps."""

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from relibra.cluster import cluster_preset
from relibra.parallel import PlanExecution
from relibra.replay import record_routing
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.algorithms.mismatch import mismatch_metrics
from relibra.rl.algorithms.terms import LossTotals
from relibra.rl.batch.schedule import make_schedule
from relibra.rl.batch.token_batch import make_token_batch, with_routes
from relibra.rl.batch.training_batch import BatchExecution, TrainingBatch, executing, plan_recorded_routes, replaying
from relibra.rl.config.run_config import load_config
from relibra.rl.model import token_scores as token_scores_module
from relibra.rl.model.optimizer import StepCount, make_optimizer
from relibra.rl.model.policy import Policy
from relibra.rl.model.token_scores import learn_logits, token_scores
from relibra.rl.update import recompute as recompute_module
from relibra.rl.update.policy_update import update_policy
from relibra.rl.update.recompute import recompute, reference_log_probs, score_tokens
from tests.replay.tiny_models import tiny_model
from tests.rl.joined import alone as alone_in_group
from tests.rl.made_up import EXPERTS, LAYERS, of_rank, response_of
from tests.rl.model.test_token_scores import LargestTensor

RESPONSES = [
    response_of(0, length=4),
    response_of(1, prompt=2, earlier=3, length=2, finished=False),
    response_of(2, prompt=5, length=6),
    response_of(3, prompt=1, earlier=1, length=3),
]
CONFIG = load_config(None, ["algorithm.preset=tppo", "algorithm.correction=icepop"])
LOSS = find_loss(CONFIG)


@pytest.fixture(scope="module")
def model():
    model = tiny_model().train()
    learn_logits(model)
    return model


def batch_of(responses, *, replayed, tokens=14, mini_batches=2):
    """Return a training batch of one rank."""
    schedule = make_schedule(
        np.array([len(one.tokens_n) - 1 for one in responses]),
        np.arange(len(responses)),
        mini_batches=mini_batches,
        micro_batch_tokens=tokens,
        num_ranks=1,
    )
    micro_batches = [make_token_batch(responses, chosen.tolist()) for chosen in of_rank(schedule, 0)]
    if replayed:
        micro_batches = [routed(micro_batch, responses) for micro_batch in micro_batches]
    return TrainingBatch(responses=responses, micro_batches=micro_batches, schedule=schedule, demand=None, plan=None)


def routed(micro_batch, responses):
    experts = [responses[s].experts_mLK for s in micro_batch.samples_B]
    return with_routes(micro_batch, experts, responses, num_experts=EXPERTS, layer_ids=range(LAYERS))


def alone_policy(model):
    return mock.Mock(spec=Policy, trained=model, balanced=False)


def run(model, batch, **options):
    with executing(alone_policy(model), batch, CONFIG.plan, cluster_preset("laptop", 1, 1)) as context:
        return recompute(model, batch, context, CONFIG.algorithm, temperature=1.0, **options)


def by_response(batch, values):
    """Return values of the response tokens of each micro-batch, one array per response of the rank."""
    flat_X = torch.zeros(sum(one.length for one in batch.responses))
    for micro_batch, values_X in zip(batch.micro_batches, values, strict=True):
        flat_X[micro_batch.token_X] = values_X
    return [piece.numpy() for piece in flat_X.split([one.length for one in batch.responses])]


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


def test_log_probs_equal_those_of_each_response_alone_in_order(model):
    batch = batch_of(RESPONSES, replayed=False)
    found = run(model, batch)
    for response, log_probs_r in zip(RESPONSES, by_response(batch, found.log_probs), strict=True):
        expected_r = native_log_probs(model, response) * response.in_window_r  # only these are computed
        assert log_probs_r == pytest.approx(expected_r, abs=1e-5)
    assert found.compared.routers.pairs == 0, "nothing was replayed"
    assert not found.routes


def test_the_sampler_is_compared_on_the_last_window_only(model):
    batch = batch_of(RESPONSES, replayed=False)
    true_Sr = by_response(batch, run(model, batch).log_probs)
    fresh = sum(response.window_length for response in RESPONSES)
    agreeing = []
    for response, log_probs_r in zip(RESPONSES, true_Sr, strict=True):
        sampled_r = log_probs_r.copy()
        sampled_r[: response.length - response.window_length] -= 4.0  # older weights said something else
        agreeing.append(replace(response, log_probs_r=sampled_r))
    found = run(model, batch_of(agreeing, replayed=False))
    metrics = mismatch_metrics(found.compared.mismatch)
    assert metrics["log_ratio_max"] < 1e-5
    assert metrics["masked_share"] == 0
    assert found.compared.tokens == fresh
    sampled_r = agreeing[2].log_probs_r.copy()
    sampled_r[1] -= np.float32(np.log(20.0))
    agreeing[2] = replace(agreeing[2], log_probs_r=sampled_r)
    metrics = mismatch_metrics(run(model, batch_of(agreeing, replayed=False)).compared.mismatch)
    assert metrics["masked_share"] == pytest.approx(1 / fresh)
    assert metrics["log_ratio_max"] == pytest.approx(np.log(20.0), abs=1e-4)


def test_only_the_last_windows_are_scored(model, monkeypatch):
    rows = []

    def counting(model, tokens_1T, position_1T, row_X, *arguments):
        rows.append(len(row_X))
        return token_scores(model, tokens_1T, position_1T, row_X, *arguments)

    monkeypatch.setattr(recompute_module, "token_scores", counting)
    found = run(model, batch_of(RESPONSES, replayed=False))
    assert sum(rows) == found.compared.tokens == sum(response.window_length for response in RESPONSES)


def test_entropy_is_summed_over_the_last_windows(model):
    found = run(model, batch_of(RESPONSES, replayed=False))
    expected = 0.0
    for s, response in enumerate(RESPONSES):
        scores = score_tokens(model, make_token_batch(RESPONSES, [s]), 1.0)
        expected += float(scores.entropy_X[-response.window_length :].detach().sum())
    assert found.compared.entropy == pytest.approx(expected, rel=1e-5)


def test_r2_records_the_routes_that_this_pass_took(model):
    batch = batch_of(RESPONSES, replayed=False)
    found = run(model, batch, record=True)
    policy = Policy(
        trained=model,
        meta=model,
        num_experts=EXPERTS,
        layer_ids=tuple(range(LAYERS)),
        top_k=2,
        balanced=False,
    )
    with alone_in_group():
        planned = plan_recorded_routes(
            batch, found.routes, policy, CONFIG, previous=None, cluster=cluster_preset("laptop", 1)
        )
    for micro_batch in planned.micro_batches:
        expected = []
        for s in micro_batch.samples_B:
            with torch.no_grad(), record_routing(model) as recorder:
                model(input_ids=torch.from_numpy(RESPONSES[s].tokens_n[:-1])[None], use_cache=False)
                expected += recorder.take()
        assert torch.equal(micro_batch.routes.experts_TLK, torch.cat(expected))
    rows = sum(len(response.tokens_n) - 1 for response in RESPONSES)
    assert planned.demand.load_MLE.sum(axis=(0, 2)).tolist() == [2 * rows] * LAYERS
    again = run(model, replace(planned, plan=None))
    assert again.compared.routers.differing_pairs == 0
    assert again.compared.routers.rows == sum(len(response.tokens_n) - 1 for response in RESPONSES)
    for one, other in zip(found.log_probs, again.log_probs, strict=True):
        torch.testing.assert_close(other, one, atol=1e-6, rtol=0)


def test_r3_replays_recorded_routes_and_counts_differences(model):
    batch = batch_of(RESPONSES, replayed=True)
    found = run(model, batch)
    routers = found.compared.routers
    assert routers.differing_pairs > 0.5 * routers.pairs, "the recorded routes are random ones"
    with executing(alone_policy(model), batch, CONFIG.plan, cluster_preset("laptop", 1, 1)) as context, context(0):
        [first, _] = batch.micro_batches
        expected_X = score_tokens(model, first, 1.0).log_probs_X * first.in_window_X
    torch.testing.assert_close(found.log_probs[0], expected_X.detach(), atol=1e-6, rtol=0)


def test_micro_batches_that_leave_the_plan_are_counted(model):
    class LeavesThePlan(PlanExecution):
        """An execution whose every micro-batch runs at home."""

        def __init__(self):
            self.ran_at_home = []

        def micro_batch(self, number, routes):
            assert routes is batch.micro_batches[number].routes
            self.ran_at_home.append(number)
            return nullcontext()

    batch = batch_of(RESPONSES, replayed=True)
    context = BatchExecution(model=model, batch=batch, execution=LeavesThePlan())
    for number in (0, 1, 0):
        with context(number):
            pass
    assert context.ran_at_home == 3
    assert BatchExecution(model=model, batch=batch).ran_at_home == 0


@pytest.mark.parametrize("replayed", [False, True])
def test_the_first_mini_batch_has_ratio_1_to_the_bit(model, replayed):
    batch = batch_of([replace(one, window_length=one.length) for one in RESPONSES], replayed=replayed)
    found = run(model, batch)
    ones = [torch.ones(len(micro_batch.row_X)) for micro_batch in batch.micro_batches]
    batch = batch.filled(
        old_log_probs_X=found.log_probs,
        sampled_log_probs_X=found.log_probs,
        advantages_X=ones,
        loss_mask_X=[ones_X > 0 for ones_X in ones],
        positive_B=[torch.zeros(micro_batch.num_responses, dtype=torch.bool) for micro_batch in batch.micro_batches],
    )
    totals = LossTotals(
        tokens=15, responses=4, positive_tokens=0, step_tokens=30, step_positive_tokens=0, mini_batches=2
    )
    for number, micro_batch in batch.of_mini_batch(0):
        read = LOSS.of_tokens_read(micro_batch)
        with replaying(model, micro_batch.routes):
            scores = score_tokens(model, read, 1.0)
        loss, sums = LOSS(scores, read, totals)
        share = len(micro_batch.row_X) * 2 / 30
        assert float(loss.detach()) == pytest.approx(-share, abs=1e-6), f"micro-batch {number}: ratios are not 1"
        assert found.log_probs[number].tolist() == scores.log_probs_X.tolist()
        assert sums["clip_fraction"] == 0


def test_no_pass_of_a_step_holds_whole_logits(monkeypatch):
    model = tiny_model(vocab_size=5000, hidden_size=4, num_hidden_layers=1).train()
    learn_logits(model)
    monkeypatch.setattr(token_scores_module, "CHUNK_BYTES", 3 * 4 * 5000)
    batch = batch_of(RESPONSES, replayed=False, tokens=100)
    ones = [torch.ones(len(micro_batch.row_X)) for micro_batch in batch.micro_batches]
    assert max(map(len, ones)) > 8
    with alone_in_group(), LargestTensor() as largest:
        found = run(model, batch)
        batch = batch.filled(
            old_log_probs_X=found.log_probs,
            advantages_X=ones,
            loss_mask_X=[ones_X > 0 for ones_X in ones],
            positive_B=[torch.ones(micro_batch.num_responses) > 0 for micro_batch in batch.micro_batches],
        )
        batch = batch.filled(ref_log_probs_X=reference_log_probs(model, batch, 1.0))
        optimizer, count = make_optimizer(model, 1e-3), StepCount()
        update = update_policy(
            model, optimizer, batch, lambda _: nullcontext(), LOSS, CONFIG.update, count=count, num_ranks=1
        )
    assert update.count.made == 2
    assert largest.values <= 4 * 5000, "a chunk, or the weight of the head"


def test_the_reference_routes_by_itself_whatever_is_replayed(model):
    reference = tiny_model(seed=5).eval().requires_grad_(False)
    batch = batch_of(RESPONSES, replayed=True)
    found = reference_log_probs(reference, batch, 1.0)
    for response, log_probs_r in zip(RESPONSES, by_response(batch, found), strict=True):
        assert log_probs_r == pytest.approx(native_log_probs(reference, response), abs=1e-5)
    masks = [torch.rand(len(one.row_X)) < 0.4 for one in batch.micro_batches]
    some = reference_log_probs(reference, batch.filled(loss_mask_X=masks), 1.0)
    for trained_X, all_X, mask_X in zip(some, found, masks, strict=True):
        torch.testing.assert_close(trained_X, all_X * mask_X, atol=1e-6, rtol=0)


def test_a_rank_without_responses_compares_nothing(model):
    batch = batch_of([RESPONSES[0]], replayed=False)
    idle = replace(batch, responses=[], micro_batches=[make_token_batch([], [])])
    found = recompute(model, idle, lambda _: nullcontext(), CONFIG.algorithm, temperature=1.0, record=True)
    assert (found.compared.tokens, found.compared.entropy, len(found.log_probs[0])) == (0, 0.0, 0)
    assert set(mismatch_metrics(found.compared.mismatch).values()) == {None}
