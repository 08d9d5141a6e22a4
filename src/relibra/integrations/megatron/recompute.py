"""`recompute_flags`: a choice of kept activations as flags of Megatron-LM."""

from __future__ import annotations

import numpy as np

from relibra.errors import ConfigError
from relibra.planning.activation_choice import ALL, ATTENTION, ActivationChoice


def recompute_flags(choice: ActivationChoice, pipeline_stages: int = 1) -> list[str]:
    """Return the flags that keep at most what a choice keeps; none where all layers keep all.

    Megatron has one kind for all layers: "full" recomputes the first layers of each stage, as many in each, and
    "selective" a module of every layer. Where some layers keep nothing, so do those that keep their attention.

    raises   ConfigError where the stages do not divide the layers
    """
    if len(choice.option_L) % pipeline_stages:
        raise ConfigError(
            f"{len(choice.option_L)} layers in {pipeline_stages} pipeline stages: choose a number that divides them"
        )
    kinds = set(choice.option_L)
    if kinds == {ALL}:
        return []
    if ATTENTION in kinds and kinds <= {ATTENTION, ALL}:
        return ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
    keeps_all_DL = (np.array(choice.option_L) == ALL).reshape(pipeline_stages, -1)
    number = int((~keeps_all_DL).sum(axis=1).max())
    return ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", str(number)]
