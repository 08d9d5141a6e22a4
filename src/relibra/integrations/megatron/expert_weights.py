"""Weights of single experts in Megatron's experts modules, and of replicas: pushed before a layer runs.

Gradients of replicas return when the layer has run backward. One autograd function does both. Rows and their gates
pass through it, so that its backward pass comes after that of the dispatch on every rank: ranks that wait for a
gradient do not keep others waiting for rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from relibra.errors import EngineError
from relibra.planning.traffic.rank_tables import RankTables


class ExpertParameter(NamedTuple):
    """A parameter of one local expert: attribute of the module that owns it, and its name within the expert."""

    owner: nn.Module
    attribute: str
    name: str

    @property
    def tensor(self) -> nn.Parameter:
        """Return the parameter."""
        return getattr(self.owner, self.attribute)


def expert_parameters(experts: Any, slot: int) -> list[ExpertParameter]:
    """Return the parameters of a local expert, in the same order for all of them.

    `SequentialMLP` has a module per expert; `TEGroupedMLP` numbers the parameters of its two linears (`weight3`).

    raises   EngineError for other modules
    """
    if hasattr(experts, "local_experts"):
        found = [
            ExpertParameter(module, attribute, f"{prefix}.{attribute}")
            for prefix, module in experts.local_experts[slot].named_modules()
            for attribute, _ in module.named_parameters(recurse=False)
        ]
    else:
        found = [
            ExpertParameter(getattr(experts, linear), f"{kind}{slot}", f"{linear}.{kind}")
            for linear in ("linear_fc1", "linear_fc2")
            for kind in ("weight", "bias")
            if f"{kind}{slot}" in getattr(experts, linear, nn.Module())._parameters
        ]
    if not found:
        raise EngineError(
            f"experts of type {type(experts).__name__} are not known to relibra: use SequentialMLP or TEGroupedMLP "
            "(without moe_single_grouped_weight)"
        )
    return found


@contextmanager
def weights_replaced(by: Iterable[tuple[ExpertParameter, Tensor]]) -> Iterator[None]:
    """Run experts with other weights, as attributes of their modules; these hide the parameters, which stay there."""
    replaced = [(parameter.owner.__dict__, parameter.attribute, tensor) for parameter, tensor in by]
    for attributes, name, tensor in replaced:
        attributes[name] = tensor
    try:
        yield
    finally:
        for attributes, name, _ in replaced:
            attributes.pop(name, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaExchange:
    """Pushes of one layer and micro-batch that concern this rank.

    tables    of this rank
    group     expert-parallel
    like      parameters of one expert, in the order in which they travel
    """

    tables: RankTables
    group: dist.ProcessGroup
    like: Sequence[Tensor]

    @property
    def pushed_slots(self) -> list[int]:
        """Return the home slots whose experts are pushed from here, ascending."""
        return sorted({push.home_slot for _, push in self.tables.pushes_from_here})

    def travel(self, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[Tensor]], *, homewards: bool) -> None:
        """Send and receive tensors by number of the push; returns when all have arrived."""
        operations = []
        for n in sorted(outgoing.keys() | incoming.keys()):
            push, sends = self.tables.pushes[n], n in outgoing
            operation = dist.isend if sends else dist.irecv
            peer = push.home if sends == homewards else push.replica
            for part, tensor in enumerate(outgoing.get(n, []) + incoming.get(n, [])):
                tag = n * len(self.like) + part
                operations.append(dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=peer))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()


class PushReplicas(torch.autograd.Function):
    """Returns rows, their gates and pushed parameters as they are, then the parameters of this rank's replicas."""

    @staticmethod
    def forward(
        ctx: Any, exchange: ReplicaExchange, hidden: Tensor, probs: Tensor, _anchor: Tensor, *pushed: Tensor
    ) -> Any:
        """Return (hidden, probs, *pushed, *received); a collective of the ranks that push or receive.

        anchor     any parameter of the experts: if it needs gradients, replicas do, also on ranks that push nothing
        pushed     parameters of the experts of `pushed_slots`, by slot, then in the order of `like`
        received   those of the filled replica slots, likewise
        """
        ctx.exchange, width = exchange, len(exchange.like)
        of_slot = {slot: list(pushed[i * width : (i + 1) * width]) for i, slot in enumerate(exchange.pushed_slots)}
        outgoing = {
            n: [t.detach().contiguous() for t in of_slot[p.home_slot]] for n, p in exchange.tables.pushes_from_here
        }
        incoming = {n: [torch.empty_like(t) for t in exchange.like] for n, _ in exchange.tables.pushes_to_here}
        exchange.travel(outgoing, incoming, homewards=False)
        received = [tensor for n, _ in exchange.tables.pushes_to_here for tensor in incoming[n]]
        return (hidden.view_as(hidden), probs.view_as(probs), *(t.view_as(t) for t in pushed), *received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of the inputs; those of pushed parameters include the gradients of their replicas."""
        exchange, width = ctx.exchange, len(ctx.exchange.like)
        d_hidden, d_probs, *rest = gradients
        slots = exchange.pushed_slots
        d_pushed, d_received = rest[: len(slots) * width], rest[len(slots) * width :]
        outgoing = {
            n: [t.contiguous() for t in d_received[i * width : (i + 1) * width]]
            for i, (n, _) in enumerate(exchange.tables.pushes_to_here)
        }
        first = {slot: i * width for i, slot in enumerate(slots)}
        incoming = {
            n: [torch.empty_like(t) for t in d_pushed[first[p.home_slot] :][:width]]
            for n, p in exchange.tables.pushes_from_here
        }
        exchange.travel(outgoing, incoming, homewards=True)
        sums = [t.clone() for t in d_pushed]
        for n, push in exchange.tables.pushes_from_here:  # in the order of pushes: the same bits in every run
            for part, tensor in enumerate(incoming[n]):
                sums[first[push.home_slot] + part] += tensor
        return (None, d_hidden, d_probs, None, *sums)
