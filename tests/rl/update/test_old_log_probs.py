"""Old log-probs that no pass computes: updates equal those after a pass over all micro-batches."""

from dataclasses import replace

import pytest
import torch

from relibra.errors import EngineError
from relibra.rl.algorithms.loss import find_loss
from relibra.rl.algorithms.mismatch import mismatch_metrics
from relibra.rl.batch.training_batch import BatchExecution
from relibra.rl.config.defaults import PRESETS
from relibra.rl.config.run_config import load_config
from relibra.rl.model.optimizer import StepCount
from relibra.rl.model.token_scores import learn_logits
from relibra.rl.run.step_metrics import update_metrics
from relibra.rl.update.policy_update import loss_totals, update_policy
from relibra.rl.update.recompute import micro_batches_to_recompute, score_tokens
from tests.replay.tiny_models import tiny_model
from tests.rl.made_up import response_of
from tests.rl.update.test_recompute import batch_of, native_log_probs, run

pytestmark = pytest.mark.usefixtures("group")

RESPONSES = [
    response_of(0, length=4),
    response_of(1, prompt=2, earlier=3, length=4, finished=False),
    response_of(2, prompt=5, length=6),
    response_of(3, prompt=1, earlier=2, length=3),
]


def config_of(name, *overrides):
    settings = ("update.learning_rate=0.3", "update.max_grad_norm=1e9", "algorithm.entropy_coefficient=0.01")
    return load_config(None, [f"algorithm.preset={name}", *settings, *overrides])


def fresh_model():
    model = tiny_model().train()
    learn_logits(model)
    return model


def step_of(model, mini_batches, *, replayed):
    """Return a batch with all that the loss reads but old log-probs; the sampler is a little off."""
    batch = batch_of(RESPONSES, replayed=replayed, mini_batches=mini_batches)
    rng = torch.Generator().manual_seed(0)
    masks = [one.in_window_X & (torch.rand(len(one.row_X), generator=rng) < 0.8) for one in batch.micro_batches]
    true = run(model, batch).log_probs
    return batch.filled(
        sampled_log_probs_X=[logp_X + 0.1 * torch.randn(len(logp_X), generator=rng) for logp_X in true],
        advantages_X=[torch.randn(len(mask_X), generator=rng) * mask_X for mask_X in masks],
        loss_mask_X=masks,
        positive_B=[torch.tensor([RESPONSES[s].reward == 1.0 for s in one.samples_B]) for one in batch.micro_batches],
    )


def with_old(batch, log_probs):
    return batch.filled(old_log_probs_X=log_probs)


def updated(model, batch, config, **options):
    """Train on a batch by plain descent; return the update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return update_policy(
        *(model, optimizer, batch, batch_context(model, batch), find_loss(config), config.update),
        count=StepCount(),
        num_ranks=1,
        **options,
    )


def batch_context(model, batch):
    return BatchExecution(model=model, batch=batch)


def skipping(model, batch, config):
    """Return the batch with old log-probs as a run has them before its update, and what its pass found."""
    numbers = micro_batches_to_recompute(batch.schedule, config.algorithm, trains=True)
    found = run(model, batch, numbers=numbers)
    return with_old(batch, found.log_probs), found


def assert_same_update(config, mini_batches, *, replayed=True, change=lambda batch: batch):
    """Train with the first mini-batch's own log-probs, and after a pass over all; compare weights and sums."""
    found = []
    for skips in (True, False):
        model = fresh_model()
        before = [weights.detach().clone() for weights in model.parameters()]
        batch = change(step_of(model, mini_batches, replayed=replayed))
        batch = skipping(model, batch, config)[0] if skips else with_old(batch, run(model, batch).log_probs)
        update = updated(model, batch, config)
        found.append((update, [weights.detach() for weights in model.parameters()]))
    (one, ours), (other, theirs) = found
    moved = max(float((a - b).abs().max()) for a, b in zip(ours, before, strict=True))
    assert moved > 1e-3 or not one.count.made
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    own = dict(one.sums)
    own.pop("at_ratio_1", None)
    assert own == pytest.approx(other.sums, abs=1e-5)
    assert (one.count, one.skipped) == (other.count, other.skipped)
    return one


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("mini_batches", "epochs"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_an_update_equals_that_after_a_whole_pass(name, mini_batches, epochs):
    update = assert_same_update(config_of(name, f"update.epochs={epochs}"), mini_batches)
    assert update.count.made == mini_batches * epochs


@pytest.mark.parametrize("correction", ["off", "sequence_tis", "icepop", "mis"])
def test_corrections_divide_the_same_log_probs(correction):
    assert_same_update(config_of("grpo", f"algorithm.correction={correction}"), 2, replayed=False)


@pytest.mark.parametrize("name", ["dapo", "tppo"])
def test_a_first_mini_batch_without_trained_tokens_is_left_out(name):
    def first_is_empty(batch):
        first = batch.schedule.mini_batch_M == 0
        return batch.filled(
            loss_mask_X=[one.loss_mask_X & (not first[m]) for m, one in enumerate(batch.micro_batches)],
            positive_B=[one.positive_B & (not first[m]) for m, one in enumerate(batch.micro_batches)],
        )

    update = assert_same_update(config_of(name, "update.epochs=2"), 2, change=first_is_empty)
    assert update.count.made == 2
    assert "at_ratio_1" not in update.sums


def test_a_first_mini_batch_that_is_skipped_is_stored():
    def first_is_broken(batch):
        first = batch.schedule.mini_batch_M == 0
        return batch.filled(
            advantages_X=[one.advantages_X / (not first[m]) for m, one in enumerate(batch.micro_batches)]
        )

    update = assert_same_update(config_of("grpo", "update.epochs=2"), 2, change=first_is_broken)
    assert update.skipped == 2


def test_old_log_probs_are_those_of_the_weights_before_the_step():
    """Oracle: each response alone, under the weights that the step begins with, in every epoch."""
    config, model = config_of("ppo", "update.epochs=2"), fresh_model()
    batch, _ = skipping(model, step_of(model, 2, replayed=False), config)
    at_begin = [native_log_probs(model, response) for response in RESPONSES]
    loss, seen = find_loss(config), []

    def noting(inputs):
        seen.append((inputs.old_log_probs_X.clone(), inputs.sampled_log_probs_X.clone()))
        return loss.function(inputs)

    update_policy(
        *(model, torch.optim.SGD(model.parameters(), lr=0.3), batch, batch_context(model, batch)),
        *(replace(loss, function=noting), config.update),
        count=StepCount(),
        num_ranks=1,
    )
    expected = []
    for micro_batch in [one for _ in range(2) for one in batch.micro_batches]:
        old_X = torch.cat([torch.from_numpy(at_begin[s]) for s in micro_batch.samples_B])
        expected.append((old_X[micro_batch.loss_mask_X], micro_batch.sampled_log_probs_X[micro_batch.loss_mask_X]))
    for (old_X, sampled_X), (expected_X, of_sampler_X) in zip(seen, expected, strict=True):
        assert old_X.numpy() == pytest.approx(expected_X.numpy(), abs=1e-5)
        assert torch.equal(sampled_X, of_sampler_X)


def test_the_sampler_is_compared_as_by_a_whole_pass():
    config, model = config_of("grpo"), fresh_model()
    batch = step_of(model, 2, replayed=True)
    batch = batch.filled(loss_mask_X=[one.in_window_X for one in batch.micro_batches])
    whole = run(model, batch).compared
    filled, passed = skipping(model, batch, config)
    assert [old is None for old in passed.log_probs] == (batch.schedule.mini_batch_M == 0).tolist()
    checked = []
    update = updated(
        model, filled, config, before_first_step=lambda _own, _batch, compared: checked.append(compared) or True
    )
    ours = passed.compared + update.compared
    assert 0 < update.compared.tokens < ours.tokens == whole.tokens
    assert ours.entropy == pytest.approx(whole.entropy, rel=1e-5)
    assert ours.routers == whole.routers
    assert ours.routers.differing_pairs > 0
    theirs = mismatch_metrics(whole.mismatch)
    assert mismatch_metrics(ours.mismatch) == pytest.approx(theirs, rel=1e-3, abs=1e-6)
    assert [one.tokens for one in checked] == [update.compared.tokens]


def test_what_is_refused_before_the_first_step_trains_nothing():
    config, model = config_of("grpo"), fresh_model()
    batch, _ = skipping(model, step_of(model, 1, replayed=True), config)
    before = [weights.detach().clone() for weights in model.parameters()]

    def refuse(_own, _batch, compared):
        raise EngineError(f"{compared.tokens} tokens differ")

    with pytest.raises(EngineError, match="tokens differ"):
        updated(model, batch, config, before_first_step=refuse)
    assert all(map(torch.equal, before, model.parameters()))


def test_clips_are_counted_where_a_token_can_be_clipped():
    config, model = config_of("gspo"), fresh_model()
    batch, _ = skipping(model, step_of(model, 2, replayed=True), config)
    update = updated(model, batch, config)
    second = sum(int(one.loss_mask_X.sum()) for _, one in batch.of_mini_batch(1))
    metrics = update_metrics(update, find_loss(config).metrics)
    assert update.sums["tokens"] - update.sums["at_ratio_1"] == second
    assert metrics["clip_fraction"] == pytest.approx(update.sums["clip_fraction"] / second)
    assert metrics["clip_fraction"] > 0
    batch, _ = skipping(model, step_of(model, 1, replayed=True), config)
    assert update_metrics(updated(model, batch, config), find_loss(config).metrics)["clip_fraction"] is None


def test_passes_that_are_needed_run():
    schedule = batch_of(RESPONSES, replayed=False, mini_batches=2, tokens=1).schedule
    assert schedule.mini_batch_M.tolist() == [0, 0, 1, 1]
    for overrides, trains, expected in (
        (("algorithm.old_log_probs=sampler",), True, []),
        (("algorithm.old_log_probs=sampler",), False, [0, 1, 2, 3]),
        ((), True, [2, 3]),
        ((), False, [0, 1, 2, 3]),
        (("algorithm.replay=R2",), True, [0, 1, 2, 3]),
        (("algorithm.old_log_probs=recompute",), True, [0, 1, 2, 3]),
    ):
        settings = config_of("grpo", *overrides).algorithm
        assert micro_batches_to_recompute(schedule, settings, trains=trains) == expected


def sampler_updates(config, accepts):
    """Train from the sampler's log-probs where they are accepted; return weights and sums."""
    model = fresh_model()
    update = updated(model, step_of(model, 4, replayed=True), config, before_first_step=lambda *_: accepts)
    return update, list(model.parameters())


def test_log_probs_of_an_accepted_sampler_are_the_old_ones():
    config = config_of("grpo", "algorithm.old_log_probs=sampler", "update.epochs=2")
    model = fresh_model()
    batch = step_of(model, 4, replayed=True)
    expected = with_old(batch, [None, *(one.sampled_log_probs_X for one in batch.micro_batches[1:])])
    one, other = updated(model, expected, config), sampler_updates(config, accepts=True)
    assert one.sums == pytest.approx(other[0].sums, abs=1e-6)
    for a, b in zip(model.parameters(), other[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
def test_a_refused_sampler_falls_back_to_the_pass(mini_batches):
    config = config_of("ppo", "algorithm.old_log_probs=sampler")
    found = []
    for skips in (False, True):
        model = fresh_model()
        batch = step_of(model, mini_batches, replayed=True)
        if skips:
            batch = skipping(model, batch, config_of("ppo"))[0]
        update = updated(model, batch, config, before_first_step=lambda *_: False)
        found.append((update, list(model.parameters())))
    (one, ours), (_, theirs) = found
    tokens = [
        int(one.in_window_X.sum())
        for _, one in (pair for m in range(1, mini_batches) for pair in batch.of_mini_batch(m))
    ]
    assert one.compared.tokens == found[1][0].compared.tokens + sum(tokens)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("correction", "high"), [("tis", None), ("icepop", 5.0), ("mis", 2.0)])
def test_corrections_of_the_sampler_only_mask(correction, high):
    """tis is 1 by itself; icepop and mis drop tokens by policy / sampler, and weigh none."""
    config = config_of("grpo", "algorithm.old_log_probs=sampler", f"algorithm.correction={correction}")
    model = fresh_model()
    batch = step_of(model, 1, replayed=False)
    shift = torch.log(torch.tensor([1.0, 0.3, 3.0, 7.0]))
    found, loss = [], find_loss(config)
    for one in batch.micro_batches:
        read = loss.of_tokens_read(one)
        scores = score_tokens(model, read, 1.0)
        sampled_X = scores.log_probs_X.detach() - shift.repeat(len(read.row_X))[: len(read.row_X)]
        read = replace(read, sampled_log_probs_X=sampled_X, old_log_probs_X=sampled_X, advantages_X=read.advantages_X)
        [totals] = loss_totals(batch)
        found.append((loss(scores, read, totals)[1]["masked_fraction"], len(read.row_X)))
    ratio_X = torch.tensor([1.0, 0.3, 3.0, 7.0])
    for masked, tokens in found:
        dropped = 0 if high is None else ((ratio_X < 0.5) | (ratio_X > high)).repeat(tokens)[:tokens].sum()
        assert int(masked) == int(dropped)
