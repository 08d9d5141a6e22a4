"""Small recordings, made on the spot."""

from __future__ import annotations

import numpy as np

from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def small_trace(seed: int = 0, *, num_layers: int = 3, num_experts: int = 8, rows: int = 20) -> RoutingTrace:
    shape = TraceShape(rows_per_sample=[rows] * 6, num_layers=num_layers, num_experts=num_experts, top_k=2)
    return domain_trace(shape, np.random.default_rng(seed), num_domains=2)


def metrics_row(step: int) -> dict[str, object]:
    return {
        "step": step,
        "reward": 0.1 * step,
        "reward_std": 0.2,
        "response_length": 50.0 + step,
        "response_length_p95": 80.0,
        "response_length_max": 100.0,
        "seconds": {"rollout": 2.0, "update": 1.0, "trace": 0.1},
    }
