"""Samples of several tasks, each with a few favourite experts, as a trainer holds them."""

import numpy as np


def draw_samples(seed, samples, *, tasks=4, layers=3, experts=16, choices=2, longest=100):
    """Return lengths, and routes [n-1, layers, choices] of each sample; tasks follow each other as prompts do."""
    rng = np.random.default_rng(seed)
    taste_XLE = rng.gumbel(size=(tasks, layers, experts)) * 1.5
    lengths = rng.integers(longest // 4, longest + 1, samples)
    routes = []
    for s, length in enumerate(lengths):
        scores = taste_XLE[s * tasks // samples] + rng.gumbel(size=(length - 1, layers, experts))
        routes.append(np.argsort(-scores, axis=2)[:, :, :choices].astype(np.int32))
    return lengths.tolist(), routes
