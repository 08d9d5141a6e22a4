"""From rollouts to weights: recompute, credit with or without values, updates of value model and policy.

In: a `TrainingBatch`. Out: new weights and sums for metrics. Start with `policy_update.py`, which calls the loss
(`algorithms/loss.py`) and sets the learning rate (`set_learning_rate` in `model/optimizer.py`).
"""

from relibra.errors import missing_packages

with missing_packages(__name__):
    import torch  # noqa: F401
