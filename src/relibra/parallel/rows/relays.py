"""Hops of rows on several nodes: a token and its result cross to each other node once, if the plan says so.

Rank g of a node sends the tokens that any rank of another node needs to rank g there, the *relay*: one row per (node,
token). The relay forwards each row to the ranks of its node that compute for it. Results come back the same way: the
relay adds those of its node, one row crosses back, the source adds over nodes (as DeepEP does; the ranks of one number
are a *rail*).

When each rank is sent its rows directly (`flat`), the source adds per (node, token) first, as the relays would, and
rounds: both give the same bits. All lists follow from those of the flat exchange. Relays get theirs when the
micro-batch is prepared, in two messages: counts, then 4 bytes per forwarded row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Int32, Int64
from numpy import ndarray

from relibra.cluster import Dispatch
from relibra.parallel.rows.exchange import AllToAll, Stage
from relibra.parallel.rows.row_kernels import group_by_node, place_forwarded
from relibra.parallel.rows.row_lists import HopSizes
from relibra.planning.traffic.rank_tables import Place, RankTables


class SentRows(NamedTuple):
    """Rows of all layers that travel when each token goes to a rank once, by layer.

    token_L     tokens that go to each rank
    send_LR     how many of them
    receive_LR  tokens that come from each rank
    arrived_L   input of each computed row, as index among the arrived rows, which come by source rank and token
    live_L      arrived row of each live row; empty: live rows do not travel with the others
    """

    token_L: Sequence[Int[ndarray, " _"]]
    send_LR: Int64[ndarray, "L R"]
    receive_LR: Int64[ndarray, "L R"]
    arrived_L: Sequence[Int[ndarray, " _"]]
    live_L: Sequence[Int[ndarray, " _"]]


class HopLists(NamedTuple):
    """One hop of all layers, see `Hop`."""

    index_L: Sequence[Int[ndarray, " _"]]
    sizes_L: Sequence[HopSizes]


class RowHops(NamedTuple):
    """How the rows of all layers reach the ranks that compute them.

    by_node_L   see `TokenRows.by_node_X`; None: nothing is copied before the first hop
    hops        one after another
    rows        with arrivals numbered as the last hop brings them
    """

    by_node_L: Sequence[Int[ndarray, " _"]] | None
    hops: Sequence[HopLists]
    rows: SentRows


class NodeRows(NamedTuple):
    """Rows that a rank sends to nodes, one per (node, token), of all layers.

    token_L   tokens by node, ascending
    group_L   for each row that is sent to a rank, index of its token in `token_L`
    rows_LN   number of rows to each node
    """

    token_L: Sequence[Int[ndarray, " _"]]
    group_L: Sequence[Int[ndarray, " _"]]
    rows_LN: Int64[ndarray, "L N"]


class Forwarded(NamedTuple):
    """Rows that a relay gets and forwards, of all layers.

    index_L     index among the rows that came; ordered by destination rank, then source node, then token
    rows_LN     rows that came from each node
    send_LG     rows that go to each rank of the own node
    """

    index_L: Sequence[Int[ndarray, " _"]]
    rows_LN: Int64[ndarray, "L N"]
    send_LG: Int64[ndarray, "L G"]


def hops_of(rows: SentRows, tables_L: Sequence[RankTables], group: dist.ProcessGroup, dispatch: Dispatch) -> RowHops:
    """Return the hops of all layers; collective if hierarchical.

    group    exchanges tensors of the CPU
    raises   EngineError when a peer is gone or the group's time-out has passed
    """
    no_live, per_node = not len(rows.live_L), tables_L[0].ranks_per_node  # live rows go to every rank
    if per_node == rows.send_LR.shape[1]:
        return RowHops(None, [HopLists(rows.token_L, _direct(rows, tables_L))], rows)
    nodes = group_rows(rows.token_L, rows.send_LR, per_node)
    if dispatch == "flat":
        return RowHops(nodes.token_L, [HopLists(nodes.group_L, _direct(rows, tables_L))], rows)
    rail = _Rail(group, tables_L[0].place._replace(layer_id=-1), rows.send_LR.shape[1], per_node)
    forwarded = _tell_relays(nodes, rows.send_LR, rail)
    from_LG = rows.receive_LR.reshape(len(tables_L), -1, per_node).sum(axis=1)
    stay_L = [no_live and tables.stay_in_node for tables in tables_L]
    send_LR, receive_LR = (rail.spread(rail.ranks, rows_LN) for rows_LN in (nodes.rows_LN, forwarded.rows_LN))
    between_L = _sizes(send_LR, receive_LR, stay_L, "dispatch")
    stay_L = [no_live and tables.stay_on_rail for tables in tables_L]
    send_LR, receive_LR = (rail.spread(rail.own_node, rows_LG) for rows_LG in (forwarded.send_LG, from_LG))
    inside_L = _sizes(send_LR, receive_LR, stay_L, "dispatch in node")
    hops = [HopLists(nodes.token_L, between_L), HopLists(forwarded.index_L, inside_L)]
    return RowHops(None, hops, renumber_arrived(rows, per_node))


def group_rows(token_L: Sequence[Int[ndarray, " _"]], send_LR: Int64[ndarray, "L R"], ranks_per_node: int) -> NodeRows:
    """Return the tokens that go to each node, each once per node.

    token_L   tokens that go to each rank, by layer
    """
    token_Z, rows_L = np.concatenate(token_L, dtype=np.int32, casting="same_kind"), send_LR.sum(axis=1)
    token_Y, group_Z = np.empty_like(token_Z), np.empty_like(token_Z)
    rows_LN = np.zeros((len(send_LR), send_LR.shape[1] // ranks_per_node), dtype=np.int64)
    end = group_by_node(token_Z, send_LR, ranks_per_node, int(token_Z.max(initial=-1)) + 1, token_Y, group_Z, rows_LN)
    return NodeRows(_pieces(token_Y[:end], rows_LN.sum(axis=1)), _pieces(group_Z, rows_L), rows_LN)


def renumber_arrived(rows: SentRows, ranks_per_node: int) -> SentRows:
    """Return the rows as they arrive from relays: by number of the source in its node, node of the source, token."""
    R = rows.receive_LR.shape[1]
    by_rail_R = np.arange(R).reshape(-1, ranks_per_node).T.ravel()
    arrived_L, live_L = list(rows.arrived_L), list(rows.live_L)
    for layer, receive_R in enumerate(rows.receive_LR):
        first_R = np.empty(R, dtype=np.int64)
        first_R[by_rail_R] = np.cumsum(receive_R[by_rail_R]) - receive_R[by_rail_R]
        shift_R = first_R - (np.cumsum(receive_R) - receive_R)
        new_Z = np.arange(receive_R.sum(), dtype=np.int32) + np.repeat(shift_R, receive_R).astype(np.int32)
        arrived_L[layer] = new_Z[arrived_L[layer]]
        if live_L:
            live_L[layer] = new_Z[live_L[layer]]
    return rows._replace(arrived_L=arrived_L, live_L=live_L)


class _Rail(NamedTuple):
    """The ranks that have the number of this rank in their nodes: its relays, and those that it is a relay for."""

    group: dist.ProcessGroup
    place: Place
    num_ranks: int
    ranks_per_node: int

    @property
    def ranks(self) -> list[int]:
        return list(range(self.place.rank % self.ranks_per_node, self.num_ranks, self.ranks_per_node))

    @property
    def own_node(self) -> list[int]:
        first = self.place.rank - self.place.rank % self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))

    def spread(self, ranks_X: list[int], rows_LX: Int64[ndarray, "L X"]) -> Int64[ndarray, "L R"]:
        """Return numbers of rows by rank of the group: 0 but for the given ranks."""
        rows_LR = np.zeros((len(rows_LX), self.num_ranks), dtype=np.int64)
        rows_LR[:, ranks_X] = rows_LX
        return rows_LR

    def exchange(self, message_X: ndarray, send_N: ndarray, receive_N: ndarray) -> ndarray:
        """Exchange messages with the rail; collective."""
        (send_R,), (receive_R,) = (self.spread(self.ranks, one_N[None]) for one_N in (send_N, receive_N))
        sizes = AllToAll(send_R=send_R.tolist(), receive_R=receive_R.tolist(), group=self.group, place=self.place)
        return sizes.move(torch.from_numpy(message_X)).numpy()


def _tell_relays(nodes: NodeRows, send_LR: Int64[ndarray, "L R"], rail: _Rail) -> Forwarded:
    """Tell each relay what to forward from this rank; return what this rank forwards as a relay; collective.

    send_LR   rows that this rank sends to each rank, when no relay is between
    """
    (L, N), G = nodes.rows_LN.shape, rail.ranks_per_node
    send_NLG = send_LR.reshape(L, N, G).swapaxes(0, 1)
    rows_NL, forward_NLG = _exchange_counts(nodes.rows_LN, send_NLG, rail)
    receive_N = forward_NLG.sum(axis=(1, 2))
    received_X = rail.exchange(_message_to_relays(nodes, send_NLG), send_NLG.sum(axis=(1, 2)), receive_N)
    forward_Y = np.empty(int(receive_N.sum()), dtype=np.int32)
    place_forwarded(rows_NL, forward_NLG, received_X, forward_Y)
    send_LG = forward_NLG.sum(axis=0)
    return Forwarded(_pieces(forward_Y, send_LG.sum(axis=1)), rows_NL.T, send_LG)


def _exchange_counts(
    rows_LN: Int64[ndarray, "L N"], send_NLG: Int64[ndarray, "N L G"], rail: _Rail
) -> tuple[Int64[ndarray, "N L"], Int64[ndarray, "N L G"]]:
    """Exchange the first message, how many rows: those to each node, and of them those to each of its ranks.

    returns   rows that come from each node, and of them those that go to each rank of the own node; collective
    """
    N, L, G = send_NLG.shape
    counts_NLX = np.concatenate([rows_LN.T[:, :, None], send_NLG], axis=2).astype(np.int32)
    one_each_N = np.ones(N, dtype=np.int64)
    told_X = rail.exchange(counts_NLX.reshape(N, -1), one_each_N, one_each_N)
    told_NLX = told_X.reshape(N, L, 1 + G).astype(np.int64)
    return told_NLX[:, :, 0], told_NLX[:, :, 1:]


def _message_to_relays(nodes: NodeRows, send_NLG: Int64[ndarray, "N L G"]) -> Int32[ndarray, " X"]:
    """Return the second message, which rows: by node, layer and rank there, their index among those to the node."""
    first_LN = np.cumsum(nodes.rows_LN, axis=1) - nodes.rows_LN
    by_layer = [
        [of_node - np.int32(first) for of_node, first in zip(_pieces(group_Z, sent_N), first_N.tolist(), strict=True)]
        for group_Z, sent_N, first_N in zip(nodes.group_L, send_NLG.sum(axis=2).T, first_LN, strict=True)
    ]
    return np.concatenate([of_layer for of_node in zip(*by_layer, strict=True) for of_layer in of_node])


def _direct(rows: SentRows, tables_L: Sequence[RankTables]) -> list[HopSizes]:
    """Return the sizes, by layer, of the exchange in which each rank is sent its rows."""
    stay_L = [not len(rows.live_L) and tables.all_stay for tables in tables_L]
    return _sizes(rows.send_LR, rows.receive_LR, stay_L, "dispatch")


def _sizes(
    send_LR: Int64[ndarray, "L R"], receive_LR: Int64[ndarray, "L R"], stay_L: list[bool], stage: Stage
) -> list[HopSizes]:
    sizes = zip(send_LR.tolist(), receive_LR.tolist(), stay_L, strict=True)
    return [HopSizes(send_R, receive_R, all_stay, stage) for send_R, receive_R, all_stay in sizes]


def _pieces(numbers_X: ndarray, sizes_L: ndarray) -> list[ndarray]:
    """Return consecutive pieces of these sizes."""
    return np.split(numbers_X, np.cumsum(sizes_L)[:-1])
