"""Balanced: rank loads as even as copies can make them, at any cost. A reference for other balancers.

Homes are dealt heaviest first on the totals of the step, and then every (micro-batch, layer) gets new replicas anywhere
in the cluster, as if all ranks were one node. With one spare slot per rank an exactly even layout of one load always
exists when homes are free too (Walker's alias method); with homes fixed for the step the replicas of
`relibra.planning.levers.replication` come within a few token-slots of it.
"""

from __future__ import annotations

import numpy as np

from relibra.planning.balancer import PlacementRequest
from relibra.planning.levers.homes import heaviest_first
from relibra.planning.levers.replication import replicate
from relibra.planning.placement import Placement


def decide(request: PlacementRequest) -> Placement:
    """Make every rank's load as equal as its slots allow in each micro-batch and layer, copies on any node."""
    R, budget = request.cluster.num_ranks, request.budget
    load_MLE, home_LE = request.demand.load_MLE, request.previous.home_LE.copy()
    replica_MLRB, quota_MLRB = request.empty_slots()
    for layer in range(home_LE.shape[0]):
        if budget.move_homes:
            home_LE[layer] = heaviest_first(load_MLE[:, layer].sum(axis=0), R)
        load_ME = np.ascontiguousarray(load_MLE[:, layer])
        replica_MLRB[:, layer], quota_MLRB[:, layer] = replicate(load_ME, home_LE[layer], R, R, slots=request.slots)
    return request.placement(home_LE, replica_MLRB, quota_MLRB, scope="cluster")
