"""Credit: the advantage of each response token, from rewards and values, and the mask of trained tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from numpy import ndarray
from torch import Tensor, nn

from relibra.replay.device_copies import download, wait_for_copies
from relibra.rl.algorithms.advantages import (
    egae,
    group_advantages,
    length_adaptive_lambda,
    mixed_groups,
    moments,
    whiten,
)
from relibra.rl.algorithms.value_loss import auroc, explained_variance, value_sums
from relibra.rl.batch.schedule import cut_into_runs
from relibra.rl.batch.token_batch import TokenBatch, make_token_batch
from relibra.rl.batch.training_batch import TrainingBatch
from relibra.rl.config.settings import AlgorithmSettings
from relibra.rl.model.critic import token_values
from relibra.rl.rollout.collect import length_penalty
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import gather_arrays, gather_several, largest_over_ranks, sum_over_ranks

GAMMA = 1.0
"""Discount per token: rewards come at the end of a response, wherever that is."""
LARGEST_ADVANTAGE = 10.0
"""Largest absolute advantage of `compute_gae`, whitened or not; larger ones are clamped."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Credit:
    """Advantages of this rank's response tokens, response after response.

    advantages_X   0 where not in the mask
    loss_mask_X    tokens that the policy trains on
    """

    advantages_X: Float32[Tensor, " X"]
    loss_mask_X: Bool[Tensor, " X"]


def groups_with_signal(
    responses: Sequence[Response], settings: AlgorithmSettings, *, max_response: int
) -> dict[int, bool]:
    """Return for each group with a reward, of all ranks, whether its rewards differ; collective.

    With `algorithm.group_filter` "mixed", rewards are the task's, without length penalties, which would make any group
    look mixed; else they are those that advantages are made from.
    """
    if settings.group_filter == "mixed":
        responses = [
            replace(one, reward=_task_reward(one, max_response, settings.overlong_buffer)) for one in responses
        ]
    _, group_id_S, reward_S = _gather_rewards(responses)
    return dict(zip(group_id_S.tolist(), mixed_groups(reward_S, group_id_S).tolist(), strict=True))


def filter_groups(
    responses: Sequence[Response], settings: AlgorithmSettings, signal: Mapping[int, bool]
) -> Bool[ndarray, " S"]:
    """Return the mask of this rank's responses that are trained on.

    Finished responses without a reward are not, nor those of groups that `algorithm.group_filter` drops.

    signal   by `groups_with_signal`
    """
    drops = settings.group_filter == "mixed"
    kept = [
        one.finish_reason is None or (one.reward is not None and (signal[one.group_id] or not drops))
        for one in responses
    ]
    return np.array(kept, dtype=bool)


def compute_group_advantages(responses: Sequence[Response], *, divide_by_std: bool) -> dict[int, float]:
    """Return the advantage of every response of all ranks within its group, by sample id; collective."""
    sample_ids, group_id_S, reward_S = _gather_rewards(responses)
    advantage_S = group_advantages(reward_S, group_id_S, divide_by_std=divide_by_std)
    return dict(zip(sample_ids, advantage_S.tolist(), strict=True))


def _gather_rewards(responses: Sequence[Response]) -> tuple[list[int], Tensor, Tensor]:
    """Return sample ids, group ids and rewards of all ranks' responses that have one, by sample id; collective."""
    own = [(one.sample_id, one.group_id, one.reward) for one in responses if one.reward is not None]
    rows = np.concatenate(gather_arrays(np.array(own, dtype=np.float64).reshape(-1, 3)))
    rows = rows[np.argsort(rows[:, 0], kind="stable")]  # sums of a group do not depend on the ranks
    sample_id_S, group_id_S = rows[:, :2].astype(np.int64).T
    return sample_id_S.tolist(), torch.from_numpy(group_id_S), torch.from_numpy(rows[:, 2].astype(np.float32))


def broadcast_advantages(responses: Sequence[Response], advantage_of: Mapping[int, float]) -> Credit:
    """Return credit that gives every token of a response the advantage of the response, by sample id."""
    advantage_S = torch.tensor([advantage_of[response.sample_id] for response in responses], dtype=torch.float32)
    advantages_X = advantage_S.repeat_interleave(torch.tensor([response.length for response in responses]).long())
    return Credit(advantages_X=advantages_X, loss_mask_X=torch.ones(len(advantages_X), dtype=torch.bool))


@torch.no_grad()
def compute_values(
    critic: nn.Module, responses: Sequence[Response], micro_batch_tokens: int, *, shares_prompts: bool = False
) -> Float32[Tensor, " X"]:
    """Return the value before each token of this rank's responses, response after response; collective."""
    values_X = torch.zeros(sum(response.length for response in responses))
    device, found = next(critic.parameters()).device, list[Tensor]()
    batches = make_value_batches(responses, range(len(responses)), micro_batch_tokens, shares_prompts=shares_prompts)
    for batch in batches:
        there = batch.to(device)
        found.append(download(token_values(critic, there.tokens_1T, there.position_1T)))
    wait_for_copies(device)
    for batch, values_T in zip(batches, found, strict=True):
        values_X[batch.token_X] = values_T[batch.row_X]
    return values_X


def record_values(responses: Sequence[Response], values_X: Float32[Tensor, " X"]) -> list[Response]:
    """Return the responses with the values of their last windows recorded; those of earlier windows stay."""
    pieces = values_X.split([response.length for response in responses])
    return [
        replace(response, values_r=np.where(response.in_window_r, values_r.numpy(), response.values_r))
        for response, values_r in zip(responses, pieces, strict=True)
    ]


def with_recorded_values(responses: Sequence[Response], earlier: Sequence[Response]) -> list[Response]:
    """Return responses with the values recorded for their earlier windows, on any rank; collective.

    With `rollout.ahead` a window may begin before the values of the window before it are recorded.

    earlier    responses of this rank that the step before left unfinished, with their recorded values
    """
    ids = np.array([(one.sample_id, one.length) for one in earlier], dtype=np.int64).reshape(-1, 2)
    values = np.concatenate([np.zeros(0, np.float32), *(one.values_r for one in earlier)])
    found: dict[int, ndarray] = {}
    for ids_S2, values_X in gather_several([ids, values]):
        found |= zip(ids_S2[:, 0].tolist(), np.split(values_X, np.cumsum(ids_S2[:, 1])[:-1]), strict=False)
    none = np.zeros(0, np.float32)
    pieces = [found.get(one.sample_id, none) for one in responses]
    return [
        replace(one, values_r=np.concatenate([piece, one.values_r[len(piece) :]]))
        for one, piece in zip(responses, pieces, strict=True)
    ]


def without_mixed_routes(credit: Credit, responses: Sequence[Response]) -> Credit:
    """Return credit that trains no token whose routes were recorded by later weights than those that sampled it."""
    mixed_X = np.concatenate([np.zeros(0, dtype=bool), *(response.mixed_r for response in responses)])
    return replace(credit, loss_mask_X=credit.loss_mask_X & ~torch.from_numpy(mixed_X))


def make_value_batches(
    responses: Sequence[Response], chosen: Sequence[int], micro_batch_tokens: int, *, shares_prompts: bool = False
) -> list[TokenBatch]:
    """Cut chosen responses of this rank into micro-batches of the value model, as many as other ranks have; collective.

    shares_prompts   responses of a group in the same micro-batch feed their prompt once
    """
    group_s = np.array([one.group_id for one in responses], dtype=np.int64) if shares_prompts else None
    shared = None
    if group_s is not None:
        chosen = sorted(chosen, key=lambda s: (group_s[s], s))
        follows = (np.diff(group_s[chosen], prepend=-1) == 0).tolist()  # another response of its group
        shared = [responses[s].prompt_length if behind else 0 for s, behind in zip(chosen, follows, strict=True)]
    runs = cut_into_runs([len(responses[s].tokens_n) - 1 for s in chosen], micro_batch_tokens, shared)
    runs += [[]] * (largest_over_ranks(len(runs)) - len(runs))
    return [make_token_batch(responses, [chosen[i] for i in run], piece_s=group_s) for run in runs]


def compute_gae(
    responses: Sequence[Response],
    values_X: Float32[Tensor, " X"],
    settings: AlgorithmSettings,
    *,
    window_tokens: int,
    train_unfinished: bool,
) -> Credit:
    """Return advantages of the tokens of the last windows, from values (EGAE, arXiv 2506.15050); collective.

    In arrays `[S, N]` a row of `N = window_tokens` columns holds the last window of a response.

    values_X           before each response token
    train_unfinished   train on unfinished responses too, whose reward is not known yet
    """
    S, N = len(responses), window_tokens
    finished_S = torch.tensor([response.finish_reason is not None for response in responses], dtype=torch.bool)
    length_S = torch.tensor([response.window_length for response in responses], dtype=torch.int64)
    window_X = torch.from_numpy(np.concatenate([np.zeros(0, dtype=bool), *(one.in_window_r for one in responses)]))
    column_N = torch.arange(N)
    inside_SN = column_N < length_S[:, None]
    values_SN, rewards_SN = torch.zeros(S, N), torch.zeros(S, N)
    values_SN[inside_SN] = values_X[window_X]
    for s, response in enumerate(responses):
        if finished_S[s]:
            assert response.reward is not None, f"sample {response.sample_id} is finished, so it has a reward"
            rewards_SN[s, length_S[s] - 1] = response.reward
    trained_S = torch.where(finished_S, length_S, (length_S - settings.tail_drop) * train_unfinished)
    mask_SN = column_N < trained_S[:, None]
    expected_length_S = torch.tensor([one.length for one in responses]) + torch.where(finished_S, 0, N / 2)
    advantage_SN = egae(
        values_SN, rewards_SN, length_S, finished_S, gamma=GAMMA, lambda_B=_lambda(expected_length_S.float(), settings)
    )
    if settings.whiten:
        advantage_SN = whiten(advantage_SN, mask_SN, sum_over_ranks(moments(advantage_SN, mask_SN)))
    advantage_SN = advantage_SN.clamp(-LARGEST_ADVANTAGE, LARGEST_ADVANTAGE) * mask_SN
    advantages_X, loss_mask_X = torch.zeros(len(window_X)), torch.zeros(len(window_X), dtype=torch.bool)
    advantages_X[window_X], loss_mask_X[window_X] = advantage_SN[inside_SN], mask_SN[inside_SN]
    return Credit(advantages_X=advantages_X, loss_mask_X=loss_mask_X)


def with_credit(batch: TrainingBatch, credit: Credit, *, max_response: int, overlong_buffer: int) -> TrainingBatch:
    """Return the batch with advantages, loss mask, and which responses are correct (`positive_B`)."""
    positive_S = torch.tensor(
        [is_correct(response, max_response, overlong_buffer) for response in batch.responses], dtype=torch.bool
    )
    return batch.filled(
        advantages_X=[credit.advantages_X[micro_batch.token_X] for micro_batch in batch.micro_batches],
        loss_mask_X=[credit.loss_mask_X[micro_batch.token_X] for micro_batch in batch.micro_batches],
        positive_B=[positive_S[micro_batch.samples_B] for micro_batch in batch.micro_batches],
    )


def variance_explained(responses: Sequence[Response], values_X: Float32[Tensor, " X"]) -> float | None:
    """Return the share of the variance of returns that the value model explains; collective.

    Over all response tokens of finished responses of all ranks; None if there are none, or all returns are equal.
    """
    finished_S = torch.tensor([response.finish_reason is not None for response in responses], dtype=torch.bool)
    lengths_S = torch.tensor([response.length for response in responses], dtype=torch.int64)
    finished_X = finished_S.repeat_interleave(lengths_S)
    returns_X = returns_of([one for one in responses if one.finish_reason is not None])
    share = explained_variance(sum_over_ranks(value_sums(values_X[finished_X], returns_X)))
    return None if math.isnan(share) else share


def returns_of(finished: Sequence[Response]) -> Float32[Tensor, " X"]:
    """Return for each token of finished responses its return, the reward at the end; response after response."""
    pieces = [np.zeros(0)]
    for response in finished:
        assert response.reward is not None, f"sample {response.sample_id} is finished, so it has a reward"
        pieces.append(np.full(response.length, response.reward))
    return torch.from_numpy(np.concatenate(pieces).astype(np.float32))


def auroc_at_cuts(
    responses: Sequence[Response], *, window_tokens: int, max_response: int, overlong_buffer: int
) -> float | None:
    """Return the AUROC of values at cuts as predictors of correct responses: 0.5 is chance; collective.

    Cuts end all earlier windows of responses, of any rank, that finished in this step; values date from those windows.
    None if all or no responses with cuts are correct. Only first and last windows may be shorter than `window_tokens`.
    """
    cuts = [
        (response.values_r[cut - 1], is_correct(response, max_response, overlong_buffer))
        for response in responses
        if response.finish_reason is not None
        for cut in range(response.length - response.window_length, 0, -window_tokens)
    ]
    value_C, correct_C = np.concatenate(gather_arrays(np.array(cuts, dtype=np.float64).reshape(-1, 2))).T
    found = auroc(value_C, correct_C > 0)
    return None if math.isnan(found) else found


def is_correct(response: Response, max_response: int, overlong_buffer: int) -> bool:
    """Return whether the task's reward, without the length penalty, is above 0."""
    return (_task_reward(response, max_response, overlong_buffer) or 0.0) > 0


def _task_reward(response: Response, max_response: int, overlong_buffer: int) -> float | None:
    penalty = length_penalty(response, max_response=max_response, overlong_buffer=overlong_buffer)
    return None if response.reward is None else response.reward - penalty


def _lambda(length_S: Float[Tensor, " S"], settings: AlgorithmSettings) -> Float[Tensor, " S"]:
    if isinstance(settings.lambda_policy, str):
        return length_adaptive_lambda(length_S, alpha=0.05, floor=0.95)
    return torch.full_like(length_S, settings.lambda_policy)
