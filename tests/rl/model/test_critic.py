"""The value model: where it starts, and sequences laid end to end."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor

from relibra.cluster import cluster_preset
from relibra.rl.batch.training_batch import balancing
from relibra.rl.config.settings import PlanSettings
from relibra.rl.model.critic import build_critic, token_values, value_model_class
from relibra.rl.model.optimizer import clip_gradients, make_optimizer
from relibra.rl.model.packed_sequences import use_explicit_masks
from relibra.rl.model.policy import reference_policy
from tests.replay.tiny_models import CONFIGS, random_tokens, tiny_model
from tests.rl.joined import CPU, on_ranks, policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")

LENGTHS = (5, 9, 1, 20)
PPO = ("algorithm.preset=ppo", "plan.balancer=static")


def packed(lengths=LENGTHS):
    """Return tokens and positions of sequences laid end to end."""
    tokens = random_tokens(1, sum(lengths))
    return tokens, torch.cat([torch.arange(n) for n in lengths])[None]


def randomise_head(critic):
    with torch.no_grad():
        weight = critic.score.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        local.copy_(torch.linspace(-1, 1, local.shape[1]).expand_as(local))


@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, "eager") for family in CONFIGS] + [(family, "sdpa") for family in CONFIGS if family != "gpt_oss"],
)
def test_sequences_laid_end_to_end_do_not_see_each_other(family, attention):
    causal = tiny_model(family).eval()
    tokens, positions = packed()
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    causal.set_attn_implementation(attention)
    torch.manual_seed(0)
    config = causal.config
    config.num_labels = 1
    config.token_classification_bias = False
    critic = value_model_class(type(causal))(config).eval()
    critic.set_attn_implementation(attention)
    for tensor in critic.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    if family == "gpt_oss":  # which never hands positions to its masks
        for model in (causal, critic):
            use_explicit_masks(model, torch.float32)
    with torch.no_grad():
        logits = causal(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        together = token_values(critic, tokens, positions)
        for start, end in zip([0, *ends], ends, strict=False):
            own, place = tokens[:, start:end], torch.arange(end - start)[None]
            alone = causal(input_ids=own, use_cache=False).logits[0]
            torch.testing.assert_close(logits[start:end], alone, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(together[start:end], token_values(critic, own, place), rtol=1e-5, atol=1e-5)
    assert together.shape == (sum(LENGTHS),)
    assert together.dtype == torch.float32
    assert together.std() > 0.01


def test_the_class_is_that_of_transformers_where_it_names_one():
    built = value_model_class(transformers.Qwen3MoeForCausalLM)
    named = transformers.Qwen3MoeForTokenClassification
    assert built.__name__ == named.__name__
    assert [base.__name__ for base in built.__mro__[1:]] == [base.__name__ for base in named.__mro__[1:]]


@pytest.mark.parametrize("experts", [4, 0])
def test_the_critic_starts_as_the_policy_and_says_nothing(tmp_path, experts):
    config = tiny_config(*PPO, f"model.num_experts={experts}", "algorithm.replay=off")
    policy = policy_of(config, tmp_path)
    with torch.no_grad():
        policy.trained.model.norm.weight.mul_(1.5)  # trained since the copy was made
    critic = build_critic(config.model, policy, tmp_path, CPU)
    tokens, positions = packed()
    assert torch.equal(token_values(critic, tokens, positions), torch.zeros(sum(LENGTHS)))
    ours, theirs = (model.model(tokens).last_hidden_state for model in (critic, policy.trained))
    assert torch.equal(ours, theirs)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in critic.parameters())
    assert critic.training
    assert critic.dropout.p == 0
    assert list(tmp_path.iterdir()) == []


CASES = {
    "experts": (*PPO, "algorithm.replay=off"),
    "dense": (*PPO, "algorithm.replay=off", "model.num_experts=0"),
    "balanced": ("algorithm.preset=ppo",),
    "narrow": ("algorithm.preset=ppo", "model.dtype=bfloat16"),
}


def learn_on_this_rank(folder, ranks):
    """Learn one sequence per rank; return values before and after of the first one, and the gradient norm."""
    found = {}
    for name, overrides in CASES.items():
        config = tiny_config(*overrides, ranks=ranks)
        folder.mkdir(exist_ok=True)
        policy = policy_of(config, folder)
        critic = build_critic(config.model, policy, folder, CPU)
        randomise_head(critic)
        optimizer = make_optimizer(critic, 1e-2)
        own = range(2) if ranks == 1 else [torch.distributed.get_rank()]
        before, loss = [], torch.zeros(())
        for seed in own:
            tokens = random_tokens(1, 12, seed=seed)
            positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
            said = token_values(critic, tokens, positions)
            before.append(said.detach().clone())
            loss = loss + (said - 1).square().sum() / 24
        (loss * ranks).backward()
        norm = clip_gradients(critic.parameters(), 100.0)
        optimizer.step()
        with torch.no_grad():
            after = token_values(critic, random_tokens(1, 12, seed=0), torch.arange(12)[None])
        found[name] = {"before": before, "norm": norm, "after": after}
    return found


def learn_on_two(folder):
    return learn_on_this_rank(folder, 2)


@pytest.mark.slow
def test_two_ranks_learn_values_as_one_does(tmp_path):
    alone = learn_on_this_rank(tmp_path / "one", 1)
    (tmp_path / "two").mkdir()
    both = on_ranks(2, learn_on_two, tmp_path / "two")
    for name in CASES:
        tolerance = {"rtol": 5e-2, "atol": 5e-2} if name == "narrow" else {"rtol": 1e-4, "atol": 1e-5}
        for rank in range(2):
            torch.testing.assert_close(
                both[rank][name]["before"][0], alone[name]["before"][rank], **tolerance, msg=name
            )
            torch.testing.assert_close(both[rank][name]["after"], alone[name]["after"], **tolerance, msg=name)
            assert both[rank][name]["norm"] == pytest.approx(
                alone[name]["norm"], rel=0.05 if name == "narrow" else 1e-4
            )


def passes_balanced_and_not(folder):
    """Return values, gradients and reference logits of this rank with and without balancing, and the skews."""
    found, rank = {}, torch.distributed.get_rank()
    tokens, positions = random_tokens(1, 40, seed=rank), torch.arange(40)[None]
    for sums in ("fast", "canonical"):
        config = tiny_config("algorithm.preset=ppo", f"plan.sums={sums}", ranks=2)
        policy = policy_of(config, folder)
        critic = build_critic(config.model, policy, folder, CPU)
        reference = reference_policy(policy, folder / "reference", CPU, settings=config.model, write=True)
        randomise_head(critic)
        settings = PlanSettings(sums=sums, slots=2, tolerance=0.0)
        for balanced in (False, True):
            critic.zero_grad()
            machine = cluster_preset("laptop", 2)
            with balancing(critic, settings, machine) if balanced else nullcontext() as live:
                values = token_values(critic, tokens, positions)
                values.square().sum().backward()
            with balancing(reference, settings, machine) if balanced else nullcontext() as frozen, torch.no_grad():
                logits = reference(input_ids=tokens, position_ids=positions, use_cache=False).logits
            found[sums, balanced] = {
                "values": values.detach(),
                "gradients": {name: p.grad.full_tensor() for name, p in critic.named_parameters()},
                "logits": logits,
                "skews": [(one.skew(), one.num_copies) for one in (live, frozen) if one is not None],
            }
        found[sums, "policy"] = policy.copy(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return found


@pytest.mark.slow
def test_balanced_values_and_gradients_equal_unbalanced(tmp_path):
    for found in on_ranks(2, passes_balanced_and_not, tmp_path):
        for sums in ("fast", "canonical"):
            plain, balanced = found[sums, False], found[sums, True]
            for part in ("values", "gradients", "logits"):
                torch.testing.assert_close(balanced[part], plain[part], rtol=1e-5, atol=1e-6, msg=f"{sums}: {part}")
            torch.testing.assert_close(balanced["logits"], found[sums, "policy"], rtol=1e-4, atol=1e-5)
        for skew, num_copies in found["fast", True]["skews"]:  # canonical sums move whole chunks, which few tokens lack
            assert num_copies > 0
            assert 1 <= skew.after < skew.before
