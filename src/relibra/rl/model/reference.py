"""The reference policy of the KL term: a frozen copy of the policy before the first RL step."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from relibra.rl.model.policy import Policy, write_weights
from relibra.rl.model.sharding import loading, on_all_ranks, quiet_loading


def reference_policy(policy: Policy, folder: Path, device: torch.device, *, dtype: str, write: bool) -> nn.Module:
    """Return a full frozen copy on every rank, loaded from a folder; collective.

    dtype    of the policy's forward pass
    write    write the current policy into the folder first (a new run); False: the folder exists (a resumed run)
    raises   ConfigError, the same on all ranks, if the folder cannot be written or read
    """
    if write:
        write_weights(policy, folder)

    def load() -> nn.Module:
        with loading(f"the reference policy {str(folder)!r}"), quiet_loading():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    reference = on_all_ranks(load).to(device).eval().requires_grad_(False)
    policy.separate_sequences(reference)
    return reference
