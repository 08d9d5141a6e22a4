"""The policy: a built-in tiny model or one of yours, spread over the ranks, with a full copy on each of them."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from relibra.errors import ConfigError, EngineError
from relibra.replay import find_routers
from relibra.rl.config.run_config import RunConfig
from relibra.rl.config.settings import ModelSettings
from relibra.rl.model.packed_attention import can_attend_packed, use_packed_attention
from relibra.rl.model.sequence_masks import give_masks, reads_across
from relibra.rl.model.sharding import (
    agreed,
    is_missing_folder,
    load_sharded,
    loading,
    quiet_loading,
    whole_parameters,
    without_randomness,
)
from relibra.rl.toy.model import built_in_config, initial_model

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """The trained model and its full copy on this rank.

    trained       sharded over the ranks (plain on one rank); holds parameters and gradients, in float32
    copy          whole, in evaluation mode, without gradients; what the rollout engine samples from
    num_experts   of each MoE layer; 0: a dense model
    layer_ids     decoder layers (absolute, from 0) whose routes can be recorded; none: a dense model, or (with replay
                  off) one whose routers relibra does not know
    top_k         experts that a token takes in each of them; 0 where there are none
    balanced      the experts of `trained` can follow plans
    packed        the family can attend to sequences laid end to end one by one (`attend_packed`)
    given_masks   it needs masks from us to keep such sequences apart
    """

    trained: nn.Module
    copy: nn.Module
    num_experts: int
    layer_ids: tuple[int, ...]
    top_k: int
    balanced: bool
    packed: bool = False
    given_masks: bool = False

    def sync(self) -> None:
        """Copy the trained weights, gathered whole and in logical expert order, into the full copy; collective."""
        targets = dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, whole in whole_parameters(self.trained):
                targets[name].copy_(whole)

    def keep_sequences_apart(self, model: nn.Module) -> None:
        """Make a model of this family keep sequences apart that are laid end to end, as cheaply as it can."""
        if self.given_masks:
            _give_masks(model, self.copy)
        if self.packed:
            use_packed_attention(model)


def balanced(config: RunConfig) -> bool:
    """Tell whether the settings ask for balanced experts; whether the model has any is another question."""
    wanted = config.plan.balancer != "static" or config.plan.sums == "canonical"
    return wanted and config.algorithm.replay != "off" and config.parallel.ranks > 1


def build_policy(config: RunConfig, vocab_size: int, folder: Path, device: torch.device) -> Policy:
    """Initialise the built-in model from the seed, or load the one at `model.path`; collective.

    vocab_size   tokens that the tokenizer knows
    folder       where initial weights pass through on their way to all ranks, and are removed again
    raises       ConfigError, the same on all ranks, when there is no such model, or it does not fit the run
    """
    model_config = agreed(lambda: _model_config(config.model, vocab_size))
    anatomy = agreed(lambda: _anatomy(model_config, config))
    with _initial_weights(config, model_config, anatomy, folder) as path:
        if anatomy.tied:
            model_config = AutoConfig.from_pretrained(path)

        def load_copy() -> nn.Module:
            with loading(f"model.path {config.model.path!r}"), quiet_loading():
                return AutoModelForCausalLM.from_pretrained(
                    path, config=copy.deepcopy(model_config), dtype=getattr(torch, config.model.dtype)
                )

        full = agreed(load_copy).to(device).eval().requires_grad_(False)
        given_masks = agreed(lambda: _keep_apart(full, config.model))
        packed = agreed(lambda: not given_masks and can_attend_packed(full))
        try:
            trained = load_sharded(
                AutoModelForCausalLM,
                path,
                model_config=without_randomness(copy.deepcopy(model_config)),
                settings=config.model,
                device=device,
                has_experts=anatomy.num_experts > 0,
                experts="relibra" if balanced(config) else "all_to_all",
            )
        except ValueError as error:  # transformers knows no way to spread this family; the same on all ranks
            raise ConfigError(
                f"{_name(config.model)} cannot be spread over {config.parallel.ranks} ranks: "
                f"{str(error).splitlines()[0].rstrip('.')}; use parallel.ranks=1, or a model of another family"
            ) from error
    policy = Policy(
        trained=trained,
        copy=full,
        num_experts=anatomy.num_experts,
        layer_ids=anatomy.layer_ids,
        top_k=anatomy.top_k,
        balanced=balanced(config) and anatomy.num_experts > 0,
        packed=packed,
        given_masks=given_masks,
    )
    policy.keep_sequences_apart(trained)
    return policy


def write_weights(policy: Policy, folder: Path) -> None:
    """Write the trained weights, in float32 and logical order, as a plain `transformers` folder; collective.

    Rank 0 writes, and holds all of them in memory for that.

    raises   ConfigError, the same on all ranks, when the folder cannot be written
    """
    writes = dist.get_rank() == 0
    weights = {name: whole.cpu() for name, whole in whole_parameters(policy.trained) if writes}

    def write() -> None:
        if writes:
            with _writing(folder):
                policy.copy.save_pretrained(folder, state_dict={**policy.copy.state_dict(), **weights})  # type: ignore[operator]

    agreed(write)


def _keep_apart(full: nn.Module, settings: ModelSettings) -> bool:
    """Make sure that sequences laid end to end do not see each other; return whether that took masks from us."""
    if not settings.path or not reads_across(full):
        return False
    _give_masks(full, full)
    if reads_across(full):
        raise ConfigError(
            f"{_name(settings)} carries something from a sequence into the one laid behind it, as layers with a "
            f"running state do, and training lays sequences end to end: {type(full).__name__} cannot be trained here; "
            "take a model whose layers are all attention"
        )
    return True


def _give_masks(model: nn.Module, full: nn.Module) -> None:
    """Give a model of the family of `full` its masks; trained weights are in float32, and computed with in another."""
    give_masks(model, full.dtype)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class _Anatomy:
    """What has to be known of a model before its weights are loaded.

    tied   parameters that share their values in the checkpoint
    """

    num_experts: int
    layer_ids: tuple[int, ...]
    top_k: int
    tied: tuple[str, ...]


def _model_config(settings: ModelSettings, vocab_size: int) -> Any:
    if not settings.path:
        return built_in_config(settings, vocab_size)
    if is_missing_folder(settings.path):
        raise ConfigError(
            f"model.path {settings.path!r} is no folder: name one that save_pretrained wrote, or a causal language "
            "model on the hub, as owner/name"
        )
    with loading(f"model.path {settings.path!r}"):
        model_config = AutoConfig.from_pretrained(settings.path)
    known = model_config.get_text_config().vocab_size
    if vocab_size > known:
        raise ConfigError(
            f"model.path {settings.path!r} has embeddings for {known} tokens, its tokenizer has {vocab_size}: resize "
            "the embeddings, or take the tokenizer that the model was made with"
        )
    return model_config


def _anatomy(model_config: Any, config: RunConfig) -> _Anatomy:
    """Look at the model without its weights, and refuse what cannot be trained as the settings say."""
    name, ranks, replay = _name(config.model), config.parallel.ranks, config.algorithm.replay
    with loading(name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config))
    stacked = [p for path, p in model.named_parameters() if ".experts." in path and p.ndim == 3]
    num_experts = max((len(p) for p in stacked), default=0)
    if num_experts and num_experts % ranks:
        raise ConfigError(
            f"parallel.ranks {ranks} does not divide the {num_experts} experts of {name}: every rank holds the same "
            "number of experts"
        )
    sites: tuple[Any, ...] = ()
    try:
        sites = find_routers(model) if num_experts else ()
    except EngineError as error:
        if replay != "off":
            raise ConfigError(
                f"algorithm.replay {replay!r} does not work with {name}: {error}; or set algorithm.replay=off"
            ) from error
    if not num_experts and replay != "off":
        raise ConfigError(
            f"algorithm.replay {replay!r} needs a model with experts, and {name} has none: set algorithm.replay=off"
        )
    return _Anatomy(
        num_experts=num_experts,
        layer_ids=tuple(site.layer_id for site in sites),
        top_k=sites[0].top_k if sites else 0,
        tied=tuple(model.all_tied_weights_keys),
    )


@contextmanager
def _initial_weights(config: RunConfig, model_config: Any, anatomy: _Anatomy, folder: Path) -> Iterator[str]:
    """Yield the folder (or hub name) that all ranks load from; collective.

    Tied weights part here: under FSDP2 transformers 5.23 unties them without a word, so that a tied copy would drift
    away from what is trained.
    """
    if config.model.path and not anatomy.tied:
        yield config.model.path
        return
    temporary, writes = folder / ".initial-weights", dist.get_rank() == 0

    def write() -> None:
        if writes:
            with _writing(temporary), quiet_loading():
                _initial_model(config, model_config, anatomy).save_pretrained(temporary)

    try:
        agreed(write)
        yield str(temporary)
        dist.barrier()
    finally:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)


def _initial_model(config: RunConfig, model_config: Any, anatomy: _Anatomy) -> Any:
    """Return the whole model, of the seed or as it is on disk, every parameter with values of its own."""
    if not config.model.path:
        return initial_model(model_config, config.run.seed)
    _log.warning(
        "%s ties %s to other weights, which sharded training cannot: from here on they are parameters of their own",
        _name(config.model),
        ", ".join(anatomy.tied),
    )
    with loading(_name(config.model)):
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    for name in anatomy.tied:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, leaf, nn.Parameter(getattr(module, leaf).detach().clone()))
    model.all_tied_weights_keys.clear()
    for section in (model.config, model.config.get_text_config()):
        section.tie_word_embeddings = False
    return model


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write weights into {folder} (run.folder): {reason}") from error


def _name(settings: ModelSettings) -> str:
    return f"model.path {settings.path!r}" if settings.path else "the built-in model"
