"""The critic: starts as the policy, and says what a response is worth before each of its tokens."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from transformers.modeling_layers import GenericForTokenClassification

from relibra.rl.config.run_config import RunConfig
from relibra.rl.model.policy import Policy, write_weights
from relibra.rl.model.sharding import load_sharded, without_randomness


def build_critic(config: RunConfig, policy: Policy, folder: Path, device: torch.device) -> nn.Module | None:
    """Return a value model with the policy's weights as they are now, or None where nobody asks it; collective.

    It is spread over the ranks as the policy is, routes on its own, and says 0 of everything at first.

    folder    where the weights pass through, and are removed again
    raises    ConfigError, the same on all ranks, when the folder cannot be written
    """
    if config.algorithm.advantage != "gae":
        return None
    path = folder / ".critic-weights"
    write_weights(policy, path)
    model_config: Any = copy.deepcopy(policy.copy.config)
    model_config.num_labels = 1
    model_config.classifier_dropout = 0.0
    model_config.token_classification_bias = False  # with one, the output is a view, which FSDP2 warns of
    critic = load_sharded(
        value_model_class(type(policy.copy)),
        str(path),
        model_config=without_randomness(model_config),
        settings=config.model,
        device=device,
        has_experts=policy.num_experts > 0,
    )
    policy.keep_sequences_apart(critic)
    head: Any = critic.score
    with torch.no_grad():
        head.weight.zero_()
    dist.barrier()  # everyone has read
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    return critic


def values(
    critic: nn.Module, input_ids_1T: Int64[Tensor, "1 T"], position_ids_1T: Int64[Tensor, "1 T"]
) -> Float32[Tensor, " T"]:
    """Return what the critic says after reading each token, of sequences laid end to end; collective.

    position_ids_1T   start at 0 with each sequence: the mask of transformers keeps them apart by that
    """
    device = next(critic.parameters()).device
    output = critic(input_ids=input_ids_1T.to(device), position_ids=position_ids_1T.to(device), use_cache=False)
    return output.logits[0, :, 0].float()


def value_model_class(causal: Any) -> Any:
    """Return the token classifier of a family of models, given its causal language model.

    transformers names one for some families only, and builds those from the two classes that are put together here.
    """
    family = next(base for base in causal.__mro__ if base.__name__.endswith("PreTrainedModel"))
    about = {"base_model_prefix": causal.base_model_prefix, "__module__": family.__module__}
    name = causal.__name__.replace("ForCausalLM", "ForTokenClassification")
    return type(name, (GenericForTokenClassification, family), about)
