"""What the value model is asked, and what it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from relibra.rl.batch.step_plan import gather_table, make_step_schedule, own_mini_batches
from relibra.rl.config.run_config import load_config
from relibra.rl.model.optimizer import StepCount
from relibra.rl.update.credit import compute_values
from relibra.rl.update.value_update import update_values
from tests.rl.made_up import mini_batch_of, response_of, responses_of

pytestmark = pytest.mark.usefixtures("group")


class Running(nn.Module):
    """A value model that says, after each token, the sum of a number per token since the response began."""

    def __init__(self, seed=0):
        super().__init__()
        self.worth = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(seed)) / 10)

    def forward(self, input_ids, position_ids, use_cache):
        assert not use_cache
        starts = (position_ids[0] == 0).cumsum(0)
        sums_T = self.worth[input_ids[0]].cumsum(0)
        first_T = torch.stack([sums_T[(starts == s).nonzero()[0, 0]] for s in starts.tolist()])
        first_token_T = torch.stack([input_ids[0][(starts == s).nonzero()[0, 0]] for s in starts.tolist()])

        class Output:
            logits = (sums_T - first_T + self.worth[first_token_T])[None, :, None]

        return Output()


def config_of(*overrides):
    return load_config(
        None,
        [
            "algorithm.preset=ppo",
            "rollout.prompts_per_step=4",
            "rollout.responses_per_prompt=2",
            "update.mini_batches=2",
            *overrides,
        ],
    )


def said_of(critic, response):
    """Return what the value model says after every token, one response by itself; the slow reference."""
    return critic.worth.detach().numpy()[response.tokens_n].cumsum()


@pytest.mark.parametrize("tokens", [1, 12, 1000])
def test_a_value_stands_before_each_token(tokens):
    critic = Running()
    responses = [*responses_of([4, 1, 6, 3], routed=False), response_of(4, earlier=5, length=2, routed=False)]
    pieces = compute_values(critic, responses, tokens).split([response.length for response in responses])
    for response, before_r in zip(responses, pieces, strict=True):
        expected_r = said_of(critic, response)[response.prompt_length - 1 : -1]
        assert before_r.tolist() == pytest.approx(expected_r, abs=1e-5)


def with_values(responses, critic, shift=0.0):
    for response in responses:
        response.values_r[:] = said_of(critic, response)[response.prompt_length - 1 : -1] + shift
    return responses


def learn(critic, responses, config, step=0):
    optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
    loss, count, skipped = update_values(
        critic,
        optimizer,
        responses,
        config.critic,
        config.update,
        by_group=False,
        seed=0,
        responses_per_step=config.rollout.responses_per_step,
        count=StepCount(made=step),
        num_ranks=1,
    )
    assert not skipped
    return loss, count.made - step


def loss_by_hand(critic, part, config, nominal):
    """Sum the clipped value loss of a mini-batch token by token; the slow reference."""
    total = torch.zeros(())
    for response in part:
        said_n = critic.worth[torch.from_numpy(response.tokens_n)].cumsum(0)
        for t in range(response.length):
            value = said_n[response.prompt_length - 1 + t]
            target, old = response.reward, float(response.values_r[t])
            cut = value.clamp(old - 0.5, old + 0.6)
            total = total + torch.maximum((value - target) ** 2, (cut - target) ** 2) / response.length / nominal
    return total


@pytest.mark.parametrize("tokens", [1, 1000])
def test_value_model_steps_once_per_mini_batch_towards_rewards(tokens):
    config = config_of(
        f"update.micro_batch_tokens={tokens}",
        "critic.learning_rate=0.1",
        "update.max_grad_norm=0.5",
    )
    critic, mirror = Running(), Running()
    responses = with_values(responses_of([4, 1, 6, 3, 2], routed=False), critic, shift=0.4)
    for s, response in enumerate(responses):
        object.__setattr__(response, "reward", float(s % 2))
    loss, steps = learn(critic, responses, config)
    losses = []
    for chosen in own_mini_batches(responses, 2, by_group=False, seed=0):
        part = [responses[s] for s in chosen]
        expected = loss_by_hand(mirror, part, config, nominal=4)
        mirror.worth.grad = None
        expected.backward()
        norm = float(mirror.worth.grad.norm())
        with torch.no_grad():
            mirror.worth -= 0.1 * mirror.worth.grad * min(1.0, 0.5 / (norm + 1e-6))
        losses.append(float(expected.detach()))
    assert steps == 2
    assert loss == pytest.approx(np.mean(losses), abs=1e-5)
    torch.testing.assert_close(critic.worth, mirror.worth, atol=1e-5, rtol=0)


def test_mini_batches_are_those_that_the_policy_would_have():
    """By number the oldest responses, which are the longest, would be in the first at each step."""
    first, responses = [], responses_of([9, 3, 2, 2, 1, 4], routed=False)
    for start in range(0, 120, 6):
        step = [replace(response, sample_id=start + response.sample_id) for response in responses]
        config = config_of("update.mini_batches=3")
        parts = own_mini_batches(step, 3, by_group=False, seed=0)
        mini_batch_S = mini_batch_of(make_step_schedule(gather_table(step), config.update, by_group=False, seed=0))
        assert [mini_batch_S[part].tolist() for part in parts] == [[0, 0], [1, 1], [2, 2]]
        first.append(parts[0].tolist())
    share = np.mean([0 in part for part in first])
    assert 0.1 < share < 0.7, "the oldest is in the first mini-batch as often as any"


def test_the_learning_rate_rises_over_the_first_steps():
    critic, moved = Running(), []
    responses = with_values([response_of(0, length=3, routed=False)], critic)
    config = config_of("update.lr_warmup_steps=4", "update.mini_batches=1", "critic.learning_rate=0.01")
    for step in (0, 1, 3, 9):
        fresh = Running()
        assert learn(fresh, responses, config, step)[1] == 1
        moved.append(float((fresh.worth - critic.worth).detach().norm()))
    assert [size / moved[0] for size in moved] == pytest.approx([1, 2, 4, 4], rel=1e-4)


def test_nothing_finished_makes_no_step():
    critic = Running()
    assert learn(critic, [], config_of()) == (0.0, 0)
    assert torch.equal(critic.worth, Running().worth)


def test_fewer_responses_than_mini_batches_make_one_step_each():
    critic = Running()
    responses = with_values(responses_of([2, 3], routed=False), critic)
    assert learn(critic, responses, config_of("update.mini_batches=8"))[1] == 2


def test_a_value_that_was_never_recorded_has_no_cut():
    critic, other = Running(), Running()
    unknown = [response_of(0, length=3, routed=False)]
    assert np.isnan(unknown[0].values_r).all()
    learn(critic, unknown, config_of("update.mini_batches=1"))
    learn(other, with_values([response_of(0, length=3, routed=False)], other), config_of("update.mini_batches=1"))
    torch.testing.assert_close(critic.worth, other.worth)
