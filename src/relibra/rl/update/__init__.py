"""From rollouts to weights: recompute, values, credit, policy update.

In: a `TrainingBatch`. Out: new weights and sums for metrics. Start with `policy_update.py`.
"""
