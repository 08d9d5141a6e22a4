"""The policy: your model or the built-in one, sharded over the ranks; a full copy on each if they sample themselves."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from relibra.errors import ConfigError, EngineError
from relibra.files import sync_folder
from relibra.parallel.adapters import has_adapters
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.replay import find_routers
from relibra.rl.config.run_config import RunConfig
from relibra.rl.config.settings import NO_EXPERTS, ModelSettings
from relibra.rl.model.lora import gather_adapter
from relibra.rl.model.packed_sequences import (
    can_attend_packed,
    can_share_prompts,
    compute_dtype,
    mixes_sequences,
    use_explicit_masks,
    use_packed_attention,
)
from relibra.rl.model.probes import check_lengths, check_modes
from relibra.rl.model.sharding import (
    check_shards,
    evaluation_mode,
    full_parameters,
    load_parameters,
    load_sharded,
    on_all_ranks,
    quiet_loading,
    set_tied,
    with_plain_outputs,
)
from relibra.rl.model.token_scores import learn_logits
from relibra.rl.model.tokenizer import Tokenizer, loading
from relibra.rl.model.weight_files import StoredWeights, write_folder
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
    other_parameters   weights outside of routed experts
    """

    num_experts: int
    layer_ids: tuple[int, ...]
    top_k: int
    shape: ModelShape | None = None
    other_parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class Policy(ModelStructure):
    """The trained model.

    trained       sharded over the ranks (plain on one rank); parameters and gradients in float32
    meta          the same on the meta device, without weights: names, shapes, types that are computed with, config.json
    copy          not sharded, in evaluation mode, without gradients; the embedded engine samples from it. None: a
                  server samples
    balanced      `trained` has experts and can execute plans
    packed        the model supports attention within each packed sequence (`packed_sequences.py`)
    explicit_masks   the model needs explicit masks to keep packed sequences independent
    shares_prompts   responses of a micro-batch feed the prompt of their group once
    """

    trained: nn.Module
    meta: Any
    copy: nn.Module | None = None
    balanced: bool
    packed: bool = False
    explicit_masks: bool = False
    shares_prompts: bool = False

    @property
    def model_shape(self) -> ModelShape:
        """Return `shape` of a model with experts."""
        assert self.shape is not None, "only models with experts are planned for"
        return self.shape

    def sync(self) -> None:
        """Copy the trained weights, gathered in logical expert order, into the full copy, if any; collective."""
        if self.copy is None:
            return
        targets = dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, full in full_parameters(self.trained):
                targets[name].copy_(full)

    def separate_sequences(self, model: nn.Module) -> None:
        """Keep packed sequences of a model of this family independent, in the fastest way that it supports."""
        if self.explicit_masks:
            use_explicit_masks(model, compute_dtype(model))
        if self.packed:
            use_packed_attention(model)


def build_policy(
    config: RunConfig,
    vocab_size: int,
    folder: Path,
    device: torch.device,
    *,
    longest: int = 0,
    decodes: bool = True,
    samples: bool = True,
) -> Policy:
    """Initialize the built-in model from the seed of a run, or load the one at `model.path`; collective.

    With adapters, merged weights are float32: bfloat16 loses small changes. Where the model does not allow
    `update.shared_prompts`, a warning says so.

    vocab_size      tokens of the tokenizer
    folder          for a temporary file of initial weights, which all ranks load
    longest         tokens of a prompt and its response
    decodes         it is sampled by our own engine
    samples         it is sampled in these processes, and not in a server
    raises          ConfigError, the same on all ranks, if there is no such model, or it does not fit the run
    """
    settings, lora, num_ranks = config.model, config.lora, config.parallel.ranks
    model_config = on_all_ranks(lambda: read_model_config(settings, vocab_size, config.rollout.least_head_dim))
    structure = on_all_ranks(lambda: read_structure(model_config, settings, num_ranks, config.algorithm.replay))
    if lora.rank and structure.shape:
        expert = replace(structure.shape.expert, adapter_rank=lora.rank)
        structure = replace(structure, shape=replace(structure.shape, expert=expert))
    with _initial_weights(settings, config.run.seed, model_config, folder) as path:
        dtype = "float32" if lora.rank else settings.dtype  # of merged weights
        meta = _load_meta(path, settings.model_copy(update={"dtype": dtype}), copy.deepcopy(model_config))

        def load() -> nn.Module:
            return load_sharded(
                AutoModelForCausalLM,
                path,
                model_config=copy.deepcopy(model_config),
                settings=settings,
                device=device,
                num_experts=structure.num_experts,
                follows_plans=config.follows_plans,
                lora=lora,
                seed=config.run.seed,
            )

        try:
            trained = load()
            if meta.all_tied_weights_keys and not trained.all_tied_weights_keys:  # they differ in the files
                set_tied(model_config, tied=False)
                trained = load()
        except ConfigError:
            raise
        except (ValueError, RuntimeError) as error:  # transformers has no plan, or cannot convert shards; on all ranks
            if isinstance(error, RuntimeError) and (num_ranks == 1 or "conversion of the weights" not in str(error)):
                raise
            raise ConfigError(
                f"{_name(settings)} cannot be sharded over {num_ranks} ranks: "
                f"{str(error).splitlines()[0].rstrip('.')}; use parallel.ranks=1, or a model of another family"
            ) from error
        meta.all_tied_weights_keys = trained.all_tied_weights_keys
        meta.tie_weights(recompute_mapping=False)
        with evaluation_mode(trained):
            explicit_masks = _needs_masks(trained, settings)
            packed = can_attend_packed(trained)
            if settings.path:
                check_lengths(trained, longest, _name(settings), decodes=decodes)
        if num_ranks > 1:
            check_shards(
                trained,
                meta,
                _name(settings),
                lambda names: load_parameters(path, names, copy.deepcopy(model_config), settings),
            )
    policy = Policy(
        **vars(structure),
        trained=trained,
        meta=meta,
        copy=_copy_of(meta, trained, device) if samples else None,
        balanced=config.follows_plans and structure.num_experts > 0,
        packed=packed,
        explicit_masks=explicit_masks,
    )
    policy.sync()
    if packed:
        use_packed_attention(trained)
    elif settings.path and dist.get_rank() == 0:
        _log.warning("%s keeps its own attention: memory grows with the square of a micro-batch", _name(settings))
    if config.update.shared_prompts:
        with evaluation_mode(trained):
            policy = replace(policy, shares_prompts=can_share_prompts(trained))
        if not policy.shares_prompts and dist.get_rank() == 0:
            _log.warning(
                "update.shared_prompts is off: each response feeds its own prompt, since behind a prompt that others "
                "share %s computes something else",
                _name(settings),
            )
    if explicit_masks and policy.copy is not None:
        use_explicit_masks(policy.copy, meta.dtype)
    learn_logits(trained)
    if settings.path:
        check_modes(trained, _name(settings), settings.dtype)
    return policy


def _load_meta(path: str, settings: ModelSettings, model_config: Any) -> Any:
    """Return a model on the meta device, in evaluation mode; only headers of its files are read; collective."""

    def load() -> Any:
        with loading(f"model.path {settings.path!r}"), quiet_loading():
            return AutoModelForCausalLM.from_pretrained(
                path,
                config=model_config,
                dtype=getattr(torch, settings.dtype),
                trust_remote_code=settings.trust_remote_code,
                device_map={"": "meta"},
            )

    return on_all_ranks(load).eval().requires_grad_(False)


def _copy_of(meta: Any, trained: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of `meta` on a device, with the buffers of the trained model; its weights are not set yet."""
    whole = copy.deepcopy(meta).to_empty(device=device)
    whole.tie_weights(recompute_mapping=False)
    buffers = dict(trained.named_buffers())
    for name, buffer in whole.named_buffers():
        buffer.copy_(buffers[name])
    return whole


def save_policy(policy: Policy, tokenizer: Tokenizer, folder: Path) -> None:
    """Write policy and tokenizer as a `transformers` folder; collective.

    Weights have the types that config.json names: those that every engine computes with. Of a policy with adapters,
    only the adapters are written, as peft does.
    """
    write_weights(policy, folder, dtype=None, finish=tokenizer.save, as_adapter=has_adapters(policy.trained))


def write_weights(
    policy: Policy,
    folder: Path,
    *,
    dtype: torch.dtype | None = torch.float32,
    finish: Callable[[Path], object] = lambda _: None,
    setting: str = "run.folder",
    as_adapter: bool = False,
) -> None:
    """Write the trained weights, in logical expert order, as a `transformers` folder; collective.

    The folder has its name only when it is complete. Rank 0 writes, and holds one layer at a time.

    dtype        of parameters; None: the types that are computed with
    finish       adds to the folder, on rank 0
    setting      that names the folder, for messages
    as_adapter   write only the adapters of the policy, as peft does
    raises       ConfigError, the same on all ranks, if the folder cannot be written
    """
    writes = dist.get_rank() == 0
    stored = StoredWeights(policy.meta, dtype)
    adapter = gather_adapter(policy.trained) if as_adapter else None
    weights = iter(()) if adapter else stored.gather(policy.trained, wanted=writes)
    temporary = folder.with_name(f".{folder.name}.tmp")

    def write() -> None:
        try:
            if writes:
                with _writing(folder, setting):
                    shutil.rmtree(temporary, ignore_errors=True)
                    if adapter:
                        temporary.mkdir(parents=True)
                        adapter.save_pretrained(temporary)
                    else:
                        write_folder(temporary, stored, weights)
                    finish(temporary)
                    shutil.rmtree(folder, ignore_errors=True)
                    temporary.rename(folder)
                    sync_folder(folder.parent)
        finally:
            for _ in weights:  # take part to the end
                continue

    on_all_ranks(write)


def _needs_masks(model: nn.Module, settings: ModelSettings) -> bool:
    """Return whether packed sequences are independent only with explicit masks, and use these; collective.

    raises   ConfigError, on all ranks, if masks do not help either
    """
    if not settings.path or not mixes_sequences(model):
        return False
    use_explicit_masks(model, compute_dtype(model))
    if mixes_sequences(model):
        family = type(model).__name__.removeprefix("FSDP")
        raise ConfigError(
            f"{_name(settings)} cannot be trained: training packs sequences end to end, and {family} "
            "carries state from one sequence into the next, as recurrent layers do; use an attention-only model"
        )
    return True


def read_model_config(settings: ModelSettings, vocab_size: int, least_head_dim: int) -> Any:
    """Return the configuration of a policy; raises ConfigError where there is none, or it does not fit the tokenizer.

    vocab_size       tokens of the tokenizer
    least_head_dim   of the built-in model
    """
    if not settings.path:
        return built_in_config(settings, vocab_size, least_head_dim)
    with loading(f"model.path {settings.path!r}"):
        model_config = AutoConfig.from_pretrained(settings.source, trust_remote_code=settings.trust_remote_code)
    if (changed := with_plain_outputs(model_config)) and dist.get_rank() == 0:
        _log.warning("model.path %r sets %s in config.json, which training does not use", settings.path, changed)
    if (stored := getattr(model_config, "quantization_config", None)) and stored.get("quant_method") == "mxfp4":
        stored["dequantize"] = True  # else it stays quantized, and untrainable, where its kernels are installed
    known = model_config.get_text_config().vocab_size
    if vocab_size > known:
        raise ConfigError(
            f"model.path {settings.path!r} has embeddings for {known} tokens, but its tokenizer has {vocab_size}: "
            "resize the embeddings, or use the tokenizer that the model was trained with"
        )
    return model_config


def read_structure(model_config: Any, settings: ModelSettings, ranks: int, replay: str) -> ModelStructure:
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
        other_parameters=sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in stacked),
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
            with _writing(temporary, "run.folder"), quiet_loading():
                initial_model(model_config, seed).save_pretrained(temporary)

    try:
        on_all_ranks(write)
        yield str(temporary)
        dist.barrier()
    finally:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _writing(folder: Path, setting: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write weights into {folder} ({setting}): {reason}") from error


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
        if not policy.meta.all_tied_weights_keys:
            set_tied(model_config, tied=False)
        reference = load_sharded(
            AutoModelForCausalLM,
            str(folder),
            model_config=model_config,
            settings=settings,
            device=device,
            num_experts=policy.num_experts,
            follows_plans=policy.balanced,
            frozen=True,
        )
    policy.separate_sequences(reference)
    learn_logits(reference)
    if settings.path:
        check_modes(reference, what, settings.dtype, (False, False))
    return reference
