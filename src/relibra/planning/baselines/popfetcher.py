"""After PopFetcher (ATC'25; no public code): hot experts of the next layer are fetched during other computation.

Sees history. A rank fetches a remote expert when the tokens that it expects to send there outweigh the weights, and
computes its own tokens for that expert itself. Different from the paper: loads are predicted from past totals alone
(evenly over source ranks and micro-batches), without the correlation between layers, so every rank fetches the same
experts; the spare slots stand for the time that fetching may take.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.planning.balancer import PlacementRequest
from relibra.planning.placement import Placement


def decide(request: PlacementRequest) -> Placement:
    """Fetch the most popular remote experts to every rank and keep the rank's own tokens for them local."""
    home_LE = request.previous.home_LE.copy()
    replica_MLRB, quota_MLRB = request.empty_slots()
    tokens_MLRE = request.demand.tokens_MLRE
    M, L, R, B = replica_MLRB.shape
    seen = max(1, M if request.history_MLE is None else len(request.history_MLE))
    for layer in range(L):
        expected_E = request.total_LE[layer] / seen / R  # per micro-batch and rank
        for rank in range(R):
            fetched = _popular(request, expected_E, np.flatnonzero(home_LE[layer] != rank))[:B]
            own_MX = tokens_MLRE[:, layer, rank, fetched]
            replica_MLRB[:, layer, rank, : len(fetched)] = np.where(own_MX > 0, fetched, -1)
            quota_MLRB[:, layer, rank, : len(fetched)] = own_MX
    return request.placement(home_LE, replica_MLRB, quota_MLRB, scope="cluster")


def _popular(
    request: PlacementRequest, expected_E: Float64[ndarray, " E"], remote: Int64[ndarray, " X"]
) -> Int64[ndarray, " X2"]:
    """Return the remote experts whose tokens outweigh their weights, most tokens first.

    A token travels four times (there and back, forward and backward), an expert's weights three times (forward,
    backward, and the gradient home).
    """
    by_tokens = remote[np.argsort(-expected_E[remote], kind="stable")]
    pays = 4 * expected_E[by_tokens] * request.expert.row_bytes > 3 * request.expert.weight_bytes
    return by_tokens[pays]
