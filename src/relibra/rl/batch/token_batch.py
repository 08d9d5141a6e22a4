"""`TokenBatch`: the responses of one rank in one micro-batch as flat tensors, with all that the losses read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray
from torch import Tensor

from relibra.replay import BatchRoutes
from relibra.replay.device_copies import upload_together
from relibra.rl.model.packed_sequences import find_segments, keep_segments
from relibra.rl.rollout.response import Response


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """`B` responses laid end to end, without padding: `T` tokens that are fed, `X` response tokens.

    The model separates responses by positions that begin again at 0. Responses of one prompt may follow one copy,
    each from the position after it (`find_segments`). Stages fill the fields that are None at first and return a new
    batch (`dataclasses.replace`).

    samples_B             index of each response among those of the rank. B = 0 is a filler micro-batch: it keeps
                          collectives aligned on ranks without responses
    tokens_1T             tokens that are fed: without the last token of a response, whose output is not needed
    position_1T           position of each token in its response
    shared_B              how many first tokens of each are not fed, because its prompt is fed before it
    row_X                 row whose output predicts the response token: that of the token before it
    target_X              the response tokens
    response_X            response of each, 0 .. B - 1
    token_X               index of each among all response tokens of the rank, response after response
    in_window_X           sampled in this step
    versions_X            of the weights that sampled each
    sampled_log_probs_X   under the sampler
    routes                experts to replay; None: the model routes by itself
    old_log_probs_X       under the trained weights before the update (`recompute`); None: those of the update's first
                          pass
    loss_mask_X           tokens that the surrogate is summed over
    trained_Y             index of those among the X tokens
    advantages_X          0 where not in the mask
    positive_B            finished responses with a task reward above 0
    ref_log_probs_X       under the reference policy; None: there is none
    old_values_X          of the value model when the token was sampled; nan: not recorded
    returns_X             targets of the value model
    """

    samples_B: Int[Tensor, " B"]
    tokens_1T: Int[Tensor, "1 T"]
    position_1T: Int[Tensor, "1 T"]
    shared_B: Int[Tensor, " B"]
    row_X: Int[Tensor, " X"]
    target_X: Int[Tensor, " X"]
    response_X: Int[Tensor, " X"]
    token_X: Int[Tensor, " X"]
    in_window_X: Bool[Tensor, " X"]
    versions_X: Int[Tensor, " X"]
    sampled_log_probs_X: Float[Tensor, " X"]
    routes: BatchRoutes | None = None
    old_log_probs_X: Float[Tensor, " X"] | None = None
    loss_mask_X: Bool[Tensor, " X"] | None = None
    trained_Y: Int[Tensor, " Y"] | None = None
    advantages_X: Float[Tensor, " X"] | None = None
    positive_B: Bool[Tensor, " B"] | None = None
    ref_log_probs_X: Float[Tensor, " X"] | None = None
    old_values_X: Float[Tensor, " X"] | None = None
    returns_X: Float[Tensor, " X"] | None = None

    @property
    def num_responses(self) -> int:
        """Return the number of responses, B."""
        return len(self.samples_B)

    def of_tokens(self, chosen_X: Bool[Tensor, " X"]) -> TokenBatch:
        """Return the batch with some of its response tokens; all tokens are fed as before. On the host."""
        tensors = self._tensors()
        picked: dict[str, Any] = {name: tensor[chosen_X] for name, tensor in tensors.items() if name.endswith("_X")}
        return replace(self, **picked)

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch of the host with its tensors on a device, without a wait; routes stay where they are."""
        named = self._tensors()
        moved: dict[str, Any] = dict(zip(named, upload_together(list(named.values()), device), strict=True))
        keep_segments(moved["position_1T"], find_segments(self.position_1T[0].numpy()))
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def make_token_batch(
    responses: Sequence[Response], chosen: Sequence[int], *, piece_s: Int[ndarray, " s"] | None = None
) -> TokenBatch:
    """Return the chosen responses of a rank as one batch; without any, a filler batch of one token.

    piece_s   of each response of the rank: those with an equal number share the rows of their prompt, and follow each
              other among the chosen; None: each has its own
    """
    lengths_S = np.array([response.length for response in responses], dtype=np.int64)
    first_token_S = np.cumsum(lengths_S) - lengths_S
    picked = [responses[s] for s in chosen]
    prompt_B = np.array([response.prompt_length for response in picked], dtype=np.int64)
    piece_B = np.arange(len(picked)) if piece_s is None else piece_s[np.asarray(chosen, dtype=np.int64)]
    leads_B = np.diff(piece_B, prepend=-1) != 0
    lead_B = np.maximum.accumulate(np.where(leads_B, np.arange(len(picked)), 0))  # whose prompt each one follows
    _check_prompts(picked, lead_B)
    shared_B = np.where(leads_B, 0, prompt_B)
    ends_B = np.array([len(response.tokens_n) - 1 for response in picked], dtype=np.int64)
    start_B = np.cumsum(ends_B - shared_B) - (ends_B - shared_B)
    after_prompt_B = start_B[lead_B] + prompt_B - 1  # the row that predicts the first token of a response
    rows = [
        [first, *range(start + prompt - shared, start + prompt - shared + one.length - 1)]
        for one, first, start, prompt, shared in zip(
            picked, after_prompt_B.tolist(), start_B.tolist(), prompt_B.tolist(), shared_B.tolist(), strict=True
        )
        if one.length
    ]
    fed = [slice(start, end) for start, end in zip(shared_B, ends_B, strict=True)]
    filler = np.zeros(0 if picked else 1, dtype=np.int64)  # a filler micro-batch feeds one token
    return TokenBatch(
        samples_B=torch.tensor(list(chosen), dtype=torch.int64),
        tokens_1T=_join([filler, *(one.tokens_n[part] for one, part in zip(picked, fed, strict=True))], np.int64)[None],
        position_1T=_join([filler, *(np.arange(part.start, part.stop) for part in fed)], np.int64)[None],
        shared_B=torch.from_numpy(shared_B),
        row_X=_join([np.array(one) for one in rows], np.int64),
        target_X=_join([one.tokens_n[one.prompt_length :] for one in picked], np.int64),
        response_X=torch.from_numpy(np.repeat(np.arange(len(picked)), [one.length for one in picked])),
        token_X=_join([first_token_S[s] + np.arange(lengths_S[s]) for s in chosen], np.int64),
        in_window_X=_join([one.in_window_r for one in picked], np.bool_),
        versions_X=_join([one.versions_r for one in picked], np.int32),
        sampled_log_probs_X=_join([one.log_probs_r for one in picked], np.float32),
    )


def _check_prompts(picked: Sequence[Response], lead_B: Int[ndarray, " B"]) -> None:
    """Assert that each response follows a prompt equal to its own."""
    for one, lead in zip(picked, lead_B.tolist(), strict=True):
        ours, theirs = (other.tokens_n[: other.prompt_length] for other in (one, picked[lead]))
        assert np.array_equal(ours, theirs), f"sample {one.sample_id}: another prompt than its group"


def with_routes(
    batch: TokenBatch,
    experts_B: Sequence[ndarray],
    responses: Sequence[Response],
    *,
    num_experts: int,
    layer_ids: Sequence[int],
) -> TokenBatch:
    """Return the batch with routes, one row per fed token; filler is unchanged.

    experts_B   routes `[m, L, K]` of each response, its prompt included. Of those that share one, the rows of the first
                stand for all
    responses   of the rank, for ids and weight versions
    """
    if not batch.num_responses:
        return batch
    picked = [responses[s] for s in batch.samples_B.tolist()]
    for one, experts_mLK in zip(picked, experts_B, strict=True):
        rows, fed = len(experts_mLK), len(one.tokens_n) - 1
        assert rows == fed, f"sample {one.sample_id}: {rows} rows of routes, {fed} fed tokens"
    shared = batch.shared_B.tolist()
    routes = BatchRoutes.of_rows(
        [experts_mLK[first:] for experts_mLK, first in zip(experts_B, shared, strict=True)],
        first_rows=shared,
        num_experts=num_experts,
        layer_ids=layer_ids,
        sample_ids=[one.sample_id for one in picked],
        weight_versions=[int(one.versions_r[-1]) for one in picked],
    )
    return replace(batch, routes=routes)


def compare_prompts(batch: TokenBatch, experts_B: Sequence[ndarray]) -> Int64[ndarray, " 2"]:
    """Return how many routes of (token, layer) were recorded again for shared prompts, and how many of them differ.

    experts_B   as of `with_routes`. Each is compared with that of the first response behind the prompt
    """
    found_2, first_mLK = np.zeros(2, dtype=np.int64), None
    for shared, experts_mLK in zip(batch.shared_B.tolist(), experts_B, strict=True):
        if not shared:
            first_mLK = experts_mLK
            continue
        assert first_mLK is not None, "the first response feeds its prompt"
        ours, theirs = experts_mLK[:shared], first_mLK[:shared]
        unlike = (ours != theirs).any(-1)  # only these are sorted: the order of choices does not matter
        differing = (np.sort(ours[unlike], -1) != np.sort(theirs[unlike], -1)).any(-1).sum()
        found_2 += [unlike.size, differing]
    return found_2


def _join(pieces: Sequence[ndarray | range], dtype: type[np.generic]) -> Tensor:
    joined = np.concatenate([np.zeros(0, dtype), *pieces]) if pieces else np.zeros(0, dtype)
    return torch.from_numpy(joined.astype(dtype, copy=False))
