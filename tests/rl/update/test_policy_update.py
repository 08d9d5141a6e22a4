"""The policy's loss: the same however a mini-batch is cut, by hand for every preset, and silent where it should be."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from relibra.rl.algorithms.loss import find_loss
from relibra.rl.algorithms.tppo import POSITIVE_WEIGHT
from relibra.rl.batch.schedule import Schedule
from relibra.rl.batch.token_batch import make_token_batch
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.config.defaults import PRESETS
from relibra.rl.config.run_config import load_config
from relibra.rl.model.token_scores import score_logits
from relibra.rl.update.policy_update import loss_totals
from tests.rl.made_up import responses_of

pytestmark = pytest.mark.usefixtures("group")

VOCAB = 61
LENGTHS = (4, 1, 7, 3, 5, 2, 6)


@dataclass(frozen=True)
class Targets:
    """What the loss reads of each response, beside its tokens."""

    log_probs_old_Sr: list
    sampled_Sr: list
    advantage_Sr: list
    trained_Sr: list
    reference_Sr: list | None
    positive_S: np.ndarray


@dataclass(frozen=True)
class Step:
    """Responses with the logits of their tokens as leaves, so that gradients can be seen token by token."""

    responses: list
    logits_SrV: list
    targets: Targets

    def batch(self, chosen):
        def of(values_Sr):
            return torch.cat([torch.zeros(0), *(torch.from_numpy(values_Sr[s].astype(np.float32)) for s in chosen)])

        targets = self.targets
        return replace(
            make_token_batch(self.responses, chosen),
            old_log_probs_X=of(targets.log_probs_old_Sr),
            sampled_log_probs_X=of(targets.sampled_Sr),
            advantages_X=of(targets.advantage_Sr),
            loss_mask_X=of(targets.trained_Sr) > 0,
            ref_log_probs_X=None if targets.reference_Sr is None else of(targets.reference_Sr),
            positive_B=torch.from_numpy(targets.positive_S[chosen]),
        )

    def loss_and_sums(self, config, chosen, totals, mini_batch=0):
        logits_XV = torch.cat([self.logits_SrV[s] for s in chosen])
        found, batch = find_loss(config), self.batch(chosen)
        read = found.of_tokens_read(replace(batch, row_X=torch.arange(len(batch.row_X))))
        loss, sums = found(scores_of(logits_XV, read), read, totals[mini_batch])
        return loss, Counter(found.add_up([sums]))

    def loss(self, *arguments, **options):
        return self.loss_and_sums(*arguments, **options)[0]

    def gradients(self, config, cuts, totals):
        """Return the gradient of every logit and the sums, summed over micro-batches."""
        for leaf in self.logits_SrV:
            leaf.grad = None
        all_sums = Counter()
        for chosen in cuts:
            loss, sums = self.loss_and_sums(config, chosen, totals)
            loss.backward()
            all_sums.update(sums)
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in self.logits_SrV]
        return grads, all_sums


def scores_of(logits_XV, read):
    """Return what the update computes: scores of the tokens that the loss reads; without any, of one row."""
    if not len(read.row_X):
        return score_logits(logits_XV[:1], torch.zeros(1, dtype=torch.int64), 1.0)
    return score_logits(logits_XV[read.row_X], read.target_X, 1.0)


def log_probs_of(logits_rV, tokens_r):
    return logits_rV.detach().log_softmax(-1).gather(-1, tokens_r[:, None])[:, 0].numpy()


def step_of(seed=0, *, drift=0.3, reference=False, lengths=LENGTHS):
    """Return a step with advantages, masks and old log-probs that are near to the present ones, or equal to them."""
    rng = np.random.default_rng(seed)
    responses = responses_of(lengths, routed=False)
    generator = torch.Generator().manual_seed(seed)
    logits_SrV = [torch.randn(one.length, VOCAB, generator=generator).requires_grad_() for one in responses]
    now_Sr = [
        log_probs_of(leaf, torch.from_numpy(one.tokens_n[one.prompt_length :]))
        for leaf, one in zip(logits_SrV, responses, strict=True)
    ]
    old_Sr = [(now + drift * rng.normal(size=len(now))).astype(np.float32) for now in now_Sr]
    trained_Sr = [rng.random(len(now)) < 0.7 for now in now_Sr]
    trained_Sr[1][:] = False  # a response without a trained token
    trained_Sr[2][:] = True
    targets = Targets(
        log_probs_old_Sr=old_Sr,
        sampled_Sr=[(old + 0.3 * rng.normal(size=len(old))).astype(np.float32) for old in old_Sr],
        advantage_Sr=[(rng.normal(size=len(trained)) * trained).astype(np.float32) for trained in trained_Sr],
        trained_Sr=trained_Sr,
        reference_Sr=[(old + 0.2 * rng.normal(size=len(old))).astype(np.float32) for old in old_Sr]
        if reference
        else None,
        positive_S=np.array([True, True, False, True, False, False, True]),
    )
    return Step(responses, logits_SrV, targets)


def totals_of(step, mini_batches=1):
    """Return the totals of mini-batches of neighbouring responses, one micro-batch each."""
    S = len(step.responses)
    mini_batch_S = np.arange(S) * mini_batches // S
    schedule = Schedule(
        mini_batch_M=np.arange(mini_batches, dtype=np.int32),
        micro_batch_S=mini_batch_S.astype(np.int32),
        rank_S=np.zeros(S, dtype=np.int32),
    )
    micro_batches = [step.batch(np.flatnonzero(mini_batch_S == m).tolist()) for m in range(mini_batches)]
    batch = TrainingBatch(
        responses=step.responses, micro_batches=micro_batches, schedule=schedule, demand=None, plan=None
    )
    return loss_totals(batch)


def preset_config(name, *overrides):
    return load_config(None, [f"algorithm.preset={name}", *overrides])


def without_positive(name):
    """Return a preset without the language-model loss on positive examples."""
    return preset_config(name, *(["algorithm.loss=ppo"] if name == "tppo" else []))


CONFIGS = {
    **{name: preset_config(name) for name in PRESETS},
    "constant": preset_config("grpo", "algorithm.aggregate=constant", "algorithm.correction=mis"),
    "regularised": preset_config(
        "gspo", "algorithm.entropy_coefficient=0.1", "algorithm.kl_coefficient=0.2", "algorithm.correction=sequence_tis"
    ),
}


def loss_by_hand(step, config):
    """Compute the loss of the whole step as one mini-batch, token by token in float64; the slow reference."""
    settings, targets, total = config.algorithm, step.targets, 0.0
    logp_Sr = [
        leaf.detach().double().log_softmax(-1).numpy()[range(one.length), one.tokens_n[one.prompt_length :]]
        for leaf, one in zip(step.logits_SrV, step.responses, strict=True)
    ]
    tokens = sum(int(trained.sum()) for trained in targets.trained_Sr)
    with_tokens = sum(bool(trained.any()) for trained in targets.trained_Sr)
    for s, logp in enumerate(logp_Sr):
        places = np.flatnonzero(targets.trained_Sr[s])
        log_ratio = logp - targets.log_probs_old_Sr[s]
        log_weight = targets.log_probs_old_Sr[s].astype(np.float64) - targets.sampled_Sr[s]
        for t in places:
            exponent = log_ratio[places].mean() if settings.loss == "gspo" else log_ratio[t]
            ratio, advantage = np.exp(exponent), targets.advantage_Sr[s][t]
            clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
            gain = min(ratio * advantage, clipped * advantage)
            if settings.dual_clip and advantage < 0:
                gain = max(gain, settings.dual_clip * advantage)
            share = np.exp(log_weight[t])
            gain *= {
                "tis": min(share, 2.0),
                "sequence_tis": min(np.exp(log_weight[places].sum()), 2.0),
                "mis": float(0.5 <= share <= 2.0),
            }[settings.correction]
            if targets.reference_Sr is not None:
                difference = logp[t] - targets.reference_Sr[s][t]
                gain -= settings.kl_coefficient * (np.exp(-difference) - 1 + difference)
            if settings.entropy_coefficient:
                log_probs_V = step.logits_SrV[s][t].detach().double().log_softmax(-1)
                gain -= settings.entropy_coefficient * float((log_probs_V.exp() * log_probs_V).sum())
            weight = {
                "token": 1 / tokens,
                "token_over_step": 1 / tokens,  # one mini-batch: the step is the mini-batch
                "response": 1 / (len(places) * with_tokens),
                "constant": 1 / (config.rollout.max_response * with_tokens),
            }[settings.aggregate]
            total -= weight * gain
    positive = [s for s, is_positive in enumerate(targets.positive_S) if is_positive]
    positive_tokens = sum(len(logp_Sr[s]) for s in positive)
    return (
        total - POSITIVE_WEIGHT * (settings.loss == "tppo") * sum(logp_Sr[s].sum() for s in positive) / positive_tokens
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_of_a_step_by_hand(name):
    step = step_of(reference=name == "regularised")
    loss, sums = step.loss_and_sums(CONFIGS[name], list(range(7)), totals_of(step))
    assert float(loss.detach()) == pytest.approx(loss_by_hand(step, CONFIGS[name]), abs=2e-6)
    assert sums["loss"] == pytest.approx(float(loss.detach()))
    assert sums["tokens"] == sum(trained.sum() for trained in step.targets.trained_Sr)


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_is_the_same_for_1_2_or_7_micro_batches(name):
    step = step_of(1, reference=name == "regularised")
    totals, config = totals_of(step), CONFIGS[name]
    cuts = ([[0, 1, 2, 3, 4, 5, 6]], [[6, 0, 3], [2, 4, 1, 5]], [[s] for s in range(7)])
    found, sums = zip(*(step.gradients(config, cut, totals) for cut in cuts), strict=True)
    whole, *others = found
    assert max(float(leaf.abs().max()) for leaf in whole) > 1e-3
    for other in others:
        assert max(float((a - b).abs().max()) for a, b in zip(whole, other, strict=True)) <= 1e-6
    for other in sums[1:]:
        assert other["loss"] == pytest.approx(sums[0]["loss"], abs=1e-6)
        for name in ("clip_fraction", "tokens", "masked_fraction"):
            assert other[name] == sums[0][name]


def test_every_token_weighs_the_same_in_1_2_or_7_mini_batches():
    """`token_over_step`: gradients of mini-batches, without updates between, add up to their number times the same."""
    step, config = step_of(2), CONFIGS["tppo"]
    found = []
    for mini_batches in (1, 2, 7):
        totals = totals_of(step, mini_batches)
        for leaf in step.logits_SrV:
            leaf.grad = None
        for s in range(7):
            step.loss(config, [s], totals, mini_batch=s * mini_batches // 7).backward()
        found.append([leaf.grad / mini_batches for leaf in step.logits_SrV])
    for other in found[1:]:
        assert max(float((a - b).abs().max()) for a, b in zip(found[0], other, strict=True)) <= 1e-6


@pytest.mark.parametrize("name", PRESETS)
def test_before_any_update_ratios_are_1_and_none_is_clipped(name):
    step = step_of(3, drift=0.0)
    step = replace(step, targets=replace(step.targets, sampled_Sr=step.targets.log_probs_old_Sr))
    config = without_positive(name)
    gradients, sums = step.gradients(config, [[0, 1, 2], [3, 4, 5, 6]], totals_of(step))
    assert sums["clip_fraction"] == sums["masked_fraction"] == 0
    assert sums["tokens"] > 0
    # what is left is the plain policy gradient: minus weight x advantage x gradient of the log-prob
    counts = [int(trained.sum()) for trained in step.targets.trained_Sr]
    for s, one in enumerate(step.responses):
        weight = 1 / sum(counts)
        if config.algorithm.aggregate == "response":
            weight = 1 / max(1, counts[s]) / sum(count > 0 for count in counts)
        tokens_r = torch.from_numpy(one.tokens_n[one.prompt_length :])
        probability_rV = step.logits_SrV[s].detach().softmax(-1)
        slope_rV = torch.nn.functional.one_hot(tokens_r, VOCAB) - probability_rV
        expected = -weight * torch.from_numpy(step.targets.advantage_Sr[s])[:, None] * slope_rV
        torch.testing.assert_close(gradients[s], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", PRESETS)
def test_untrained_tokens_have_no_gradient_and_no_share(name):
    """Dropped tails and windows of other versions: they are not in the loss, and their logits do not matter."""
    config = without_positive(name)
    step = step_of(4)
    totals = totals_of(step)
    gradients, _ = step.gradients(config, [list(range(7))], totals)
    loss = float(step.loss(config, list(range(7)), totals).detach())
    assert sum(float(leaf.abs().sum()) for leaf in gradients) > 0
    for s, trained in enumerate(step.targets.trained_Sr):
        untrained = torch.from_numpy(~trained)
        assert gradients[s][untrained].abs().sum() == 0
        with torch.no_grad():
            step.logits_SrV[s][untrained] += 3.0 * torch.randn(int(untrained.sum()), VOCAB)
    assert float(step.loss(config, list(range(7)), totals).detach()) == loss


def test_a_reference_policy_pulls_and_is_measured():
    step = step_of(7, reference=True)
    free, held = preset_config("grpo"), preset_config("grpo", "algorithm.kl_coefficient=0.5")
    totals, everything = totals_of(step), list(range(7))
    loss, sums = step.loss_and_sums(held, everything, totals)
    difference = float((loss - step.loss(free, everything, totals)).detach())
    per_response = []
    for s, one in enumerate(step.responses):
        tokens_r = torch.from_numpy(one.tokens_n[one.prompt_length :])
        logp_r = log_probs_of(step.logits_SrV[s], tokens_r)
        gap_r = (logp_r - step.targets.reference_Sr[s])[step.targets.trained_Sr[s]]
        per_response.append(np.exp(-gap_r) - 1 + gap_r)
    assert sums["reference_kl"] == pytest.approx(sum(k3.sum() for k3 in per_response), abs=1e-5)
    assert difference == pytest.approx(0.5 * np.mean([k3.mean() for k3 in per_response if len(k3)]), abs=1e-6)


def test_tokens_rejected_by_correction_count_without_gradient():
    step = step_of(8, drift=0.0)
    sampled_Sr = [old.copy() for old in step.targets.log_probs_old_Sr]
    sampled_Sr[2][3] -= np.log(20.0)  # the sampler found it 20 times less likely
    step = replace(step, targets=replace(step.targets, sampled_Sr=sampled_Sr))
    config = preset_config("grpo", "algorithm.correction=icepop")
    gradients, sums = step.gradients(config, [list(range(7))], totals_of(step))
    assert sums["masked_fraction"] == 1
    assert gradients[2][3].abs().sum() == 0
    assert gradients[2][2].abs().sum() > 0


def test_a_loss_gets_the_tokens_that_it_reads():
    step = step_of(4)
    trained = sum(int(trained.sum()) for trained in step.targets.trained_Sr)
    or_positive = sum(
        len(trained) if positive else int(trained.sum())
        for trained, positive in zip(step.targets.trained_Sr, step.targets.positive_S, strict=True)
    )
    assert trained < or_positive < sum(LENGTHS)
    for name, tokens in (("ppo", trained), ("gspo", trained), ("tppo", or_positive)):
        read = find_loss(preset_config(name)).of_tokens_read(step.batch(list(range(7))))
        assert (len(read.row_X), len(read.trained_Y)) == (tokens, trained)
        assert read.loss_mask_X[read.trained_Y].all()


def test_a_filler_adds_nothing_and_goes_backward():
    step, config = step_of(9), CONFIGS["dapo"]
    logits_1V = torch.randn(1, VOCAB, requires_grad=True)
    found, filler = find_loss(config), make_token_batch(step.responses, [])
    loss, sums = found(scores_of(logits_1V, filler), found.of_tokens_read(filler), totals_of(step)[0])
    loss.backward()
    assert float(loss.detach()) == 0
    assert logits_1V.grad.abs().sum() == 0
    assert sums == {}


def test_a_micro_batch_without_trained_tokens_goes_backward_too():
    step = step_of(10)
    gradients, _ = step.gradients(CONFIGS["dapo"], [[1]], totals_of(step))
    assert step.logits_SrV[1].grad is not None
    assert all(leaf.abs().sum() == 0 for leaf in gradients)


def test_totals_count_trained_tokens_and_responses_with_some():
    step = step_of(lengths=LENGTHS)
    masks = [np.zeros(n, dtype=bool) for n in LENGTHS]
    masks[0][:2], masks[2][:], masks[6][3] = True, True, True
    step = replace(step, targets=replace(step.targets, trained_Sr=masks))
    first, second = totals_of(step, 2)  # responses 0 to 3, 4 to 6
    assert (first.tokens, first.responses, first.positive_tokens) == (2 + LENGTHS[2], 2, 4 + 1 + 3)
    assert (second.tokens, second.responses, second.positive_tokens) == (1, 1, 6)
    assert first.step_tokens == second.step_tokens == 2 + LENGTHS[2] + 1
    assert first.step_positive_tokens == 14
    assert first.mini_batches == 2
