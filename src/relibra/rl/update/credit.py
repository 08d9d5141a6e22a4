"""Credit: from rewards and expected values to the advantage of every response token, and which tokens are trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from numpy import ndarray

from relibra.rl.algorithms.advantages import (
    egae,
    group_advantages,
    length_adaptive_lambda,
    mixed_groups,
    moments,
    whiten,
)
from relibra.rl.algorithms.value_loss import auroc, explained_variance, value_sums
from relibra.rl.config.run_config import RunConfig
from relibra.rl.config.settings import AlgorithmSettings
from relibra.rl.rollout.collect import length_penalty
from relibra.rl.rollout.response import Response
from relibra.rl.run.ranks import gather_arrays, gather_several, sum_over_ranks
from relibra.rl.update.values import discounted_returns


@dataclass(frozen=True, kw_only=True, eq=False)
class Credit:
    """Advantages of this rank's responses, one array over the response tokens of each.

    advantage_Sr   0 where not trained
    trained_Sr     tokens that the policy trains on
    """

    advantage_Sr: list[Float32[ndarray, " _"]]
    trained_Sr: list[Bool[ndarray, " _"]]


def useful_groups(responses: Sequence[Response], config: RunConfig) -> Bool[ndarray, " S"]:
    """Say which of this rank's responses the group filter leaves; collective.

    What counts is the task's reward: penalties for length would make any group look mixed.
    """
    if config.algorithm.group_filter == "off":
        return np.ones(len(responses), dtype=bool)
    rated = _rated_of_all([_by_task(response, config) for response in responses])
    mixed = mixed_groups(torch.from_numpy(rated.reward_S), torch.from_numpy(rated.group_id_S)).numpy()
    useless = set(rated.sample_id_S[~mixed].tolist())
    return np.array([response.sample_id not in useless for response in responses], dtype=bool)


def compare_groups(responses: Sequence[Response], config: RunConfig) -> dict[int, float]:
    """Return the advantage of every response of all ranks, by sample id, within its group; collective."""
    rated = _rated_of_all(responses)
    advantage_S = group_advantages(
        torch.from_numpy(rated.reward_S),
        torch.from_numpy(rated.group_id_S),
        divide_by_std=config.algorithm.divide_by_std,
    )
    return dict(zip(rated.sample_id_S.tolist(), advantage_S.tolist(), strict=True))


def _by_task(response: Response, config: RunConfig) -> Response:
    if response.reward is None:
        return response
    return replace(response, reward=response.reward - _penalty(response, config))


class _Rated(NamedTuple):
    """Rewards of the finished responses of all ranks, by sample id."""

    sample_id_S: Int64[ndarray, " S"]
    group_id_S: Int64[ndarray, " S"]
    reward_S: Float32[ndarray, " S"]


def _rated_of_all(responses: Sequence[Response]) -> _Rated:
    finished = [response for response in responses if response.finish_reason is not None]
    own = _Rated(
        np.array([response.sample_id for response in finished], dtype=np.int64),
        np.array([response.group_id for response in finished], dtype=np.int64),
        np.array([response.reward for response in finished], dtype=np.float32),
    )
    every = _Rated(*map(np.concatenate, zip(*gather_several(own), strict=True)))
    order = np.argsort(every.sample_id_S, kind="stable")  # sums of a group do not depend on who sampled it
    return _Rated(*(column[order] for column in every))


def spread(responses: Sequence[Response], advantage_of: Mapping[int, float]) -> Credit:
    """Give every token of a response the advantage of the response."""
    return Credit(
        advantage_Sr=[np.full(r.length, advantage_of[r.sample_id], dtype=np.float32) for r in responses],
        trained_Sr=[np.ones(r.length, dtype=bool) for r in responses],
    )


def estimate(
    responses: Sequence[Response],
    expected_Sr: Sequence[Float32[ndarray, " _"]],
    config: RunConfig,
    *,
    train_unfinished: bool,
) -> Credit:
    """Estimate advantages of the tokens of the last window from a value model (EGAE, arXiv 2506.15050); collective.

    expected_Sr        values before each response token and after the last
    train_unfinished   the value model is good enough to train on responses whose reward nobody knows
    """
    settings, window = config.algorithm, config.rollout.window_tokens
    S = len(responses)
    values_SN1, rewards_SN = np.zeros((S, window + 1), np.float32), np.zeros((S, window), np.float32)
    trained_SN = np.zeros((S, window), dtype=bool)
    finished_S = np.array([response.finish_reason is not None for response in responses], dtype=bool)
    length_S = np.array([response.window_length for response in responses], dtype=np.int64)
    for s, response in enumerate(responses):
        values_SN1[s, : length_S[s] + 1] = expected_Sr[s][response.length - length_S[s] :]
        if finished_S[s]:
            assert response.reward is not None, f"sample {response.sample_id} is finished, so it has a reward"
            rewards_SN[s, length_S[s] - 1] = response.reward
        drop = 0 if finished_S[s] else settings.tail_drop
        trained_SN[s, : max(0, length_S[s] - drop)] = finished_S[s] or train_unfinished
    total_S = np.array([response.length for response in responses]) + np.where(finished_S, 0, window / 2)
    advantage_SN = egae(
        torch.from_numpy(values_SN1),
        torch.from_numpy(rewards_SN),
        torch.from_numpy(length_S),
        torch.from_numpy(finished_S),
        gamma=settings.gamma,
        lambda_B=_lambda(torch.from_numpy(total_S.astype(np.float32)), settings),
        bootstrap=settings.bootstrap,
    )
    mask_SN = torch.from_numpy(trained_SN)
    if settings.whiten:
        advantage_SN = whiten(advantage_SN, mask_SN, sum_over_ranks(moments(advantage_SN, mask_SN)))
    advantage_SN = advantage_SN.clamp(-settings.advantage_clamp, settings.advantage_clamp) * mask_SN
    return Credit(
        advantage_Sr=_behind_earlier_windows(responses, advantage_SN.numpy()),
        trained_Sr=_behind_earlier_windows(responses, trained_SN),
    )


def variance_explained(
    responses: Sequence[Response], expected_Sr: Sequence[Float32[ndarray, " _"]], gamma: float
) -> float | None:
    """Return the share of the variance of returns that the value model explains; collective.

    Over all response tokens of finished responses of all ranks; None where none finished, or all returns are alike.
    """
    finished = [s for s, response in enumerate(responses) if response.finish_reason is not None]
    values = np.concatenate([np.zeros(0, np.float32), *(expected_Sr[s][:-1] for s in finished)])
    returns = np.concatenate(
        [np.zeros(0), *(discounted_returns(responses[s], gamma) for s in finished)], dtype=np.float32
    )
    share = explained_variance(sum_over_ranks(value_sums(torch.from_numpy(values), torch.from_numpy(returns))))
    return None if math.isnan(share) else share


def auroc_at_cuts(responses: Sequence[Response], config: RunConfig) -> float | None:
    """Return how well the value at a cut told whether the response would end right: 0.5 is chance; collective.

    Over all cuts, at the ends of earlier windows, of the responses of all ranks that finished in this step, with what
    the value model said then; None where all of them ended right, or none did. No two windows are of one version.
    """
    cuts = [
        (response.values_r[cut - 1], is_correct(response, config))
        for response in responses
        if response.finish_reason is not None
        for cut in np.flatnonzero(np.diff(response.versions_r)) + 1
    ]
    value_C, correct_C = np.concatenate(gather_arrays(np.array(cuts, dtype=np.float64).reshape(-1, 2))).T
    found = auroc(value_C, correct_C > 0)
    return None if math.isnan(found) else found


def is_correct(response: Response, config: RunConfig) -> bool:
    """Say whether the task gave a reward above 0, whatever the length cost."""
    return response.reward is not None and response.reward - _penalty(response, config) > 0


def _penalty(response: Response, config: RunConfig) -> float:
    return length_penalty(
        response, max_response=config.rollout.max_response, overlong_buffer=config.algorithm.overlong_buffer
    )


def _lambda(length_S: Float[torch.Tensor, " S"], settings: AlgorithmSettings) -> Float[torch.Tensor, " S"]:
    if settings.lambda_mode == "fixed":
        return torch.full_like(length_S, settings.lambda_policy)
    return length_adaptive_lambda(length_S, alpha=settings.lambda_alpha, floor=settings.lambda_policy)


def _behind_earlier_windows(responses: Sequence[Response], values_SN: ndarray) -> list[ndarray]:
    """Lay rows over the last window behind zeros for the tokens of earlier ones."""
    return [
        np.concatenate(
            [
                np.zeros(response.length - response.window_length, values_SN.dtype),
                values_SN[s, : response.window_length],
            ]
        )
        for s, response in enumerate(responses)
    ]
