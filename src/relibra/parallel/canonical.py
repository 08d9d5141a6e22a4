"""Canonical sums: results that do not depend on who computed what, bit for bit (after UniEP, arXiv 2604.19241).

Three things would make bits depend on the plan, and each is fixed here by logical numbers:

- a row of a matrix product depends on how many rows are multiplied together, so each expert multiplies chunks of
  exactly `CHUNK` rows, padded with zeros, always the same rows (`chunked_split`) in a call of the same shapes;
- a weight gradient depends on the order of its sum, so each chunk gives one partial gradient and the home adds them in
  the order of chunks, whoever computed them;
- the sum over a token's choices is made where the token came from, in the order of choices (`dispatch`).

It costs a second forward pass of the experts, padding, and one partial gradient per chunk on the wire and at the home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relibra.parallel.balanced import BalancedEP
from relibra.parallel.replicas.replica_slots import LayerReplicas, parameters_replaced
from relibra.parallel.replicas.transfer import Transfer
from relibra.parallel.rows.rank_tables import RankTables

CHUNK = 128
"""Rows that are multiplied together."""


def num_chunks(rows: int) -> int:
    """Return how many chunks hold so many rows."""
    return -(-rows // CHUNK)


@dataclass(frozen=True, kw_only=True, eq=False)
class CanonicalExperts:
    """The experts of one (layer, micro-batch) on this rank, computed chunk by chunk.

    replicas   of this (layer, micro-batch), on every rank if on any; None: nobody has replicas
    """

    layer: BalancedEP
    tables: RankTables
    replicas: LayerReplicas | None

    def __call__(self, rows_YH: Tensor, homes: dict[str, Tensor]) -> Tensor:
        """Return the results of rows in the order of computation; the backward pass is collective."""
        return _Canonical.apply(self, list(homes), rows_YH, *homes.values())

    def chunks(self, *, of_homes: bool) -> Iterator[tuple[int, slice]]:
        """List (local slot, rows) of the chunks at home, or of those of replicas, slot by slot."""
        start = 0
        for slot, rows in enumerate(self.tables.receive_RP.sum(axis=0).tolist()):
            if (slot < self.tables.num_homes) == of_homes:
                for begin in range(0, rows, CHUNK):
                    yield slot, slice(start + begin, start + min(begin + CHUNK, rows))
            start += rows

    def run(self, weights: dict[str, Tensor], rows_nH: Tensor) -> Tensor:
        """Run one expert `[1, ...]` on one chunk, padded; return the results of its rows."""
        padded_CH = rows_nH.new_zeros((CHUNK, rows_nH.shape[1]))
        padded_CH = torch.cat([rows_nH, padded_CH[len(rows_nH) :]])
        ids_C = torch.zeros(CHUNK, dtype=torch.int64, device=rows_nH.device)
        with parameters_replaced(self.layer.experts, weights):
            return self.layer.run_rows(padded_CH, ids_C, padded_CH.new_ones((CHUNK, 1)))[: len(rows_nH)]

    def gradients(
        self, weights: dict[str, Tensor], rows_nH: Tensor, of_output_nH: Tensor, wanted: list[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of a chunk: of its rows, and its partial ones of the wanted weights `[1, ...]`."""
        with torch.enable_grad():  # autograd enters backward passes without
            rows = rows_nH.detach().requires_grad_()
            leaves = {name: weight.detach().requires_grad_(name in wanted) for name, weight in weights.items()}
            output = self.run(leaves, rows)
        inputs = [rows, *(leaves[name] for name in wanted)]
        of_rows, *of_weights = torch.autograd.grad(output, inputs, of_output_nH.to(output.dtype))
        return of_rows, dict(zip(wanted, of_weights, strict=True))


class _Canonical(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: CanonicalExperts, names: list[str], rows_YH: Tensor, *homes: Tensor) -> Tensor:
        ctx.layer, ctx.names, ctx.autocast = layer, names, _autocast_now(rows_YH.device.type)
        ctx.save_for_backward(rows_YH, *homes)
        output_YH = torch.empty_like(rows_YH)
        weights = dict(zip(names, homes, strict=True))
        for slot, rows in layer.chunks(of_homes=True):
            output_YH[rows] = layer.run(_only(weights, slot), rows_YH[rows])
        if layer.replicas is not None:
            layer.replicas.slots.wait()
            for slot, rows in layer.chunks(of_homes=False):
                spare = slot - layer.tables.num_homes
                output_YH[rows] = layer.run(_only(layer.replicas.slots.weights, spare), rows_YH[rows])
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
        wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needs]
        of_rows_YH = torch.empty_like(rows_YH)
        partials: dict[str, dict[int, Tensor]] = {name: {} for name in wanted}
        if layer.replicas is not None:
            partials = _of_replicas(layer, layer.replicas, rows_YH, gradients[0], of_rows_YH, wanted)
        sums: dict[str, dict[int, Tensor]] = {name: {} for name in wanted}
        for slot, rows in layer.chunks(of_homes=True):
            of_rows_YH[rows], of_weights = layer.gradients(
                _only(weights, slot), rows_YH[rows], gradients[0][rows], wanted
            )
            for name, of_chunk in of_weights.items():
                _add(sums[name], slot, of_chunk[0])
        for name in wanted:
            for n, push in layer.tables.pushes_from_here:
                for of_chunk in partials[name][n]:
                    _add(sums[name], push.home_slot, of_chunk)
        of_homes: list[Tensor | None] = []
        for name, home in weights.items():
            of_home = torch.zeros_like(home) if name in wanted else None
            for slot, total in sums.get(name, {}).items():
                assert of_home is not None, "only wanted gradients are summed"
                of_home[slot] = total
            of_homes.append(of_home)
        return (None, None, of_rows_YH, *of_homes)


def _of_replicas(
    layer: CanonicalExperts,
    replicas: LayerReplicas,
    rows_YH: Tensor,
    gradient_YH: Tensor,
    of_rows_YH: Tensor,
    wanted: list[str],
) -> dict[str, dict[int, Tensor]]:
    """Compute this rank's replicas; return the partial gradients `[chunks, ...]` for its homes, by push."""
    replicas.fill()
    replicas.slots.wait()
    tables, spare_weights = layer.tables, replicas.slots.weights
    rows_of = {push.slot: push.tokens for _, push in tables.pushes_to_here}
    own = {name: {spare: _room(spare_weights[name], n) for spare, n in rows_of.items()} for name in wanted}
    done = dict.fromkeys(rows_of, 0)
    for slot, rows in layer.chunks(of_homes=False):
        spare = slot - tables.num_homes
        of_rows_YH[rows], of_weights = layer.gradients(
            _only(spare_weights, spare), rows_YH[rows], gradient_YH[rows], wanted
        )
        for name, of_chunk in of_weights.items():
            own[name][spare][done[spare]] = of_chunk[0]
        done[spare] += 1
    replicas.next_before()
    transfer = Transfer(tables, replicas.slots.group, replicas.slots.recorder, homewards=True)
    partials: dict[str, dict[int, Tensor]] = {}
    for name in wanted:
        partials[name] = {n: _room(spare_weights[name], push.tokens) for n, push in tables.pushes_from_here}
        transfer.start({n: own[name][push.slot] for n, push in tables.pushes_to_here}, partials[name])
    transfer.finish()
    return partials


def _room(slots: Tensor, rows: int) -> Tensor:
    """Make room for the partial gradients `[chunks, ...]` of so many rows."""
    return slots.new_empty((num_chunks(rows), *slots.shape[1:]))


def _autocast_now(device_type: str) -> Callable[[], torch.autocast]:
    """Return what makes a context of the same automatic casts as now."""
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
    )


def _only(weights: dict[str, Tensor], slot: int) -> dict[str, Tensor]:
    return {name: weight[slot : slot + 1] for name, weight in weights.items()}


def _add(sums: dict[int, Tensor], slot: int, of_chunk: Tensor) -> None:
    wide = of_chunk.to(torch.promote_types(of_chunk.dtype, torch.float32))
    if slot in sums:
        sums[slot] += wide
    else:
        sums[slot] = wide
