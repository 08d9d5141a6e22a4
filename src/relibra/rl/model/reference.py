"""The reference policy: the policy before the first RL step, which a divergence term holds the trained one near to."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from relibra.rl.model.policy import Policy, write_weights
from relibra.rl.model.sharding import agreed, loading, quiet_loading


def reference_policy(policy: Policy, folder: Path, device: torch.device, *, dtype: str, begun: bool) -> nn.Module:
    """Return a whole frozen copy on every rank, from a folder of the run that is written at the start; collective.

    dtype    that the policy computes in
    begun    the run goes on, and the folder is there
    raises   ConfigError, the same on all ranks, where the folder cannot be written or read
    """
    if not begun:
        write_weights(policy, folder)

    def load() -> nn.Module:
        with loading(f"the reference policy {str(folder)!r}"), quiet_loading():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    reference = agreed(load).to(device).eval().requires_grad_(False)
    policy.keep_sequences_apart(reference)
    return reference
