"""`CanonicalExperts`: sums whose bits do not depend on which rank computed what (after UniEP, arXiv 2604.19241).

Three things would make bits depend on the plan; each gets an order that no plan changes:

- a row of a matrix product depends on how many rows are multiplied together, so each expert multiplies chunks of
  exactly `CHUNK` rows, padded with zeros: always the same rows (`chunked_split`) in a call of the same shapes;
- a weight gradient depends on the order of its sum, so each chunk gives one partial gradient and the home adds them in
  the order of chunks, whichever rank computed them;
- the sum over a token's choices is made where the token came from, in the order of choices (`rows/dispatch.py`).

The price: experts run forward twice, padding is computed, and each chunk of a replica sends a gradient home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP, parameters_replaced
from relibra.parallel.replicas.replica_gradients import LayerReplicas
from relibra.parallel.rows.sorted_rows import one_expert
from relibra.planning.traffic.rank_tables import RankTables

CHUNK = 128
"""Rows of a matrix product."""
Sums = Literal["fast", "canonical"]
"""Whether sums are added as is fastest, or in an order that no plan changes."""


def chunk_of(sums: Sums) -> int | None:
    """Return the rows of a chunk of canonical sums; None: fast sums. Raises EngineError for any other word."""
    if sums not in get_args(Sums):
        raise EngineError(f"sums is {sums!r}: allowed are {', '.join(get_args(Sums))}")
    return CHUNK if sums == "canonical" else None


@dataclass(frozen=True, kw_only=True, eq=False)
class CanonicalExperts:
    """The experts of one (layer, micro-batch) on this rank, computed chunk by chunk.

    replicas   set on all ranks if any rank has replicas of this layer in this micro-batch, else None
    """

    layer: BalancedEP
    tables: RankTables
    replicas: LayerReplicas | None

    def __call__(self, rows_YH: Tensor, homes: dict[str, Tensor]) -> Tensor:
        """Return the unweighted results of rows in the order of computation; the backward pass is collective."""
        return _Canonical.apply(self, list(homes), rows_YH, *homes.values())

    def chunks(self, *, of_homes: bool) -> Iterator[tuple[int, slice]]:
        """Yield (local slot, rows) of the chunks of homes, or of those of replicas, slot by slot."""
        start = 0
        for slot, rows in enumerate(self.tables.receive_RP.sum(axis=0).tolist()):
            if (slot < self.tables.num_homes) == of_homes:
                for begin in range(0, rows, CHUNK):
                    yield slot, slice(start + begin, start + min(begin + CHUNK, rows))
            start += rows

    def run(self, weights: dict[str, Tensor], rows_XH: Tensor) -> Tensor:
        """Run one expert `[1, ...]` on one chunk, padded; return the results of its rows."""
        zeros_YH = rows_XH.new_zeros((CHUNK, rows_XH.shape[1]))
        padded_YH = torch.cat([rows_XH, zeros_YH[len(rows_XH) :]])
        rows = one_expert(CHUNK, rows_XH.device)
        with parameters_replaced(self.layer.experts, weights):
            return self.layer.run_rows(padded_YH, rows, padded_YH.new_ones((CHUNK, 1)))[: len(rows_XH)]

    def gradients(
        self, weights: dict[str, Tensor], rows_XH: Tensor, of_output_XH: Tensor, trained: list[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of a chunk: of its rows, and its partial ones of the trained weights `[1, ...]`."""
        with torch.enable_grad():  # backward passes run without
            rows = rows_XH.detach().requires_grad_()
            leaves = {name: weight.detach().requires_grad_(name in trained) for name, weight in weights.items()}
            output = self.run(leaves, rows)
        inputs = [rows, *(leaves[name] for name in trained)]
        of_rows, *of_weights = torch.autograd.grad(output, inputs, of_output_XH.to(output.dtype))
        return of_rows, dict(zip(trained, of_weights, strict=True))


class _Canonical(torch.autograd.Function):
    """Run the experts at home, then the replicas; backward runs the replicas first and sends their gradients home."""

    @staticmethod
    def forward(ctx: Any, layer: CanonicalExperts, names: list[str], rows_YH: Tensor, *homes: Tensor) -> Tensor:
        ctx.layer, ctx.names, ctx.autocast = layer, names, _autocast_now(rows_YH.device.type)
        ctx.save_for_backward(rows_YH, *homes)
        output_YH = torch.empty_like(rows_YH)
        weights = dict(zip(names, homes, strict=True))
        for slot, rows in layer.chunks(of_homes=True):
            output_YH[rows] = layer.run(_only(weights, slot), rows_YH[rows])
        if layer.replicas is not None:
            layer.replicas.wait_for_weights()
            for slot, rows in layer.chunks(of_homes=False):
                weights = layer.replicas.weights_of(slot - layer.tables.num_homes)
                output_YH[rows] = layer.run(weights, rows_YH[rows])
        return output_YH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.autocast():  # the experts run forward once more
            return _Canonical._backward(ctx, *gradients)

    @staticmethod
    def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer: CanonicalExperts = ctx.layer
        rows_YH, *homes = ctx.saved_tensors
        weights = dict(zip(ctx.names, homes, strict=True))
        trained = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needs]
        of_rows_YH = torch.empty_like(rows_YH)
        partials: dict[str, dict[int, Tensor]] = {name: {} for name in trained}
        if layer.replicas is not None:
            partials = _run_replicas_backward(layer, rows_YH, gradients[0], of_rows_YH, trained)
        sums: dict[str, dict[int, Tensor]] = {name: {} for name in trained}
        for slot, rows in layer.chunks(of_homes=True):
            of_rows_YH[rows], of_weights = layer.gradients(
                _only(weights, slot), rows_YH[rows], gradients[0][rows], trained
            )
            for name, of_chunk in of_weights.items():
                _add(sums[name], slot, of_chunk[0])
        for name in trained:
            for n, push in layer.tables.pushes_from_here:
                for of_chunk in partials[name][n]:
                    _add(sums[name], push.home_slot, of_chunk)
        of_homes: list[Tensor | None] = []
        for name, home in weights.items():
            of_home = torch.zeros_like(home) if name in trained else None
            for slot, total in sums.get(name, {}).items():
                assert of_home is not None, "only trained weights have sums"
                of_home[slot] = total
            of_homes.append(of_home)
        return (None, None, of_rows_YH, *of_homes)


def _run_replicas_backward(
    layer: CanonicalExperts, rows_YH: Tensor, gradient_YH: Tensor, of_rows_YH: Tensor, trained: list[str]
) -> dict[str, dict[int, Tensor]]:
    """Run the backward pass of this rank's replicas and return their gradients home; collective.

    of_rows_YH   receives the gradients of the rows of replicas
    returns      partial gradients `[chunks, ...]` for the homes of this rank, by parameter and push
    """
    replicas = layer.replicas
    assert replicas is not None, "the caller looked"
    replicas.refill()
    tables, like = layer.tables, replicas.buffer.weights
    rows_of = {push.slot: push.tokens for _, push in tables.pushes_to_here}
    own = {name: {spare: _empty_partials(like[name], n) for spare, n in rows_of.items()} for name in trained}
    done = dict.fromkeys(rows_of, 0)
    for slot, rows in layer.chunks(of_homes=False):
        spare = slot - tables.num_homes
        of_rows_YH[rows], of_weights = layer.gradients(
            replicas.weights_of(spare), rows_YH[rows], gradient_YH[rows], trained
        )
        for name, of_chunk in of_weights.items():
            own[name][spare][done[spare]] = of_chunk[0]
        done[spare] += 1
    replicas.schedule.after_gradients(replicas.position)
    transfer = replicas.returns.transfer(tables.pushes)
    partials: dict[str, dict[int, Tensor]] = {}
    for name in trained:
        partials[name] = {n: _empty_partials(like[name], push.tokens) for n, push in tables.pushes_from_here}
        transfer.start({n: own[name][push.slot] for n, push in tables.pushes_to_here}, partials[name])
    transfer.finish()
    return partials


def _empty_partials(slots: Tensor, rows: int) -> Tensor:
    """Return an empty tensor for the partial gradients `[chunks, ...]` of this many rows."""
    return slots.new_empty((-(-rows // CHUNK), *slots.shape[1:]))


def _autocast_now(device_type: str) -> Callable[[], torch.autocast]:
    """Return a function that makes a context with the current autocast settings."""
    dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    return partial(torch.autocast, device_type, dtype=dtype, enabled=enabled)


def _only(weights: dict[str, Tensor], slot: int) -> dict[str, Tensor]:
    return {name: weight[slot : slot + 1] for name, weight in weights.items()}


def _add(sums: dict[int, Tensor], slot: int, of_chunk: Tensor) -> None:
    wide = of_chunk.to(torch.promote_types(of_chunk.dtype, torch.float32))
    if slot in sums:
        sums[slot] += wide
    else:
        sums[slot] = wide
