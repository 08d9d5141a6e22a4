"""The value model (critic): the policy's initial weights with a head that predicts the return at each token."""

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

from relibra.rl.config.settings import ModelSettings
from relibra.rl.model.policy import Policy, write_weights
from relibra.rl.model.probes import check_modes
from relibra.rl.model.sharding import load_sharded


def build_critic(settings: ModelSettings, policy: Policy, folder: Path, device: torch.device) -> nn.Module:
    """Return a value model with the policy's current weights, and a head that predicts 0; collective.

    It is sharded as the policy is, and has its own routers: no plan knows their choices, so it balances live.

    folder    for a temporary file of weights
    raises    ConfigError, the same on all ranks, if the folder cannot be written, or as `check_modes` does
    """
    path = folder / ".critic-weights"
    write_weights(policy, path)
    model_config: Any = copy.deepcopy(policy.meta.config)
    model_config.num_labels = 1
    model_config.classifier_dropout = 0.0
    model_config.token_classification_bias = False  # with a bias the output is a view, for which FSDP2 warns
    critic = load_sharded(
        value_model_class(type(policy.meta)),
        str(path),
        model_config=model_config,
        settings=settings,
        device=device,
        num_experts=policy.num_experts,
        follows_plans=policy.balanced,
    )
    policy.separate_sequences(critic)
    dist.barrier()  # all ranks have read the file
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    if settings.path:
        check_modes(critic, f"the value model of model.path {settings.path!r}", settings.dtype)
    head: Any = critic.score
    with torch.no_grad():
        head.weight.zero_()
    return critic


def token_values(
    critic: nn.Module, input_ids_1T: Int64[Tensor, "1 T"], position_ids_1T: Int64[Tensor, "1 T"]
) -> Float32[Tensor, " T"]:
    """Return the predicted return after each token of packed sequences, which are on its device; collective.

    position_ids_1T   restart at 0 with each sequence, which separates them in the attention mask
    """
    output = critic(input_ids=input_ids_1T, position_ids=position_ids_1T, use_cache=False)
    return output.logits[0, :, 0].float()


def value_model_class(causal: Any) -> Any:
    """Return the token-classification class of a model family, given its causal language model.

    transformers defines one for some families only, always from the two base classes that are used here.
    """
    family = next(base for base in causal.__mro__ if base.__name__.endswith("PreTrainedModel"))
    attributes = {"base_model_prefix": causal.base_model_prefix, "__module__": family.__module__}
    name = causal.__name__.replace("ForCausalLM", "ForTokenClassification")
    return type(name, (GenericForTokenClassification, family), attributes)
