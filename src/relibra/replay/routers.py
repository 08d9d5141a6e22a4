"""Routers: the modules of a model that choose experts, in layer order, and whether a pass is a recomputation.

With activation checkpointing the backward pass runs layers and their routers once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers
from jaxtyping import Bool
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.replay.families import REFUSED, RULES
from relibra.replay.gates import GateRule

DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""Matches the number of the decoder layer in a module's name."""
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn|draft)")
"""Heads that predict further tokens; they number their layers from 0 again and are not recorded."""


@dataclass(frozen=True, eq=False)
class RouterSite:
    """One router of a model.

    module       called once per forward pass; returns (logits [T, E], weights [T, K], ids [T, K], ...)
    name         its path in the model
    layer_id     absolute 0-based decoder layer
    num_experts  experts it chooses from, `E`; LongCat counts its zero experts too
    top_k        choices per token, `K`
    rule         how it turns logits into weights
    """

    module: nn.Module
    name: str
    layer_id: int
    num_experts: int
    top_k: int
    rule: GateRule

    def gates(self, output: tuple[Tensor, ...], ids_TK: Tensor) -> Tensor:
        """Return the weights of `ids_TK` from the live scores of a call, in the type of the router's own weights."""
        return self.rule(output[0], ids_TK, output[1].dtype)

    def rule_key(self, output: tuple[Tensor, ...]) -> str:
        """Return what a check of the rule depends on: its parameters, and the types of logits and weights."""
        rule: Any = self.rule
        function, settings = getattr(rule, "func", rule), getattr(rule, "keywords", {})
        values = {name: value for name, value in settings.items() if not isinstance(value, nn.Module)}
        return f"{function.__name__} {values} {output[0].dtype} {output[1].dtype}"

    @torch.no_grad()
    def rule_holds(self, output: tuple[Tensor, ...]) -> Bool[Tensor, ""]:
        """Return whether the router's ids give the router's weights under the rule, bit for bit; on the device."""
        return (self.gates(output, output[2]) == output[1]).all()


class RuleChecks:
    """Checks of gate rules in a pass: each router once per `rule_key`, all read after the pass, in one wait."""

    def __init__(self) -> None:
        """Start without any."""
        self._found: dict[RouterSite, tuple[str, Tensor]] = {}

    def compare(self, site: RouterSite, output: tuple[Tensor, ...]) -> None:
        """Compare the rule with a call of the router, unless it has been checked; nothing is read here."""
        key = site.rule_key(output)
        if getattr(site.module, _CHECKED, None) != key and site not in self._found:
            self._found[site] = key, site.rule_holds(output)

    def read(self) -> None:
        """Read what the comparisons found.

        raises   EngineError when the installed transformers computes the weights of a router differently
        """
        found, self._found = self._found, {}
        answers = torch.stack([holds for _, holds in found.values()]).tolist() if found else []
        for (site, (key, _)), holds in zip(found.items(), answers, strict=True):
            if not holds:
                raise EngineError(
                    f"router {site.name} ({type(site.module).__name__}): relibra's gate rule does not reproduce its "
                    f"weights bit for bit under transformers {transformers.__version__}, so it would train another "
                    "model: run the eager PyTorch router (no replacement kernel), or add its rule to "
                    "relibra.replay.families"
                )
            setattr(site.module, _CHECKED, key)


_CHECKED = "_relibra_rule_checked"
"""Attribute of a router: the key of the last check of its gate rule."""


def find_routers(model: nn.Module) -> tuple[RouterSite, ...]:
    """Return the routers of a model by ascending layer; draft (MTP) layers are left out.

    raises   EngineError for a dense model, an unknown or refused router, two decoders, or layers that differ in E or K
    """
    sites = []
    for name, module in model.named_modules():
        if _DRAFT.search(name):
            continue
        if (family := _known_class(module)) in RULES:
            sites.append(_site(name, module, family))
        elif family in REFUSED:
            raise EngineError(
                f"router {name} ({family}) cannot be replayed: {REFUSED[family]}; "
                "train this model with native routing, or use one of relibra.replay.families.RULES"
            )
    for name in _expert_blocks(model):
        if not any(site.name.startswith(name) for site in sites):
            children = {n: type(m).__name__ for n, m in model.get_submodule(name.removesuffix(".")).named_children()}
            raise EngineError(
                f"module {name.removesuffix('.')!r} holds experts, but none of its parts {children} is one of the "
                f"{len(RULES)} router classes that relibra knows (transformers {transformers.__version__}): "
                "add its gate rule to relibra.replay.families"
            )
    if not sites:
        raise EngineError(
            f"{type(model).__name__} is a dense model: it has no router to record or replay; "
            "pass a Mixture-of-Experts model, or leave replay off"
        )
    sites.sort(key=lambda site: site.layer_id)
    for item, other in pairwise(sites):
        if item.layer_id == other.layer_id:
            raise EngineError(
                f"routers {item.name} and {other.name} both belong to layer {item.layer_id}: "
                "the model holds several decoders; pass the one that you record or train"
            )
        if (item.num_experts, item.top_k) != (other.num_experts, other.top_k):
            raise EngineError(
                f"routers {item.name} and {other.name} choose {item.top_k} of {item.num_experts} and {other.top_k} of "
                f"{other.num_experts} experts: a trace needs the same numbers in all layers, so it cannot be recorded"
            )
    return tuple(sites)


def decoder_of(model: nn.Module, site: RouterSite) -> nn.Module:
    """Return the module that owns the decoder layers; unlike them, it is never checkpointed as a whole."""
    path = site.name[: _layer_of(site.name).start(1) - 1]  # "model.layers"
    return model.get_submodule(path.rpartition(".")[0])


def is_recompute() -> bool:
    """Return whether a backward pass is running, in which only a recomputation runs a router."""
    return torch._C._current_graph_task_id() != -1


def awaits_recompute(logits_TE: Tensor, *, with_grad: bool) -> bool:
    """Return, inside a forward pass, whether the backward pass will recompute the layer of this router.

    A reentrant checkpoint runs its layer without gradients inside a decoder that has them (`with_grad`). A
    non-reentrant one hooks the tensors saved for backward. Offloading of saved tensors uses the same hooks and looks
    like a checkpoint: its backward pass must run inside a replay too, though nothing is recomputed.
    """
    if not torch.is_grad_enabled():
        return with_grad
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return hooked and logits_TE.requires_grad


def _known_class(module: nn.Module) -> str:
    for cls in type(module).__mro__:
        if cls.__name__ in RULES or cls.__name__ in REFUSED:
            return cls.__name__
    return ""


def _site(name: str, module: Any, family: str) -> RouterSite:
    """Return the site of a router; some families name the numbers of experts or choices differently."""
    if family == "Gemma4TextRouter":
        num_experts, top_k = module.config.num_experts, module.config.top_k_experts
    else:
        name_of_number = "n_routed_experts" if hasattr(module, "n_routed_experts") else "num_experts"
        num_experts, top_k = getattr(module, name_of_number), module.top_k
    return RouterSite(
        module=module,
        name=name,
        layer_id=int(_layer_of(name).group(1)),
        num_experts=num_experts,
        top_k=top_k,
        rule=RULES[family](module),
    )


def _layer_of(name: str) -> re.Match[str]:
    match = DECODER_LAYER.search(name)
    if match is None:
        raise EngineError(
            f"router {name!r} has no decoder layer in its name ('layers.<number>.'), so its routes have no layer: "
            "pass the whole model instead of a part of it"
        )
    return match


def _expert_blocks(model: nn.Module) -> Iterator[str]:
    """Yield the path, with a dot at its end, of each module with stacked expert weights."""
    for name, module in model.named_modules():
        path, _, leaf = name.rpartition(".")
        if leaf == "experts" and not _DRAFT.search(name) and any(p.ndim == 3 for p in module.parameters()):
            yield f"{path}." if path else ""
