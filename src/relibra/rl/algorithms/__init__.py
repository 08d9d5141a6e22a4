"""Losses, advantages and corrections as functions of tensors, each beside its paper.

In: tensors, and for the policy loss a `TokenBatch`. Out: tensors. Start with `policy_loss.py`.
"""

from relibra.errors import missing_packages

with missing_packages(__name__):
    import torch  # noqa: F401
