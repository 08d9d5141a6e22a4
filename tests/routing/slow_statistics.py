"""Loads and statistics of a whole trace at once, to compare those of pieces with."""

import numpy as np

from relibra.routing.demand import iterate_micro_batch_load


def micro_batch_load(trace, tokens):
    """Count the routes in runs of `tokens` consecutive rows, whatever the samples; the short rest is its own run.

    raises    TraceError when `tokens` < 1
    """
    none_0LE = np.zeros((0, trace.num_layers, trace.num_experts), dtype=np.int64)
    return np.concatenate([none_0LE, *iterate_micro_batch_load([trace], tokens)])


def cosine_to_mean(load_MLE):
    """Return the cosine between each micro-batch's expert load and the step's, per layer.

    1 means that the step as a whole predicts its micro-batches; the further below, the more there is to gain from
    planning each micro-batch by itself. Empty micro-batches count as 1.
    """
    step_LE = load_MLE.sum(axis=0, dtype=np.float64)
    dot = np.einsum("mle,le->ml", load_MLE, step_LE)
    norms = np.linalg.norm(load_MLE, axis=-1) * np.linalg.norm(step_LE, axis=-1)
    return np.divide(dot, norms, out=np.ones_like(dot), where=norms > 0)


def fluctuation(load_MLE):
    """Return how much an expert's share of a layer's load varies over micro-batches.

    Per layer: the coefficient of variation over non-empty micro-batches, averaged over experts with weight = load.
    """
    total_ML1 = load_MLE.sum(axis=-1, keepdims=True, dtype=np.float64)
    filled_ML1 = total_ML1 > 0
    share_MLE = np.divide(load_MLE, total_ML1, out=np.zeros(load_MLE.shape), where=filled_ML1)
    filled_L1 = np.maximum(1, filled_ML1.sum(axis=0))
    mean_LE = share_MLE.sum(axis=0) / filled_L1
    variance_LE = (filled_ML1 * (share_MLE - mean_LE) ** 2).sum(axis=0) / filled_L1
    return np.sqrt(variance_LE).sum(axis=-1)  # no division: the mean shares sum to 1
