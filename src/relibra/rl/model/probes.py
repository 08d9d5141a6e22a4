"""Probes of a loaded model, a few tokens each: what it computes for a sequence depends on that sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from relibra.engine.forward import run_model
from relibra.engine.kv_cache import Room, SlottedCache
from relibra.errors import ConfigError
from relibra.parallel.homes.logical_order import reshard
from relibra.rl.model.packed_sequences import (
    LENGTH,
    NOISE,
    change_of,
    compute_dtype,
    last_logits,
    probe_tokens,
    same_logits,
)
from relibra.rl.model.sharding import on_all_ranks

_REPEATED = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Largest change by rounding (sums in another order) in passes of one shape, relative to the standard deviation."""
_ROUNDED = 3
"""Other passes may differ by so many times what two equal passes do."""
_SHORT = range(LENGTH)


def check_modes(model: nn.Module, name: str, dtype: str, modes: Sequence[bool] = (False, False, True, True)) -> None:
    """Check that passes of a model agree, twice in evaluation mode and twice in training mode; collective.

    With randomness (dropout, noise of routers), the model that trains would differ from the one that samples.

    dtype    of the forward pass
    modes    of the passes; True: training. The first two tell what rounding changes: kernels on GPUs add in any order
    raises   ConfigError, the same on all ranks, naming the module that computes otherwise
    """
    before, kind = model.training, getattr(torch, dtype)
    first, *others = [last_logits(model.train(mode), (0, _SHORT)) for mode in modes]
    changes = np.array([change_of(first, one) for one in others])
    noise = min(NOISE[kind], max(_REPEATED[kind], _ROUNDED * changes[0]))
    agree = [*(changes[:1] <= NOISE[kind]), *(changes[1:] <= noise)]
    if not all(agree):
        calls, again = (_trace(model.train(mode)) for mode in (modes[0], modes[1 + agree.index(False)]))
        pairs = zip(calls, again, strict=False)
        where = next((at for (at, one), (_, other) in pairs if not (one - other).norm() <= noise * one.norm()), "")
        module = f"{where} ({type(model.get_submodule(where)).__name__.removeprefix('FSDP')})"
        why = f"{module} is random, or computes otherwise in training mode: turn it off in config.json"
        on_all_ranks(lambda: _refuse(name, why))
    model.train(before)
    reshard(model)  # FSDP keeps the root's weights whole after a pass, and an optimizer would get these


def _trace(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the values of each call in a pass, with the module that made them; inputs are made by the parent."""
    calls = list[tuple[str, Tensor]]()

    def note(name: str, values: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        calls.extend((name, leaf.detach().float().cpu()) for leaf in leaves)

    handles = []
    for name, module in model.named_modules():
        around = name.rpartition(".")[0]
        handles += [
            module.register_forward_pre_hook(lambda _, *inputs, at=around: note(at, inputs), with_kwargs=True),
            module.register_forward_hook(lambda _, __, output, at=name: note(at, output)),
        ]
    last_logits(model, (0, _SHORT))
    for handle in handles:
        handle.remove()
    return calls


def check_lengths(model: nn.Module, longest: int, name: str, *, decodes: bool = True) -> None:
    """Check that a sequence is computed alike alone, packed, beside long ones, from a cache, and again afterwards.

    Collective.

    model     in evaluation mode
    longest   tokens of a sequence of the run
    decodes   it samples with a cache here, and not in a server
    raises    ConfigError, on all ranks
    """
    noise, alone = _REPEATED[compute_dtype(model)], last_logits(model, (2, _SHORT))
    text = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if not getattr(text, "rope_parameters", None):  # learned positions: a table that ends
        longest = min(longest, getattr(text, "max_position_embeddings", None) or longest)

    # Others in the row change rounding, and by it the choice of experts; `mixes_sequences` has limited how much.
    noise = max(noise, 2 * change_of(_beside(model, LENGTH), last_logits(model, (1, _SHORT), (2, _SHORT))))

    def fits(length: int) -> bool:
        return change_of(_beside(model, LENGTH), _beside(model, length)) <= noise  # the short first pass resets rope

    if longest > LENGTH and not fits(longest):
        most, too_long = LENGTH, longest
        while too_long - most > 1:
            middle = (most + too_long) // 2
            most, too_long = (middle, too_long) if fits(middle) else (most, middle)
        _refuse(
            name,
            f"a sequence of more than {most} tokens changes what is computed for shorter ones, beside it and from a "
            f"cache (rope that depends on the length), and this run has up to {longest}: lower rollout.max_prompt and "
            f"rollout.max_response to {most} together",
        )
    if not same_logits(model, alone, _beside(model, LENGTH)):
        _refuse(name, "it computes otherwise for a sequence alone than behind another in its row")
    if change_of(alone, last_logits(model, (2, _SHORT))) > noise:
        _refuse(name, "what it computes depends on the passes before")
    if decodes and not same_logits(model, alone, _from_cache(model)):
        _refuse(name, "it computes otherwise with keys and values in a cache than without")


def _beside(model: nn.Module, length: int) -> Tensor:
    """Return the logits of a short sequence behind another, whose positions end as those of `length` tokens do."""
    return last_logits(model, (0, [0, *range(length - LENGTH + 1, length)]), (2, _SHORT))


@torch.no_grad()
def _from_cache(model: nn.Module) -> Tensor:
    """Return the logits of a sequence alone, from a cache; its second half is fed token by token."""
    input_1N, cache = probe_tokens(model, [2]), SlottedCache(model.config, Room(1, LENGTH))
    ends, seen_1N = [0, *_SHORT[LENGTH // 2 :], LENGTH], torch.ones_like(input_1N, dtype=torch.bool)
    pieces = [slice(start, end) for start, end in pairwise(ends)]
    return torch.cat([run_model(model, input_1N[:, p], seen_1N[:, : p.stop], cache, last=0)[0] for p in pieces]).float()


def _refuse(name: str, why: str) -> NoReturn:
    raise ConfigError(f"{name} cannot be trained: {why}; or use another model")
