"""Trainings of adapters: on ranks that follow plans, and the slow reference, which makes each W + s B A."""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from relibra.parallel import logical_parameters
from relibra.parallel.adapters import add_adapters, is_adapter
from relibra.rl.model.adapter_values import initialize_adapters
from relibra.rl.model.sharding import tied_before_sharding
from tests.parallel import ranks_at_work, residents, trainings
from tests.parallel.ranks_at_work import Case, load
from tests.replay.tiny_models import tiny_model

RANK, ALPHA = 8, 16.0


def load_adapted(case: Case, folder) -> nn.Module:
    """Load a model with adapters over all ranks."""
    with tied_before_sharding(partial(add_adapters, rank=RANK, alpha=ALPHA)):
        model = load(case, folder)
    initialize_adapters(model, seed=0)
    return model


class MergedModel(nn.Module):
    """A plain model that computes with W + s B A, whose A and B are trained."""

    def __init__(self, family: str) -> None:
        super().__init__()
        adapted = tiny_model(family)
        add_adapters(adapted, RANK, ALPHA)
        initialize_adapters(adapted, seed=0)
        self.model = tiny_model(family).train().requires_grad_(False)
        named = [(name, p) for name, p in adapted.named_parameters() if is_adapter(name)]
        self.names = [name for name, _ in named]
        self.adapters = nn.ParameterList([p.detach().clone() for _, p in named])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return W + s B A by the name of W."""
        found, weights = dict(zip(self.names, self.adapters, strict=True)), {}
        for name, weight in self.model.named_parameters():
            before = name.removesuffix("weight") if f"{name.removesuffix('weight')}lora_A" in found else f"{name}_"
            if f"{before}lora_A" in found:
                change = ALPHA / RANK * found[f"{before}lora_B"] @ found[f"{before}lora_A"]
                weights[name] = weight + (change if change.shape == weight.shape else change.transpose(1, 2))
        assert 2 * len(weights) == len(found)
        return weights

    def forward(self, *args, **settings):
        return functional_call(self.model, self.weights(), args, settings)

    def named_parameters(self, *_args, **_settings):
        yield from zip(self.names, self.adapters, strict=True)


def train_on_rank(case: Case, folder) -> dict:
    """Train under plans, as `residents` does where slots are resident; only adapters come back."""
    work = residents if case.plan.resident else trainings
    only = partial(logical_parameters, wanted=is_adapter)
    with mock.patch.object(work, "load", load_adapted), mock.patch.object(work, "logical_parameters", only):
        return work.train_on_rank(case, folder)


def train_merged(case: Case) -> dict:
    """The reference."""
    work = residents if case.plan.resident else trainings
    with mock.patch.object(work, "tiny_model", MergedModel):
        return work.train_dense(case)


class WeightGradients(TorchDispatchMode):
    """Collects the shapes of stacked weights that grouped products return: gradients of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if "grouped_mm" in str(func) and found.ndim == 3:
            self.shapes.add(tuple(found.shape))
        return found


def gradients_on_rank(case: Case, folder) -> dict:
    """Do a step; return the shapes of expert gradients that were computed, and which parameters have one."""
    with mock.patch.object(ranks_at_work, "load", load_adapted), WeightGradients() as products:
        found = ranks_at_work.step_on_rank(case, folder)
    trained = {name for name, gradient in found["gradients"].items() if gradient is not None}
    return {"shapes": products.shapes, "trained": trained}
