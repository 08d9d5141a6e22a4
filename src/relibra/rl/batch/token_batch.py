"""Micro-batches: responses laid end to end, without padding, with the routes that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from numpy import ndarray
from torch import Tensor

from relibra.replay import BatchRoutes
from relibra.rl.rollout.response import Response
from relibra.routing.trace import RoutingTrace


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Responses that go through a model together: `B` of them in a row of `T` tokens.

    The model tells them apart by positions that begin again at 0.

    samples_B     which of the rank's responses; none: filler, for a rank that keeps its peers company
    tokens_1T     what is fed: without the last token of a response, whose output nobody needs (or with it: `whole`)
    position_1T   place of each token in its response
    row_X         rows whose output belongs to a response token, X of them: that of the token before it
    target_X      the response tokens
    response_X    the response of each, as an index into `samples_B`
    after_B       with `whole`: the row of the last token of each response
    routes        experts to replay; None: the model routes itself
    """

    samples_B: Int64[ndarray, " B"]
    tokens_1T: Int[Tensor, "1 T"]
    position_1T: Int[Tensor, "1 T"]
    row_X: Int[Tensor, " X"]
    target_X: Int[Tensor, " X"]
    response_X: Int[Tensor, " X"]
    after_B: Int[Tensor, " B"]
    routes: BatchRoutes | None

    @property
    def num_responses(self) -> int:
        """Responses in it, B."""
        return len(self.samples_B)

    def gather(self, values_Sr: Sequence[Shaped[ndarray, " _"]]) -> Float[Tensor, " X"]:
        """Pick the value of each response token from one array per response of the rank, as float32."""
        pieces = [values_Sr[s] for s in self.samples_B]
        joined = np.concatenate(pieces) if pieces else np.zeros(0)
        return torch.from_numpy(joined.astype(np.float32))

    def scatter(self, values_X: Float[Tensor, " X"], into_Sr: list[Float[ndarray, " _"]]) -> None:
        """Put values of response tokens where the arrays of their responses stand: the reverse of `gather`."""
        lengths = torch.bincount(self.response_X, minlength=self.num_responses).tolist()
        pieces = values_X.detach().float().cpu().split(lengths)
        for s, piece in zip(self.samples_B.tolist(), pieces, strict=True):
            into_Sr[s] = piece.numpy()


def make_micro_batch(
    responses: Sequence[Response], chosen: Sequence[int], trace: RoutingTrace | None, *, whole: bool = False
) -> MicroBatch:
    """Lay out the chosen responses; none of them: filler.

    trace    routes of all `responses`, in their order, without the rows of last tokens; None: the model routes itself
    whole    feed last tokens too
    raises   TraceError when routes and tokens disagree
    """
    if not len(chosen):
        return _filler()
    picked = [responses[s] for s in chosen]
    fed = [len(response.tokens_n) - (not whole) for response in picked]
    starts = np.cumsum([0, *fed])[:-1]
    tokens_T = np.concatenate([response.tokens_n[:length] for response, length in zip(picked, fed, strict=True)])
    routes = None
    if trace is not None:
        routes = BatchRoutes.packed(trace.select(list(chosen)), input_ids_T=torch.from_numpy(tokens_T), lengths=fed)
    lengths = [response.length for response in picked]
    first = [start + response.prompt_length - 1 for start, response in zip(starts, picked, strict=True)]
    return MicroBatch(
        samples_B=np.asarray(chosen, dtype=np.int64),
        tokens_1T=torch.from_numpy(tokens_T)[None],
        position_1T=torch.from_numpy(np.concatenate([np.arange(length) for length in fed]))[None],
        row_X=torch.from_numpy(
            np.concatenate([np.arange(row, row + length) for row, length in zip(first, lengths, strict=True)])
        ),
        target_X=torch.from_numpy(np.concatenate([response.tokens_n[response.prompt_length :] for response in picked])),
        response_X=torch.from_numpy(np.repeat(np.arange(len(picked)), lengths)),
        after_B=torch.from_numpy(starts + np.array(fed) - 1),
        routes=routes,
    )


def routes_of(
    responses: Sequence[Response], *, num_experts: int, layer_ids: Sequence[int], source: str
) -> RoutingTrace | None:
    """Gather the rows of all tokens that are fed in training, none of them a last token; None without responses.

    raises    TraceError when an engine delivered illegal routes
    """
    if not responses:
        return None
    experts = [response.experts_nLK for response in responses]
    return RoutingTrace.from_samples(
        [experts_nLK[:-1] for experts_nLK in experts if experts_nLK is not None],
        num_experts=num_experts,
        layer_ids=layer_ids,
        tokens=[response.tokens_n[:-1] for response in responses],
        sample_ids=[response.sample_id for response in responses],
        group_ids=[response.group_id for response in responses],
        prompt_lengths=[response.prompt_length for response in responses],
        weight_versions=[int(response.versions_r[-1]) for response in responses],
        source=source,
    )


def _filler() -> MicroBatch:
    """Return a micro-batch that trains nothing."""
    none_X = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        samples_B=np.zeros(0, dtype=np.int64),
        tokens_1T=torch.zeros(1, 1, dtype=torch.int64),
        position_1T=torch.zeros(1, 1, dtype=torch.int64),
        row_X=none_X,
        target_X=none_X,
        response_X=none_X,
        after_B=none_X,
        routes=None,
    )
