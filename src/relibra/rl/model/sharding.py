"""Sharded models: load over all ranks by FSDP2 and expert parallelism, gather full weights in logical order."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig, modeling_utils
from transformers.core_model_loading import WeightConverter, apply_converters
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.mixin import DistributedMixin
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from relibra.environment import in_little_memory
from relibra.errors import ConfigError, RelibraError
from relibra.parallel import logical_parameters, register
from relibra.parallel.adapters import add_adapters, is_adapter, merged
from relibra.parallel.balanced import NAME, balanced_layers
from relibra.parallel.homes.logical_order import full_tensor, reshard
from relibra.planning.activation_choice import ATTENTION, RECOMPUTE
from relibra.rl.config.settings import LoraSettings, ModelSettings
from relibra.rl.model.adapter_values import initialize_adapters
from relibra.rl.model.tokenizer import loading as loading
from relibra.rl.run.ranks import gather_json, wait_for_ranks

T = TypeVar("T")

_RANDOM_IN_TRAINING = re.compile("drop|jitter|noise")
"""In names of settings that make training mode differ from evaluation mode; `check_modes` finds others."""


def load_sharded(
    model_class: Any,
    path: str,
    *,
    model_config: Any,
    settings: ModelSettings,
    device: torch.device,
    num_experts: int,
    follows_plans: bool,
    frozen: bool = False,
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> nn.Module:
    """Load a model in float32 and training mode, sharded over all ranks by FSDP2 and expert parallelism; collective.

    With `settings.dtype` bfloat16 FSDP computes in bfloat16 and keeps weights, gradients and optimizer states in
    float32; weights that adapters freeze are in bfloat16. A single rank uses FSDP for that too, so that precision does
    not depend on the number of ranks.

    model_class     an Auto class or a model class of transformers
    model_config    of transformers; dropout and router noise become 0 in it
    num_experts     of a layer, to shard; 0: a dense model
    follows_plans   `relibra.parallel` runs the experts, if any, so that they can follow plans and move
    frozen          hold weights in `settings.dtype`, without gradients, in evaluation mode
    lora            with a rank above 0: adapters are trained, initialized from `seed`, and all else is frozen
    raises          ConfigError for a model that takes no adapters; ValueError if transformers has no sharding plan for
                    this model family, or weights inside of layers are tied
    """
    num_ranks, mixed = dist.get_world_size(), settings.dtype == "bfloat16"
    without_randomness(model_config)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if num_ranks == 1:
        options["device_map"] = {"": device}  # tensor by tensor, so that the host never holds all of them
    else:
        register()
        options["distributed_config"] = DistributedConfig(
            fsdp_size=num_ranks,
            ep_size=num_ranks if num_experts else 1,
            ep_implementation=(NAME if follows_plans else "all_to_all") if num_experts else "auto",
            fsdp_mixed_precision=mixed,
        )
    adapt = partial(add_adapters, rank=lora.rank, alpha=lora.alpha) if lora and lora.rank else None
    held = torch.bfloat16 if mixed and (frozen or adapt) else torch.float32
    with quiet_loading(), tied_before_sharding(adapt), _own_slices(), in_little_memory():
        model = model_class.from_pretrained(path, config=model_config, dtype=held, **options).to(device)
    if adapt:
        if num_ranks == 1:
            adapt(model)
        initialize_adapters(model, seed)
    for target, source in model.all_tied_weights_keys.items():
        assert model.get_parameter(target) is model.get_parameter(source), f"{target} is one parameter with {source}"
    if mixed and num_ranks == 1 and not frozen:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh, layers = init_device_mesh(device.type, (1,)), set(model._no_split_modules or ())
        # Layer by layer, as on several ranks: else bfloat16 weights and gradients of the whole model are there at once.
        for module in [*(one for one in model.modules() if type(one).__name__ in layers), model]:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    return model.eval().requires_grad_(False) if frozen else model.train()


def save_activations(model: nn.Module, how: Literal["recompute", "host", "keep", "plan"]) -> None:
    """Set what a model saves in a forward pass for the backward pass, as `update.activations` says.

    With "plan", layers save their inputs until `keep_activations` sets another choice.
    """
    if how == "keep":
        return
    loaded: Any = model
    loaded.activation_checkpointing_enable({"use_reentrant": False})
    for layer in loaded.modules() if how == "host" else ():
        if run := getattr(layer, "_gradient_checkpointing_func", None):
            layer._gradient_checkpointing_func = partial(_with_inputs_on_host, run)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a model."""
    named = model.named_modules()
    return next(one for name, one in named if name.endswith("layers") and isinstance(one, nn.ModuleList))


def keep_activations(model: nn.Module, option_L: Sequence[str]) -> None:
    """Set what each decoder layer of a model with checkpointing saves: one of `activation_choice.OPTIONS`.

    The flag is of the layer's `forward`, so the hooks of FSDP stay outside of what is recomputed.
    """
    experts = balanced_layers(model) if is_balanced(model) else {}
    for number, (layer, option) in enumerate(zip(decoder_layers(model), option_L, strict=True)):
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ConfigError(
                f"{type(layer).__name__} has no flag of its own that says what it saves (GradientCheckpointingLayer of "
                "transformers): set update.activations=recompute"
            )
        layer.gradient_checkpointing = option == RECOMPUTE
        if number in experts:
            experts[number].recomputes = option == ATTENTION


def _with_inputs_on_host(run: Callable[..., Any], layer: Callable[..., Any], *inputs: Any) -> Any:
    """Run a layer whose hidden states, saved for the backward pass, are in host memory until then."""
    with save_on_cpu(pin_memory=any(isinstance(one, Tensor) and not one.is_cpu for one in inputs)):
        return run(layer, *inputs)


@contextmanager
def tied_before_sharding(adapt: Callable[[nn.Module], None] | None = None) -> Iterator[None]:
    """Tie weights, and add adapters, before transformers shards the models that it loads inside.

    transformers 5.23 ties weights after sharding, when each is a parameter of FSDP2: they then drift apart silently.
    Here tied weights are left to the group of the root module, which sets a parameter in all its places.

    adapt    called before the model is sharded; adapters of experts are sharded as the experts are
    """
    mixin: Any = DistributedMixin
    resolve = mixin._resolve_parallel_plans

    def tie_and_resolve(model: Any, distributed_config: DistributedConfig) -> tuple[dict[str, str], ...]:
        if adapt:
            adapt(model)
        tp_plan, ep_plan, fsdp_plan = resolve(model, distributed_config)
        # The rule of the module would leave adapters whole on each rank.
        ep_plan = {name: "grouped_gemm" if is_adapter(name) else style for name, style in ep_plan.items()}
        # Gemma 4's plan also splits dense layers over ranks; here FSDP shards them, as each rank has its own tokens.
        blocks = tuple(f"{name}." for name, style in ep_plan.items() if style == "ep_dispatch_experts")
        ep_plan = {name: style for name, style in ep_plan.items() if f"{name}.".startswith(blocks)}
        tied = {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}
        for target, source in model.all_tied_weights_keys.items():
            owner, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
        fsdp_plan = {name: style for name, style in fsdp_plan.items() if name not in tied}
        if inside := [owner for owner in tied if any(owner.startswith(f"{name}.") for name in fsdp_plan)]:
            raise ValueError(
                f"{inside[0]} shares weights with another module, and belongs to one that is sharded alone"
            )
        return tp_plan, ep_plan, fsdp_plan

    with patch.object(mixin, "_resolve_parallel_plans", tie_and_resolve):
        yield


@contextmanager
def _own_slices() -> Iterator[None]:
    """Let models that transformers loads inside hold only their slice of each tensor in the files.

    A slice that needs no conversion of its type is a view, which keeps the whole tensor in memory.
    """
    shard = DtensorShardOperation.shard_tensor

    def shard_and_copy(*given: Any, **named: Any) -> Tensor | None:
        found: Tensor | None = shard(*given, **named)
        return found if found is None or found.untyped_storage().nbytes() <= found.nbytes else found.clone()

    with patch.object(DtensorShardOperation, "shard_tensor", shard_and_copy):
        yield


def set_tied(model_config: Any, *, tied: bool) -> None:
    """Set in a transformers configuration whether the output matrix is the input embedding."""
    for section in (model_config, model_config.get_text_config()):
        section.tie_word_embeddings = tied


def without_randomness(model_config: Any) -> Any:
    """Set dropout and router noise to 0 in a transformers configuration, nested ones included, and return it.

    The model in training mode then computes the same as its copy in evaluation mode, as probability ratios assume.
    """
    for section in _sections(model_config):
        for name, value in section.items():
            if type(value) is float and value and _RANDOM_IN_TRAINING.search(name):
                section[name] = 0.0
    return model_config


def with_plain_outputs(model_config: Any) -> list[str]:
    """Turn off what adds outputs or losses to a forward pass in a transformers configuration; return what changed."""
    changed = list[str]()
    for section in _sections(model_config):
        for name, value in section.items():
            adds = value is True and name.lstrip("_").startswith("output_")
            if adds or (name == "return_dict" and value is False):
                section[name] = not value
                changed.append(name.lstrip("_"))
    return changed


def _sections(model_config: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a transformers configuration and of those inside it, each a dictionary to change."""
    settings = model_config if isinstance(model_config, dict) else vars(model_config)
    yield settings
    for value in settings.values():
        if isinstance(value, dict | PreTrainedConfig):
            yield from _sections(value)


def is_balanced(model: nn.Module) -> bool:
    """Return whether `relibra.parallel` runs the experts of a model, so that they can follow plans and move."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    return config is not None and config.ep_size > 1 and config.ep_implementation == NAME


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter by name, gathered in full, experts in logical order; collective, no expert moves.

    Adapters are not among them: they are merged, in float32, into the weights beside which they are trained.
    One full parameter is in memory at a time; every rank must consume all of them.
    """
    yield from merged(model, separate_parameters(model))


def separate_parameters(model: nn.Module, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters as `full_parameters` does, but adapters unmerged; only those whose names are `wanted`."""
    if is_balanced(model):
        yield from logical_parameters(model, wanted)
        return
    reshard(model)
    for name, parameter in model.named_parameters():
        if not wanted or wanted(name):
            yield name, full_tensor(parameter)


def load_parameters(path: str, names: Sequence[str], model_config: Any, settings: ModelSettings) -> dict[str, Tensor]:
    """Return some parameters of a model whole, in float32; nothing else of it is read.

    names   of parameters, at least one
    """
    # transformers would prepare a model on two devices for its forward pass.
    unprepared = patch.object(modeling_utils, "accelerate_dispatch", lambda *_: None)
    with unprepared, loading(f"model.path {path!r}"), quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=torch.float32,
            trust_remote_code=settings.trust_remote_code,
            device_map={"": "meta", **dict.fromkeys(set(names), "cpu")},
        )
    return {name: model.get_parameter(name).detach() for name in names}


def check_shards(sharded: nn.Module, meta: Any, name: str, load: Callable[[Sequence[str]], dict[str, Tensor]]) -> None:
    """Compare loaded shards with the same weights loaded whole; collective.

    transformers converts some parameters when it loads them, and does that shard by shard. What is converted is the
    same in all layers, so one parameter of each kind is compared, by rank 0.

    meta     the same model on the meta device, as it was loaded there
    load     returns parameters by name, in float32, whole
    raises   ConfigError, on all ranks, where one differs
    """
    converters = [one.reverse_transform() for one in (getattr(meta, "_weight_conversions", None) or ())[::-1]]
    converters = [one for one in converters if isinstance(one, WeightConverter)]
    kinds: dict[tuple[str, torch.Size], str] = {}
    for key, parameter in sharded.named_parameters():
        if not is_adapter(key) and apply_converters(key, converters)[1] is not None:
            kinds.setdefault((re.sub(r"\d+", "*", key), parameter.shape), key)
    reads = bool(kinds) and dist.get_rank() == 0
    whole = on_all_ranks(lambda: load(list(kinds.values())) if reads else {})
    full = ((key, full_tensor(sharded.get_parameter(key))) for key in kinds.values())
    differ = [key for key, found in full if reads and not torch.equal(found.cpu(), whole[key].to(found.dtype))]

    def refuse() -> None:
        if differ:
            raise ConfigError(
                f"{name} cannot be sharded: {differ[0]} and {len(differ) - 1} more parameters have other values in "
                "shards than in its files; use parallel.ranks=1, or a model of another family"
            )

    on_all_ranks(refuse)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, and back after it; collective."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)
        reshard(model)  # FSDP keeps the root's weights whole after a pass, and an optimizer would get these


def on_all_ranks(work: Callable[[], T]) -> T:
    """Call a function that may fail on some ranks, and return its result; collective.

    raises   ConfigError, the same on all ranks, if it failed on any
    """
    problem, result = None, None
    try:
        result = work()
    except RelibraError as error:
        problem = str(error)
    wait_for_ranks()
    problems = [each for each in gather_json(problem) if each]
    if problems:
        raise ConfigError(problems[0])
    return result  # type: ignore[return-value]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence bars and load reports of transformers, also when it saves: every rank loads, heads may be missing."""
    transformers_logging.disable_progress_bar()
    # torch warns of two gathers instead of one for expert tensors, once per weight sync.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            # A new value head is initialized at random before it is set to 0.
            warnings.filterwarnings("ignore", message="DTensor random operators")
            yield
    finally:
        transformers_logging.set_verbosity(before)
