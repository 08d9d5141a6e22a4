"""What the trained model computes for the sequences of the canary; all ranks compute it together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray
from torch import nn

from relibra.replay import record_routing
from relibra.rl.model.sharding import evaluation_mode
from relibra.rl.rollout.served.client import ServerClient
from relibra.rl.run.ranks import broadcast_json, gather_several, wait_for_ranks


@dataclass(frozen=True)
class TrainedScores:
    """Log-probs of the trained model: of given tokens, and of those after them with and without temperature.

    experts_TLK   native routes of all tokens; None: a model without experts
    """

    given_T: ndarray
    tempered_S: ndarray
    raw_S: ndarray
    experts_TLK: ndarray | None


Scorer = Callable[[Sequence[tuple[tuple[int, ...], int]]], list[TrainedScores]]
"""Returns the scores of sequences, each as (tokens, how many of them are given)."""


@dataclass(frozen=True)
class TrainedScorer:
    """Scores sequences with a model that is sharded over the ranks; each rank scores some of them.

    client   of any server: they share temperature, and whether routes are compared
    begins   called before ranks score, when servers have answered the canary and may get other requests
    """

    model: nn.Module
    client: ServerClient
    begins: Callable[[], None] = lambda: None

    def __call__(self, sequences: Sequence[tuple[tuple[int, ...], int]]) -> list[TrainedScores]:
        """Return the scores of rank 0's sequences on all ranks; collective, without a deadline."""
        wait_for_ranks()
        self.begins()
        sequences, scores = broadcast_json(sequences), list[TrainedScores]()
        rank, num_ranks, routed = dist.get_rank(), dist.get_world_size(), self.client.routes is not None
        with evaluation_mode(self.model):
            for first in range(0, len(sequences), num_ranks):
                tokens, given = sequences[min(first + rank, len(sequences) - 1)]  # a sharded model needs all ranks
                own = score_sequence(
                    self.model, tokens, given=given, temperature=self.client.temperature, with_routes=routed
                )
                routes = np.zeros((0, 0, 0), dtype=np.int64) if own.experts_TLK is None else own.experts_TLK
                for given_T, tempered_S, raw_S, experts_TLK in gather_several(
                    [own.given_T, own.tempered_S, own.raw_S, routes]
                ):
                    scores.append(TrainedScores(given_T, tempered_S, raw_S, experts_TLK if routed else None))
        return scores[: len(sequences)]


@torch.no_grad()
def score_sequence(
    model: nn.Module, tokens: Sequence[int], *, given: int, temperature: float, with_routes: bool
) -> TrainedScores:
    """Return the log-probs of a sequence whose first tokens are given, and its native routes."""
    ids_1N = torch.tensor([tokens], device=next(model.parameters()).device)
    with record_routing(model) if with_routes else nullcontext() as recorder:
        logits_NV = model(input_ids=ids_1N, use_cache=False).logits[0, :-1].float()
    next_N1 = ids_1N[0, 1:, None]
    raw_N = logits_NV.log_softmax(-1).gather(1, next_N1)[:, 0].double().cpu().numpy()
    tempered_N = (logits_NV / temperature).log_softmax(-1).gather(1, next_N1)[:, 0].double().cpu().numpy()
    routes = None if recorder is None else recorder.take()[0].cpu().numpy()
    return TrainedScores(
        given_T=raw_N[: given - 1], tempered_S=tempered_N[given - 1 :], raw_S=raw_N[given - 1 :], experts_TLK=routes
    )
