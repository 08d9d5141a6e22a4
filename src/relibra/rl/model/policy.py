"""The policy: your model or the built-in one, sharded over the ranks, with a full copy for sampling on each."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from relibra.errors import ConfigError, EngineError
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.replay import find_routers
from relibra.rl.config.settings import NO_EXPERTS, ModelSettings
from relibra.rl.model.packed_sequences import (
    can_attend_packed,
    mixes_sequences,
    use_explicit_masks,
    use_packed_attention,
)
from relibra.rl.model.probes import check_lengths, check_modes
from relibra.rl.model.sharding import (
    check_shards,
    full_parameters,
    load_sharded,
    on_all_ranks,
    quiet_loading,
    set_tied,
    with_plain_outputs,
    without_randomness,
)
from relibra.rl.model.tokenizer import Tokenizer, loading
from relibra.rl.toy.model import built_in_config, initial_model
from relibra.simulation import ModelShape, counted_model_shape

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """What is known of a model before its weights are loaded.

    num_experts   experts of each MoE layer; 0: a dense model
    layer_ids     decoder layers (absolute, from 0) whose routes can be recorded; none: a dense model, or (with replay
                  off) one with unknown routers
    top_k         experts per token in each of them; 0 if there are none
    shape         sizes of the model, for plans; None: a dense model
    """

    num_experts: int
    layer_ids: tuple[int, ...]
    top_k: int
    shape: ModelShape | None = None


@dataclass(frozen=True, kw_only=True)
class Policy(ModelStructure):
    """The trained model and its full copy on this rank.

    trained       sharded over the ranks (plain on one rank); parameters and gradients in float32
    copy          not sharded, in evaluation mode, without gradients; the rollout engine samples from it
    balanced      `trained` has experts and can execute plans
    packed        the model supports attention within each packed sequence (`packed_sequences.py`)
    explicit_masks   the model needs explicit masks to keep packed sequences independent
    """

    trained: nn.Module
    copy: nn.Module
    balanced: bool
    packed: bool = False
    explicit_masks: bool = False

    @property
    def model_shape(self) -> ModelShape:
        """Return `shape` of a model with experts."""
        assert self.shape is not None, "only models with experts are planned for"
        return self.shape

    def sync(self) -> None:
        """Copy the trained weights, gathered in logical expert order, into the full copy; collective."""
        targets = dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, full in full_parameters(self.trained):
                targets[name].copy_(full)

    def separate_sequences(self, model: nn.Module) -> None:
        """Keep packed sequences of a model of this family independent, in the fastest way that it supports."""
        if self.explicit_masks:
            use_explicit_masks(model, self.copy.dtype)  # type: ignore[arg-type]
        if self.packed:
            use_packed_attention(model)


def build_policy(
    settings: ModelSettings,
    vocab_size: int,
    folder: Path,
    device: torch.device,
    *,
    seed: int,
    num_ranks: int,
    replay: str,
    follows_plans: bool,
    least_head_dim: int = 0,
    longest: int = 0,
    decodes: bool = True,
) -> Policy:
    """Initialize the built-in model from the seed, or load the one at `model.path`; collective.

    vocab_size      tokens of the tokenizer
    folder          for a temporary file of initial weights, which all ranks load
    replay          algorithm.replay: routers must be known unless it is "off"
    follows_plans   plans decide where experts are computed, if the model has experts
    least_head_dim  of the built-in model
    longest         tokens of a prompt and its response
    decodes         the copy samples here, and not in a server
    raises          ConfigError, the same on all ranks, if there is no such model, or it does not fit the run
    """
    model_config = on_all_ranks(lambda: _model_config(settings, vocab_size, least_head_dim))
    structure = on_all_ranks(lambda: _read_structure(model_config, settings, num_ranks, replay))
    with _initial_weights(settings, seed, model_config, folder) as path:
        full = _load_whole(path, f"model.path {settings.path!r}", settings, device, copy.deepcopy(model_config))
        explicit_masks = on_all_ranks(lambda: _needs_masks(full, settings))
        packed = on_all_ranks(lambda: can_attend_packed(full))
        if settings.path:
            on_all_ranks(lambda: check_lengths(full, longest, _name(settings), decodes=decodes))
        if not full.all_tied_weights_keys:  # transformers ties no weights that differ in the files
            set_tied(model_config, tied=False)
        try:
            trained = load_sharded(
                AutoModelForCausalLM,
                path,
                model_config=without_randomness(copy.deepcopy(model_config)),
                settings=settings,
                device=device,
                has_experts=structure.num_experts > 0,
                experts="relibra" if follows_plans else "all_to_all",
            )
        except ValueError as error:  # transformers has no plan for this family; the same on all ranks
            raise ConfigError(
                f"{_name(settings)} cannot be sharded over {num_ranks} ranks: "
                f"{str(error).splitlines()[0].rstrip('.')}; use parallel.ranks=1, or a model of another family"
            ) from error
    check_shards(trained, full, _name(settings))
    policy = Policy(
        **vars(structure),
        trained=trained,
        copy=full,
        balanced=follows_plans and structure.num_experts > 0,
        packed=packed,
        explicit_masks=explicit_masks,
    )
    policy.separate_sequences(trained)
    if settings.path:
        check_modes(trained, _name(settings), settings.dtype)
    return policy


def _load_whole(
    path: str, what: str, settings: ModelSettings, device: torch.device, model_config: Any = None
) -> nn.Module:
    """Return a model that every rank holds all of, in evaluation mode, without gradients; collective."""

    def load() -> nn.Module:
        with loading(what), quiet_loading():
            return AutoModelForCausalLM.from_pretrained(
                path,
                config=model_config,
                dtype=getattr(torch, settings.dtype),
                trust_remote_code=settings.trust_remote_code,
            )

    return on_all_ranks(load).to(device).eval().requires_grad_(False)


def save_policy(policy: Policy, tokenizer: Tokenizer, folder: Path) -> None:
    """Write policy and tokenizer as a `transformers` folder, renamed to `folder` when it is complete; collective.

    Weights have the types of the copy, which its config.json names: those that every engine computes with.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    write_weights(policy, temporary, types={name: whole.dtype for name, whole in policy.copy.named_parameters()})
    if dist.get_rank() == 0:
        tokenizer.save(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)


def write_weights(policy: Policy, folder: Path, types: Mapping[str, torch.dtype] = MappingProxyType({})) -> None:
    """Write the trained weights, in logical expert order, as a `transformers` folder; collective.

    Rank 0 writes, and needs memory for all of them. Tied weights are the same in all their places.

    types    of parameters by name; float32 for others, with nothing lost
    raises   ConfigError, the same on all ranks, if the folder cannot be written
    """
    writes = dist.get_rank() == 0
    named = full_parameters(policy.trained)
    weights = {name: full.to("cpu", types.get(name, torch.float32)) for name, full in named if writes}
    for pair in policy.copy.all_tied_weights_keys.items() if writes else ():  # type: ignore[operator, union-attr]
        shared = next(weights[name] for name in pair if name in weights)
        weights |= dict.fromkeys(pair, shared)

    def write() -> None:
        if writes:
            with _writing(folder):
                policy.copy.save_pretrained(folder, state_dict={**policy.copy.state_dict(), **weights})  # type: ignore[operator]

    on_all_ranks(write)


def _needs_masks(full: nn.Module, settings: ModelSettings) -> bool:
    """Return whether packed sequences are independent only with explicit masks, and use these in the full copy.

    raises   ConfigError if masks do not help either
    """
    if not settings.path or not mixes_sequences(full):
        return False
    use_explicit_masks(full, full.dtype)  # type: ignore[arg-type]
    if mixes_sequences(full):
        raise ConfigError(
            f"{_name(settings)} cannot be trained: training packs sequences end to end, and {type(full).__name__} "
            "carries state from one sequence into the next, as recurrent layers do; use an attention-only model"
        )
    return True


def _model_config(settings: ModelSettings, vocab_size: int, least_head_dim: int) -> Any:
    if not settings.path:
        return built_in_config(settings, vocab_size, least_head_dim)
    with loading(f"model.path {settings.path!r}"):
        model_config = AutoConfig.from_pretrained(settings.source, trust_remote_code=settings.trust_remote_code)
    if (changed := with_plain_outputs(model_config)) and dist.get_rank() == 0:
        _log.warning("model.path %r sets %s in config.json, which training does not use", settings.path, changed)
    known = model_config.get_text_config().vocab_size
    if vocab_size > known:
        raise ConfigError(
            f"model.path {settings.path!r} has embeddings for {known} tokens, but its tokenizer has {vocab_size}: "
            "resize the embeddings, or use the tokenizer that the model was trained with"
        )
    return model_config


def _read_structure(model_config: Any, settings: ModelSettings, ranks: int, replay: str) -> ModelStructure:
    """Return the structure of a model; raises ConfigError if it cannot be trained with these settings."""
    name = _name(settings)
    with loading(name), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config), trust_remote_code=settings.trust_remote_code
        )
    stacked = [p for path, p in model.named_parameters() if ".experts." in path and p.ndim == 3]
    num_experts = max((len(p) for p in stacked), default=0)
    if num_experts and num_experts % ranks:
        raise ConfigError(
            f"parallel.ranks {ranks} does not divide the {num_experts} experts of {name}: every rank needs the same "
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
            f"algorithm.replay {replay!r} needs a model with experts, and {name} has none: set algorithm.replay=off; "
            f"{NO_EXPERTS}"
        )
    shape, top_k = None, sites[0].top_k if sites else 0
    if num_experts:
        expert, text = _expert_shape(model_config, stacked, settings), model_config.get_text_config()
        layers, others = len(sites) or text.num_hidden_layers, sum(p.numel() for p in model.parameters())
        others -= layers * num_experts * expert.parameters
        shape = counted_model_shape(text.to_dict(), layers, num_experts, top_k, expert, max(0, others))
    return ModelStructure(
        num_experts=num_experts,
        layer_ids=tuple(site.layer_id for site in sites),
        top_k=top_k,
        shape=shape,
    )


def _expert_shape(model_config: Any, stacked: Sequence[nn.Parameter], settings: ModelSettings) -> ExpertShape:
    """Return the size of one expert: gate, up and down, in the dtype of the forward pass.

    stacked   parameters `[E, ...]` of all layers with experts; every layer has one `down` `[E, H, F]` or `[E, F, H]`
    """
    hidden = int(model_config.get_text_config().hidden_size)
    width = min(p.shape[1] * p.shape[2] for p in stacked) // hidden  # gate and up are often one parameter
    return ExpertShape(hidden=hidden, width=max(1, width), bytes_per_value=getattr(torch, settings.dtype).itemsize)


@contextmanager
def _initial_weights(settings: ModelSettings, seed: int, model_config: Any, folder: Path) -> Iterator[str]:
    """Yield the folder (or hub name) that all ranks load from; collective."""
    if settings.path:
        yield settings.source
        return
    temporary, writes = folder / ".initial-weights", dist.get_rank() == 0

    def write() -> None:
        if writes:
            with _writing(temporary), quiet_loading():
                initial_model(model_config, seed).save_pretrained(temporary)

    try:
        on_all_ranks(write)
        yield str(temporary)
        dist.barrier()
    finally:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write weights into {folder} (run.folder): {reason}") from error


def _name(settings: ModelSettings) -> str:
    return f"model.path {settings.path!r}" if settings.path else "the built-in model"


def reference_policy(
    policy: Policy, folder: Path, device: torch.device, *, settings: ModelSettings, write: bool
) -> nn.Module:
    """Return a frozen copy, loaded from a folder, in `settings.dtype`, and sharded as the policy; collective.

    write    write the current policy into the folder first (a new run); False: the folder exists (a resumed run)
    raises   ConfigError, the same on all ranks, if the folder cannot be written or read
    """
    if write:
        write_weights(policy, folder)
    what = f"the reference policy {str(folder)!r}"
    with loading(what):
        model_config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
        if not policy.copy.all_tied_weights_keys:
            set_tied(model_config, tied=False)
        reference = load_sharded(
            AutoModelForCausalLM,
            str(folder),
            model_config=without_randomness(model_config),
            settings=settings,
            device=device,
            has_experts=policy.num_experts > 0,
            experts="relibra" if policy.balanced else "all_to_all",
            frozen=True,
        )
    policy.separate_sequences(reference)
    if settings.path:
        check_modes(reference, what, settings.dtype, (False, False))
    return reference
