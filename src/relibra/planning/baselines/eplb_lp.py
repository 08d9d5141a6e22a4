"""EPLB's placement with an optimal split: the best that any dispatcher can do with those copies.

The placement comes from expert totals; only the split sees the micro-batches, as LPLB, MicroMoE (arXiv 2511.16947) and
SGLang's `lp` dispatch solve it. Ours is exact and in integers, theirs are approximate or fractional.
"""

from __future__ import annotations

from relibra.planning.balancer import PlacementRequest
from relibra.planning.balancers.resident import resident_placement
from relibra.planning.baselines.eplb import eplb_layers
from relibra.planning.placement import Placement


def decide(request: PlacementRequest) -> Placement:
    """Place by EPLB from `total_LE` and split each micro-batch so that its busiest rank is as low as possible."""
    return resident_placement(request, eplb_layers(request), "optimal")
