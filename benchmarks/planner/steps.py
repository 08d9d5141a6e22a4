"""Made-up steps for the planner's benchmarks: loads with known properties, drawn without routing single tokens."""

from __future__ import annotations

import numpy as np

from relibra import Demand, ScheduledDemand

DOMAINS = 3
SPREAD = 0.75
"""Of the log-popularity, by layer and by domain: a static skew of 1.7 on 16 ranks, 2.4 on 32, 3.9 on 64."""


def domain_step(
    *,
    ranks: int,
    layers: int,
    experts: int,
    micro_batches: int,
    samples: int,
    tokens: int,
    seed: int,
    top_k: int = 8,
    step: int = 0,
) -> ScheduledDemand:
    """Draw a step of a mixture of domains: an expert's popularity is a log-normal of layer, domain and sample.

    samples   whole samples of about `tokens` tokens (log-normal, standard deviation a quarter), dealt to micro-batches
              and source ranks in turn
    step      another one draws other samples of the same model and domains
    """
    model = np.random.default_rng(seed)
    layer_LE = model.normal(scale=SPREAD, size=(layers, experts))
    domain_DLE = model.normal(scale=SPREAD, size=(DOMAINS, layers, experts))
    rng = np.random.default_rng([seed, step])
    length_S = np.maximum(1, tokens * rng.lognormal(0, 0.25, samples)).astype(np.int64)
    counts_SLE = np.empty((samples, layers, experts), dtype=np.int32)
    for s, domain in enumerate(rng.integers(DOMAINS, size=samples)):
        weight_LE = np.exp(layer_LE + domain_DLE[domain] + rng.normal(scale=0.3, size=(layers, experts)))
        counts_SLE[s] = rng.multinomial(length_S[s] * top_k, at_most(weight_LE, 1 / top_k))
    demand = Demand(
        counts_SLE=counts_SLE, layer_ids=np.arange(layers, dtype=np.int32), sample_ids=np.arange(samples), top_k=top_k
    )
    place = np.arange(samples)
    return demand.with_schedule(place % micro_batches, place // micro_batches % ranks, ranks)


def skewed_load(*, ranks: int, experts: int, top_k: int, tokens: int, rank_skew: float, seed: int, draws: int):
    """Draw loads [draws, E] and homes [E] after UltraEP's generator (arXiv 2606.04101).

    Expert weight = (1 + rank)^-a (1 + place in the rank)^-4; `a` is bisected until the probabilities that a token picks
    an expert give the rank skew asked for. They follow from the weights as 1 - exp(-c w), with c such that they sum to
    `top_k`, which is what drawing without replacement gives in large groups (Rosen 1997).
    """
    home_E = np.repeat(np.arange(ranks), experts // ranks)
    place_E = np.tile(np.arange(experts // ranks), ranks)

    def picked(slope: float) -> np.ndarray:
        return _inclusion((1.0 + home_E) ** -slope * (1.0 + place_E) ** -4.0, top_k)

    low, high = 0.0, 8.0
    for _ in range(50):
        slope = (low + high) / 2
        rank_R = np.bincount(home_E, picked(slope))
        low, high = (slope, high) if rank_R.max() / rank_R.mean() < rank_skew else (low, slope)
    rng = np.random.default_rng(seed)
    shuffled_R = rng.permutation(ranks)
    return rng.binomial(ranks * tokens, picked(slope), size=(draws, experts)), shuffled_R[home_E]


def _inclusion(weight_E: np.ndarray, top_k: int) -> np.ndarray:
    low, high = -60.0, 60.0
    for _ in range(100):
        c = (low + high) / 2
        low, high = (c, high) if (1 - np.exp(-np.exp(c) * weight_E)).sum() < top_k else (low, c)
    return 1 - np.exp(-np.exp(c) * weight_E)


def at_most(weight_LE: np.ndarray, share: float) -> np.ndarray:
    """Scale rows to sum 1 with no entry above `share`: a token picks an expert once at most."""
    p_LE = weight_LE / weight_LE.sum(axis=1, keepdims=True)
    for _ in range(50):
        over_LE = p_LE > share
        if not over_LE.any():
            break
        free_L1 = 1 - share * over_LE.sum(axis=1, keepdims=True)
        p_LE = np.where(over_LE, share, p_LE * free_L1 / np.where(over_LE, 0, p_LE).sum(axis=1, keepdims=True))
    return p_LE / p_LE.sum(axis=1, keepdims=True)
