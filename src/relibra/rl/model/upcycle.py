"""Grow a mixture-of-experts model: copy experts and router rows (Expert Upcycling, arXiv 2604.19835; ideas only).

Sizes are learned, not listed: a model of the larger configuration is built, and each tensor that differs from the old
one in one axis, E long, takes the entries of the copied experts. A copy is a new expert, not a replica of a plan.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from relibra.errors import ConfigError, EngineError
from relibra.replay.record import record_routing
from relibra.replay.routers import DECODER_LAYER, find_routers

MOST_COPIES = 3
"""Of an expert, itself included."""
NOISE = 1e-3
"""Largest noise on the router bias of a copy or, without biases, on its router row / the mean absolute weight;
more where the type would round it away. Twins with equal rows and gates never part."""
ROUNDING = 1e-5
"""Largest relative change of the logits of a model that keeps its function."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names in configurations."""


def copies_by_utility(utility_E: Sequence[float], experts: int) -> list[int]:
    """Return how often each expert occurs: one by one, the expert with the highest utility per copy gets another.

    experts   in all, at most `MOST_COPIES` of each; ties: the first expert

    >>> copies_by_utility([1.0, 9.0, 4.0], 6)
    [1, 3, 2]
    """
    copies_E = [1] * len(utility_E)
    while sum(copies_E) < experts:
        open_E = [e for e, copies in enumerate(copies_E) if copies < MOST_COPIES]
        copies_E[max(open_E, key=lambda e: (utility_E[e] / copies_E[e], -e))] += 1
    return copies_E


def expert_utility(model: Any, batches: Sequence[Tensor]) -> Float64[Tensor, "L E"]:
    """Return the squared norm of the gradient of each expert, mean over batches of token ids [1, T]."""
    sites = find_routers(model)
    row_of = {site.layer_id: row for row, site in enumerate(sites)}
    utility_LE = torch.zeros(len(sites), sites[0].num_experts, dtype=torch.float64)
    for ids_1T in batches:
        model.zero_grad()
        model(input_ids=ids_1T, labels=ids_1T, use_cache=False).loss.backward()
        for name, weight in model.named_parameters():
            if ".experts." in name and weight.grad is not None and (layer := DECODER_LAYER.search(name)):
                utility_LE[row_of[int(layer[1])]] += weight.grad.double().square().flatten(1).sum(dim=1)
    model.zero_grad()
    return utility_LE / len(batches)


def grow(model: Any, copies_LE: Sequence[Sequence[int]], *, top_k: int | None = None, seed: int = 0) -> Any:
    """Return a model with copies of experts, each behind its source.

    copies_LE  how often each expert of each expert layer occurs; the sums are equal
    top_k      choices per token; None: as before, and router rows of copies get noise
    raises     EngineError for a family whose configuration or tensors do not show the number of experts
    """
    sites = find_routers(model)
    E, experts, chosen = sites[0].num_experts, sum(copies_LE[0]), top_k or sites[0].top_k
    config, family = copy.deepcopy(model.config), type(sites[0].module).__name__
    for names, old, new in ((_EXPERTS, E, experts), (_CHOICES, sites[0].top_k, chosen)):
        for name in names:
            if getattr(config, name, None) == old:
                setattr(config, name, new)
    grown = type(model)(config)
    if {(site.num_experts, site.top_k) for site in find_routers(grown)} != {(experts, chosen)}:
        raise EngineError(f"models with router {family} do not grow: their configuration names experts in another way")
    sources = {
        site.layer_id: (torch.repeat_interleave(torch.arange(E), torch.tensor(copies_E)), f"{site.name}.")
        for site, copies_E in zip(sites, copies_LE, strict=True)
    }
    held, state, random = model.state_dict(), {}, torch.Generator().manual_seed(seed)
    biased = any(name.startswith(f"{sites[0].name}.") and "bias" in name for name in held)
    for name, new in grown.state_dict().items():
        old, layer = held.get(name), DECODER_LAYER.search(name)
        if old is not None and old.shape != new.shape and layer and int(layer[1]) in sources:
            source_P, router = sources[int(layer[1])]
            axes = [axis for axis, sizes in enumerate(zip(old.shape, new.shape, strict=True)) if sizes == (E, experts)]
            old = old.index_select(axes[0], source_P) if axes else old
            if axes and top_k is None and name.startswith(router) and ("bias" in name or not biased):
                copy_P = torch.nonzero(torch.diff(source_P, prepend=source_P[:1] - 1) == 0).flatten()
                rows = old.index_select(axes[0], copy_P)
                least = NOISE * (1.0 if biased else float(old.abs().mean()))
                size = (2 * torch.finfo(old.dtype).eps * rows.float().abs()).clamp(min=least)
                noise = 2 * torch.rand(rows.shape, generator=random) - 1
                noise = size * (noise + noise.sign()) / 2  # none is so small that it is rounded away
                old.index_copy_(axes[0], copy_P, (rows.float() + noise).to(old.dtype))
        if old is None or old.shape != new.shape:
            raise EngineError(f"models with router {family} do not grow: tensor {name} has no axis of {E} experts")
        state[name] = old
    grown.load_state_dict(state, assign=True)  # each tensor keeps its type: families hold some in float32
    grown.tie_weights()
    return grown.eval()


class Growth(NamedTuple):
    """What growth changed on some tokens.

    twin_tokens     share of tokens and layers with at least two copies of one expert among the choices
    twin_choices    share of choices with another copy among the choices of the token
    output_change   relative change of the logits
    """

    twin_tokens: float
    twin_choices: float
    output_change: float


@torch.no_grad()
def measure_growth(model: Any, grown: Any, copies_LE: Sequence[Sequence[int]], ids_1T: Tensor) -> Growth:
    """Return what growth changed on a sequence."""
    before = model(input_ids=ids_1T, use_cache=False).logits
    with record_routing(grown) as recorder:
        change = grown(input_ids=ids_1T, use_cache=False).logits - before
    (ids_TLK,) = recorder.take()
    source_LP = torch.stack([torch.arange(len(one)).repeat_interleave(torch.tensor(one)) for one in copies_LE])
    source_LTK = source_LP[torch.arange(len(source_LP))[:, None, None], ids_TLK.long().transpose(0, 1)]
    paired_LTK = (source_LTK[..., :, None] == source_LTK[..., None, :]).sum(dim=-1) > 1
    tokens, choices = (float(pairs.double().mean()) for pairs in (paired_LTK.any(dim=-1), paired_LTK))
    return Growth(tokens, choices, float(change.norm() / before.norm()))


def check_kept(model: nn.Module, growth: Growth) -> None:
    """Raise ConfigError where doubled choices change the output."""
    if not growth.output_change <= ROUNDING:  # also where it is not a number
        family = type(find_routers(model)[0].module).__name__
        raise ConfigError(
            f"--keep-function: with router {family} more choices change the output by {growth.output_change:.2g} (at "
            f"most {ROUNDING:g}), for its gates or groups do not share a choice among copies: leave it out"
        )
