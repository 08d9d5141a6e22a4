"""`CanonicalExperts`: sums whose bits do not depend on which rank computed what (after UniEP, arXiv 2604.19241).

Three things would make bits depend on the plan; each gets an order that no plan changes:

- a row of a matrix product depends on how many rows are multiplied together, so each expert multiplies chunks of
  `CHUNK` rows, the last one the rest: a chunk holds the same rows under every plan (`chunked_split`);
- a weight gradient depends on the order of its sum, so each chunk gives one partial gradient and the home adds them in
  the order of chunks, whichever rank computed them;
- the sum over a token's choices is made where the token came from, in the order of choices (`rows/dispatch.py`).

The price: products are of `CHUNK` rows, and each chunk of a replica sends a gradient home. Chunks run one by one: in
one call for several, bits of activation functions depend on where threads and vector registers cut the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP, parameters_replaced
from relibra.parallel.replicas.replica_gradients import LayerReplicas
from relibra.parallel.rows.sorted_rows import one_expert
from relibra.planning.traffic.rank_tables import RankTables

CHUNK = 128
"""Most rows of a matrix product."""
Sums = Literal["fast", "canonical"]
"""Whether sums are added as is fastest, or in an order that no plan changes."""


def chunk_of(sums: Sums) -> int | None:
    """Return the rows of a chunk of canonical sums; None: fast sums. Raises EngineError for any other word."""
    if sums not in get_args(Sums):
        raise EngineError(f"sums is {sums!r}: allowed are {', '.join(get_args(Sums))}")
    return CHUNK if sums == "canonical" else None


class _Chunk(NamedTuple):
    """Rows of one expert that are multiplied together.

    slot     of the expert, local
    rows     of the chunk, among the rows of this rank
    dtype    of their results
    output   where the graph of their results begins
    inputs   where it ends: at the rows, then at the trained weights `[1, ...]`
    """

    slot: int
    rows: slice
    dtype: torch.dtype
    output: GradientEdge
    inputs: list[GradientEdge]

    def gradients(self, of_output_YH: Tensor) -> list[Tensor]:
        """Return the gradients of the inputs; those of weights are partial ones."""
        of_output_XH = of_output_YH[self.rows].to(self.dtype, copy=True)  # aligned alike under every plan
        return list(torch.autograd.grad(self.output, self.inputs, of_output_XH))


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
        return _Canonical.apply(self, list(homes), torch.is_grad_enabled(), rows_YH, *homes.values())

    def chunks(self, *, of_homes: bool) -> Iterator[tuple[int, list[slice]]]:
        """Yield (local slot, rows of its chunks) of homes, or of replicas."""
        start = 0
        for slot, rows in enumerate(self.tables.receive_RP.sum(axis=0).tolist()):
            end = start + rows
            if (slot < self.tables.num_homes) == of_homes:
                yield slot, [slice(begin, min(begin + CHUNK, end)) for begin in range(start, end, CHUNK)]
            start = end

    def weights_of(self, slot: int, homes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights `[1, ...]` of a local slot."""
        if slot < self.tables.num_homes or self.replicas is None:
            return {name: weight[slot : slot + 1] for name, weight in homes.items()}
        return self.replicas.weights_of(slot - self.tables.num_homes)

    def run(
        self, rows_YH: Tensor, homes: dict[str, Tensor], trained: list[str], *, of_homes: bool
    ) -> Iterator[tuple[slice, Tensor, _Chunk | None]]:
        """Yield the rows of each chunk of homes, or of replicas, their results, and the chunk if it has a graph."""
        for slot, chunks in self.chunks(of_homes=of_homes):
            own = {name: weight.detach() for name, weight in self.weights_of(slot, homes).items()}
            leaves = [own[name].requires_grad_() for name in trained]
            for rows in chunks:
                # A copy, aligned alike under every plan, and no leaf: the edge of a leaf would hold its tensor.
                rows_XH = torch.cat([rows_YH[rows], rows_YH[:0].clone().requires_grad_()])
                with parameters_replaced(self.layer.experts, own):
                    one = one_expert(len(rows_XH), rows_XH.device)
                    output_XH = self.layer.run_rows(rows_XH, one, rows_XH.new_ones((len(rows_XH), 1)))
                chunk = None
                if output_XH.requires_grad:
                    inputs = [get_gradient_edge(one) for one in (rows_XH, *leaves)]
                    chunk = _Chunk(slot, rows, output_XH.dtype, get_gradient_edge(output_XH), inputs)
                yield rows, output_XH, chunk


class _Canonical(torch.autograd.Function):
    """Run the experts at home, then the replicas; backward runs the replicas first and sends their gradients home.

    Graphs of chunks hold no tensor: what they save goes to `kept`, and at the end of the forward pass of the layer from
    there to `ctx.save_for_backward`, so that checkpointing drops it and makes it again. `kept` is filled again only
    while the backward pass runs.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: CanonicalExperts, names: list[str], with_backward: bool, rows_YH: Tensor, *homes: Tensor
    ) -> Tensor:
        weights, kept, output_YH = dict(zip(names, homes, strict=True)), list[Tensor](), torch.empty_like(rows_YH)
        trained = [name for name, needs in zip(names, ctx.needs_input_grad[4:], strict=True) if needs]
        ctx.layer, ctx.names, ctx.kept, ctx.chunks = layer, names, kept, {True: [], False: []}
        ctx.trained = {name: (weights[name].shape, weights[name].dtype) for name in trained}

        def keep(tensor: Tensor) -> int:
            kept.append(tensor.detach())
            return len(kept) - 1

        with torch.set_grad_enabled(with_backward), saved_tensors_hooks(keep, kept.__getitem__):
            for of_homes, chunks in ctx.chunks.items():
                if not of_homes and layer.replicas is not None:
                    layer.replicas.wait_for_weights()
                for rows, output_XH, chunk in layer.run(rows_YH.detach(), weights, trained, of_homes=of_homes):
                    output_YH[rows] = output_XH.detach()
                    if chunk is not None:
                        chunks.append(chunk)
        ctx.save_for_backward(*kept)
        kept.clear()
        return output_YH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer: CanonicalExperts = ctx.layer
        ctx.kept.extend(ctx.saved_tensors)
        of_rows_YH, partials = torch.empty_like(gradients[0]), dict[str, dict[int, Tensor]]()
        if layer.replicas is not None:
            partials = _run_replicas_backward(layer, ctx.chunks[False], gradients[0], of_rows_YH, list(ctx.trained))
        sums = {  # rounded once
            name: of_rows_YH.new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
            for name, (shape, dtype) in ctx.trained.items()
        }
        for chunk in ctx.chunks[True]:
            of_rows_YH[chunk.rows], *of_weights = chunk.gradients(gradients[0])
            for total, of_chunk in zip(sums.values(), of_weights, strict=True):
                total[chunk.slot] += of_chunk[0]
        ctx.kept.clear()
        for name, total in sums.items():
            for n, push in layer.tables.pushes_from_here:
                for of_chunk in partials[name][n]:
                    total[push.home_slot] += of_chunk
        of_homes = {name: sums[name].to(dtype) for name, (_, dtype) in ctx.trained.items()}
        return None, None, None, of_rows_YH, *map(of_homes.get, ctx.names)


def _run_replicas_backward(
    layer: CanonicalExperts, chunks: list[_Chunk], gradient_YH: Tensor, of_rows_YH: Tensor, trained: list[str]
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
    for chunk in chunks:
        spare = chunk.slot - tables.num_homes
        of_rows_YH[chunk.rows], *of_weights = chunk.gradients(gradient_YH)
        for name, of_chunk in zip(trained, of_weights, strict=True):
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
