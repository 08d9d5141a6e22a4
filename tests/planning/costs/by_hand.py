"""An expert and a machine whose costs are easy to add up by hand."""

from relibra.cluster import Cluster, Link
from relibra.planning.costs.expert_shape import ExpertShape

EXPERT = ExpertShape(hidden=2, width=5)  # 30 parameters, 60 flops per token-slot, rows of 4 bytes


def cluster_for(plan, **changes):
    """Return a machine whose costs are easy to add up by hand: no latencies, round rates."""
    values = {
        "name": "by hand",
        "num_nodes": plan.num_nodes,
        "ranks_per_node": plan.ranks_per_node,
        "intra": Link(latency_seconds=0, bytes_per_second=10),
        "inter_send": Link(latency_seconds=0, bytes_per_second=2),
        "inter_receive": Link(latency_seconds=0, bytes_per_second=1),
        "host": Link(latency_seconds=0, bytes_per_second=5),
        "memory_bytes": 10**9,
        "peak_flops_per_second": 360.0,
        "efficiency": 0.5,
        "source": "made up",
        "label": "model",
    }
    return Cluster(**{**values, **changes})
