"""Small recordings, made on the spot."""

from __future__ import annotations

import numpy as np

from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.routing.trace import RoutingTrace

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def small_trace(seed: int = 0, *, num_layers: int = 3, num_experts: int = 8, rows: int = 20) -> RoutingTrace:
    shape = TraceShape(rows_per_sample=[rows] * 6, num_layers=num_layers, num_experts=num_experts, top_k=2)
    return domain_trace(shape, np.random.default_rng(seed), num_domains=2)


def sample_row(step: int, sample: int, **other: object) -> dict[str, object]:
    about = {"prompt": "7+5=", "response": "7+5=2", "reward": sample / 10, "tokens": 6, "finish": "stop", "windows": 1}
    return {"step": step, "sample": sample, **about, **other}


def full_row(step: int) -> dict[str, object]:
    """A row as a run with a value model, plans and evaluations writes it."""
    return metrics_row(step) | {
        "unfinished_share": 0.25,
        "cut_share": 0.5,
        "idle_share": 0.3,
        "k3_kl": 1e-4 * (step + 1),
        "probability_difference": 1e-5,
        "ess": 0.99,
        "weight_mean": 1.0,
        "router_disagreement": 0.0125,
        "entropy": 0.9,
        "clip_fraction": 0.01,
        "grad_norm": 1.5,
        "explained_variance": 0.4,
        "value_loss": None if step % 2 else 0.05,
        "rank_skew": 1.5,
        "planned_skew": 1.02,
        "plan_bound": 1.0,
        "known_rows": 0.75,
        "wait_seconds": {"counts": 0.5, "solve": 0.25},
        "replicas": 3,
        "moved_experts": 4,
        "evaluation": {"reward": 0.6, "response_length": 40.0} if step == 1 else None,
        "alarms": ["k3_kl is 0.2, harmless is 0 to 0.1: the sampler is another policy"] if step == 2 else [],
    }


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
