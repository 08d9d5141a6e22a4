"""`StepBytes`: bytes that ranks send each other in a step, by kind, inside nodes and between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from relibra.planning.costs.copies import CopyCosts
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.layer_costs import LayerCosts
from relibra.planning.placement import Homes


class LinkBytes(NamedTuple):
    """Bytes sent to ranks of the own node, and to those of other nodes."""

    inside: float = 0.0
    between: float = 0.0

    @property
    def total(self) -> float:
        """Return the bytes of both links."""
        return self.inside + self.between


NOTHING = LinkBytes()


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of all ranks; what comes from host memory is not sent.

    rows        hidden states and their gradients: dispatch and combine, forwarded rows each time that they are sent
    gates       gate weights and their gradients
    weights     pushed to replicas, before forward and again before backward
    gradients   of replicas, sent home
    moves       state of experts with a new home rank, in full
    """

    rows: LinkBytes = NOTHING
    gates: LinkBytes = NOTHING
    weights: LinkBytes = NOTHING
    gradients: LinkBytes = NOTHING
    moves: LinkBytes = NOTHING

    @property
    def between(self) -> float:
        """Return the bytes of all kinds between nodes."""
        return sum(getattr(self, kind.name).between for kind in fields(self))

    def as_dict(self) -> dict[str, dict[str, float]]:
        """Return the bytes by kind and link, for JSON."""
        return {kind.name: getattr(self, kind.name)._asdict() for kind in fields(self)}


def sent_bytes(
    costs: LayerCosts, row_bytes: int, gate_bytes: int, *, trained: bool = True, recomputed: bool = False
) -> StepBytes:
    """Return the bytes of rows, gate weights and copies.

    row_bytes, gate_bytes   of one hidden state, and of one gate weight
    trained      there is a backward pass
    recomputed   layers run forward again in the backward pass
    """
    exchange, forward, backward = costs.exchange, 1 + (trained and recomputed), int(trained)
    passes = float(forward + backward)
    copies = (costs.push, costs.again) if trained else (costs.push,)
    return StepBytes(
        rows=_links(2 * passes * row_bytes, exchange.out_MLR, exchange.network_out_MLR),
        gates=_links(passes * gate_bytes, exchange.gates_out_MLR, exchange.cross_node_ML),
        weights=add_links(_copied(one) for one in copies),
        gradients=_copied(costs.gradients) if trained else NOTHING,
    )


def moved_bytes(before: Homes, after: Homes, expert: ExpertShape) -> LinkBytes:
    """Return the bytes of the state of experts whose home rank changes."""
    moved_LE = before.home_LE != after.home_LE
    crosses_LE = before.home_LE // after.ranks_per_node != after.home_LE // after.ranks_per_node
    return _links(float(expert.state_bytes), moved_LE, crosses_LE)


def add_links(parts: Iterable[LinkBytes]) -> LinkBytes:
    """Return the sum over parts, link by link."""
    return LinkBytes(*map(sum, zip(*parts, strict=True)))


def add_bytes(parts: Iterable[StepBytes]) -> StepBytes:
    """Return the sum over parts, kind by kind."""
    every = list(parts)
    return StepBytes(**{kind.name: add_links(getattr(one, kind.name) for one in every) for kind in fields(StepBytes)})


def _copied(copies: CopyCosts) -> LinkBytes:
    return _links(float(copies.bytes_each), copies.sent_MLR, copies.network_sent_MLR)


def _links(bytes_each: float, count: np.ndarray, between: np.ndarray) -> LinkBytes:
    crossing = float(between.sum())
    return LinkBytes(bytes_each * (float(count.sum()) - crossing), bytes_each * crossing)
