"""`StepBytes`: bytes that ranks send each other in a step, by kind, inside nodes and between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from numpy import ndarray

from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.layer_costs import LayerCosts
from relibra.planning.placement import Homes


class LinkBytes(NamedTuple):
    """Bytes sent to ranks of the own node, and to those of other nodes."""

    inside: float = 0.0
    between: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes inside and between nodes."""
        return self.inside + self.between


class StepBytes(NamedTuple):
    """Bytes of all ranks; what comes from host memory is not sent.

    rows        hidden states and their gradients: dispatch and combine, forwarded rows each time that they are sent
    gates       gate weights and their gradients
    weights     pushed to replicas, before forward and again before backward
    gradients   of replicas, sent home
    moves       state of experts with a new home rank, in full
    """

    rows: LinkBytes = LinkBytes()
    gates: LinkBytes = LinkBytes()
    weights: LinkBytes = LinkBytes()
    gradients: LinkBytes = LinkBytes()
    moves: LinkBytes = LinkBytes()

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Return the bytes by kind and link, for JSON."""
        return {kind: links._asdict() for kind, links in self._asdict().items()}


def sent_bytes(
    costs: LayerCosts, row_bytes: int, gate_bytes: int, *, trained: bool = True, recomputed: bool = False
) -> StepBytes:
    """Return the bytes of rows, gate weights and copies.

    row_bytes, gate_bytes   of one hidden state, and of one gate weight
    trained                 there is a backward pass
    recomputed              layers run forward again in the backward pass
    """
    exchange, push, back = costs.exchange, costs.push, costs.gradients
    passes, sent, network = 1 + trained + (trained and recomputed), push.sent_MLR, push.network_sent_MLR
    if trained:
        sent, network = sent + costs.push_again.sent_MLR, network + costs.push_again.network_sent_MLR
    return StepBytes(
        rows=_links(2 * passes * row_bytes, exchange.out_MLR, exchange.network_out_MLR),
        gates=_links(passes * gate_bytes, exchange.gates_out_MLR, exchange.cross_node_ML),
        weights=_links(push.bytes_each, sent, network),
        gradients=_links(trained * back.bytes_each, back.sent_MLR, back.network_sent_MLR),
    )


def moved_bytes(before: Homes, after: Homes, expert: ExpertShape) -> LinkBytes:
    """Return the bytes of the state of experts whose home rank changes."""
    crosses_LE = before.home_LE // after.ranks_per_node != after.home_LE // after.ranks_per_node
    return _links(expert.state_bytes, before.home_LE != after.home_LE, crosses_LE)


def add_bytes(parts: Iterable[StepBytes]) -> StepBytes:
    """Return the sum over parts, kind by kind and link by link."""
    return StepBytes(*(LinkBytes(*map(sum, zip(*links, strict=True))) for links in zip(*parts, strict=True)))


def _links(bytes_each: int, count: ndarray, between: ndarray) -> LinkBytes:
    crossing = float(between.sum())
    return LinkBytes(bytes_each * (float(count.sum()) - crossing), bytes_each * crossing)
