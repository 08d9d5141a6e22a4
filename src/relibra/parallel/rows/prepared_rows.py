"""`PreparedRows`: tables and row lists of all layers of a micro-batch, made on the host before its first layer runs.

The plan gives the counts. Only the source of a token knows that two of its experts are on one rank. So, once per
micro-batch, each source sends row numbers for all layers to each destination (4 bytes per token-slot), and whether its
routes are those of the plan; layers then exchange rows only. (Sending a token once: UniEP, arXiv 2604.19241.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int32, Int64, Integer
from numpy import ndarray
from torch import Tensor

from relibra.cluster import Dispatch
from relibra.parallel.rows.exchange import AllToAll
from relibra.parallel.rows.live_rows import LiveRows, join_tokens, may_join
from relibra.parallel.rows.relays import RowHops, SentRows, hops_of
from relibra.parallel.rows.row_kernels import order_arrived, order_rows, place_arrived
from relibra.parallel.rows.row_lists import Hop, HopSizes, RowLists, TokenRows
from relibra.planning.traffic.rank_tables import RankTables
from relibra.replay import BatchRoutes


class RowKinds(NamedTuple):
    """Rows of a batch with recorded routes (planned), and rows of samples without, which the router decides on (live).

    Rows of no sample (padding, filler batches) are neither: no expert computes them, because nothing reads what the
    model makes of them.
    """

    planned_X: Int64[Tensor, " X"]
    live_V: Int64[Tensor, " V"]

    @staticmethod
    def of(routes: BatchRoutes | None, *, pinned: bool) -> RowKinds | None:
        """Return the rows of a batch, on the CPU; None: all of them are planned."""
        if routes is None:
            return RowKinds(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        valid_T, of_sample_T = routes.valid_T.cpu(), routes.sample_T.cpu() >= 0
        if bool(valid_T.all()):
            return None
        kinds = valid_T.nonzero().flatten(), (~valid_T & of_sample_T).nonzero().flatten()
        return RowKinds(*(index.pin_memory() if pinned else index for index in kinds))

    def on(self, device: torch.device) -> RowKinds:
        """Return the same on a device."""
        return RowKinds(*(index.to(device, non_blocking=True) for index in self))


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRows:
    """Tables and row lists of a micro-batch on one rank, on the host.

    tables_L            by position of the layer
    differs_R           whether the routes of a rank are not those of the plan; if any are not, there are no lists
    problem             where the routes of this rank first differ; None: nowhere
    live_R              live rows of each rank
    live_travel_along   whether live rows travel with the planned ones; otherwise they have an exchange of their own
    kinds               planned and live rows of this rank; None: all are planned
    numbers             choices of all layers, then their orders of computation, local slots and arrived rows, rows by
                        node (if `by_node`), the indices of each hop, and arrived live rows (if live rows travel along)
    sizes               of these lists, one after another
    hops                sizes of each hop in all layers; None: there are no lists
    by_node             whether rows are copied by node before the first hop (`TokenRows`)
    """

    tables_L: Sequence[RankTables]
    differs_R: Sequence[bool]
    problem: str | None
    live_R: list[int]
    live_travel_along: bool
    kinds: RowKinds | None
    numbers: Int32[Tensor, " X"]
    sizes: list[int]
    hops: Sequence[Sequence[HopSizes]] | None
    by_node: bool = False

    def lists_on(self, device: torch.device, kinds: RowKinds | None) -> list[RowLists]:
        """Return the lists of all layers on a device, in one copy.

        kinds   `self.kinds` on the device
        """
        pieces, result = self.numbers.to(device, non_blocking=True).split(self.sizes), []
        for layer in range(len(self.tables_L)):
            choice_X, order_Y, slot_Y, *of_tokens = pieces[layer :: len(self.tables_L)]
            tokens, live = None, None
            if self.live_travel_along:
                live_V = self.numbers.new_zeros(0, device=device) if kinds is None else kinds.live_V
                live = LiveRows(own_V=live_V, arrived_A=of_tokens.pop(), live_R=self.live_R)
            if self.hops is not None:
                arrived_Y, *indices = of_tokens
                by_node_X = indices.pop(0) if self.by_node else None
                hops = [Hop(index, sizes_L[layer]) for index, sizes_L in zip(indices, self.hops, strict=True)]
                tokens = TokenRows(by_node_X=by_node_X, hops=hops, arrived_Y=arrived_Y)
            lists = RowLists(choice_X=choice_X, compute_order_Y=order_Y, slot_Y=slot_Y, tokens=tokens, live=live)
            result.append(lists)
        return result


def prepare_rows(
    tables_L: Sequence[RankTables],
    routes: BatchRoutes | None,
    group: dist.ProcessGroup,
    *,
    dispatch: Dispatch = "flat",
    may_join_live: bool = True,
    pinned: bool = False,
) -> PreparedRows:
    """Return the tables and lists of a micro-batch; collective over the group.

    tables_L        of this rank
    routes          None: this rank has no sample, and its whole batch is filler
    group           exchanges tensors of the CPU
    dispatch        how tokens reach other nodes
    may_join_live   a few live rows travel with the planned ones; False: they would change chunks of canonical sums
    pinned          the lists lie in page-locked memory, from which a GPU copies beside its work
    raises          EngineError when a peer is gone or the group's time-out has passed
    """
    names, rows_L = ("tokens_E", "send_RP", "first_RP", "receive_RP"), [int(one.receive_RP.sum()) for one in tables_L]
    tables = _Stacked(*(np.stack([getattr(one, name) for one in tables_L]) for name in names))
    choices, computed = int(tables.send_LRP.sum()), sum(rows_L)
    room = [choices, computed, computed, computed, choices]
    numbers = torch.empty(sum(room), dtype=torch.int32, pin_memory=pinned)
    choice_X, order_Y, slot_Y, arrived_Y, token_Z = np.split(numbers.numpy(), np.cumsum(room[:-1]))
    kinds = RowKinds.of(routes, pinned=pinned)
    own = _order_own(tables_L, tables, routes, kinds, choice_X, token_Z)
    order_arrived(tables.receive_LRP, order_Y, slot_Y)
    received, heads_RX = _exchange(tables_L, tables, own, group)
    differs_R, live_R, planned_R = heads_RX[:, :3].T.astype(np.int64)
    sizes = [*tables.tokens_LE.sum(axis=1).tolist(), *rows_L * 3, *own.send_LR.sum(axis=1).tolist()]
    rows = PreparedRows(
        tables_L=tables_L,
        differs_R=[differs > 0 for differs in differs_R.tolist()],
        problem=own.problem,
        live_R=live_R.tolist(),
        live_travel_along=False,
        kinds=kinds,
        numbers=numbers[: sum(sizes)],
        sizes=sizes,
        hops=None,
    )
    if any(rows.differs_R):
        return rows
    receive_LR = heads_RX[:, 3:].T.astype(np.int64)
    place_arrived(tables.receive_LRP, receive_LR, received, arrived_Y)
    L, lists = len(tables_L), np.split(rows.numbers.numpy(), np.cumsum(sizes)[:-1])
    sent = SentRows(lists[4 * L :], own.send_LR, receive_LR, lists[3 * L : 4 * L], [])
    if may_join_live and may_join(live_R, planned_R):
        sent = _join(sent, kinds, live_R)
    return _with_hops(rows, lists[: 3 * L], hops_of(sent, tables_L, group, dispatch), pinned=pinned)


def _with_hops(
    rows: PreparedRows, lists: Sequence[Int32[ndarray, " _"]], travel: RowHops, *, pinned: bool
) -> PreparedRows:
    """Return the prepared rows with their hops, and with lists in which rows are numbered as the hops bring them.

    lists    choices, orders of computation and local slots of all layers: no hop changes them
    pinned   as for `prepare_rows`
    """
    by_node_L, hops, sent = travel
    rows = replace(
        rows, live_travel_along=bool(sent.live_L), hops=[hop.sizes_L for hop in hops], by_node=by_node_L is not None
    )
    if len(hops) == 1 and not rows.by_node and not rows.live_travel_along:
        return rows  # its lists are in `numbers` already
    indices = [*(by_node_L or ()), *(index for hop in hops for index in hop.index_L)]
    lists = [*lists, *sent.arrived_L, *indices, *sent.live_L]
    numbers = torch.from_numpy(np.concatenate(lists, dtype=np.int32, casting="same_kind"))
    return replace(rows, numbers=numbers.pin_memory() if pinned else numbers, sizes=[len(one) for one in lists])


def _join(rows: SentRows, kinds: RowKinds | None, live_R: Int64[ndarray, " R"]) -> SentRows:
    """Return the same with the live rows of each rank behind its planned ones."""
    live_V = np.zeros(0, dtype=np.int64) if kinds is None else kinds.live_V.numpy()
    columns = zip(rows.arrived_L, rows.receive_LR, rows.token_L, rows.send_LR, strict=True)
    arrived_L, token_L, live_L = zip(*(join_tokens(*of_layer, live_V, live_R) for of_layer in columns), strict=True)
    return SentRows(
        token_L=token_L,
        send_LR=rows.send_LR + len(live_V),
        receive_LR=rows.receive_LR + live_R,
        arrived_L=arrived_L,
        live_L=live_L,
    )


def find_route_mismatch(tables_L: Sequence[RankTables], experts_XLK: Integer[ndarray, "X L K"]) -> str | None:
    """Return where the routes of a rank first differ from what was planned; None: nowhere."""
    for position, tables in enumerate(tables_L):
        planned_E, layer_id = tables.tokens_E, tables.place.layer_id
        actual_E = np.bincount(experts_XLK[:, position].ravel(), minlength=len(planned_E))
        if len(actual_E) > len(planned_E):
            return f"layer {layer_id} chooses expert {len(actual_E) - 1}, the plan has {len(planned_E)} experts"
        wrong = np.flatnonzero(planned_E != actual_E)
        if len(wrong):
            e = wrong[0]
            return (
                f"in layer {layer_id} expert {e} was planned to get {planned_E[e]} token-slots from this rank "
                f"and gets {actual_E[e]} ({len(wrong)} of {len(planned_E)} experts differ)"
            )
    return None


class _Stacked(NamedTuple):
    """Tables of all layers in one array each."""

    tokens_LE: Int64[ndarray, "L E"]
    send_LRP: Int64[ndarray, "L R P"]
    first_LRP: Int64[ndarray, "L R P"]
    receive_LRP: Int64[ndarray, "L R P"]


class _OwnRows(NamedTuple):
    """What a rank knows of its rows without the others.

    problem   where its routes first differ from the plan; None: nowhere
    live      number of live rows
    planned   number of rows with recorded routes
    send_LR   tokens that go to each rank
    message_X for each rank: room for 3 + L numbers, then layer by layer, for each token-slot, the index of its token
              among those that go there
    """

    problem: str | None
    live: int
    planned: int
    send_LR: Int64[ndarray, "L R"]
    message_X: Int32[ndarray, " X"]


def _order_own(
    tables_L: Sequence[RankTables],
    tables: _Stacked,
    routes: BatchRoutes | None,
    kinds: RowKinds | None,
    choice_X: Int32[ndarray, " X"],
    token_Z: Int32[ndarray, " Z"],
) -> _OwnRows:
    """Order the rows that this rank sends, unless its routes are not those of the tables.

    choice_X   receives the choices of all layers
    token_Z    receives the tokens of all layers, at its beginning
    """
    L, R, _ = tables.send_LRP.shape
    experts_XLK = _recorded_experts(routes, kinds, L)
    live, planned = 0 if kinds is None else len(kinds.live_V), len(experts_XLK)
    row_T = np.arange(planned) if kinds is None else kinds.planned_X.numpy()
    send_LR, message_X = np.zeros((L, R), dtype=np.int64), np.empty(len(choice_X) + R * (3 + L), dtype=np.int32)
    if routes is not None and list(routes.layer_ids) != [one.place.layer_id for one in tables_L]:
        return _OwnRows("they are of other layers", live, planned, send_LR, message_X)
    if experts_XLK.size == len(choice_X):
        if order_rows(experts_XLK, row_T, *tables[:3], choice_X.reshape(L, -1), token_Z, send_LR, message_X) < 0:
            return _OwnRows(None, live, planned, send_LR, message_X)
        send_LR[:] = 0
    return _OwnRows(find_route_mismatch(tables_L, experts_XLK), live, planned, send_LR, message_X)


def _recorded_experts(routes: BatchRoutes | None, kinds: RowKinds | None, num_layers: int) -> Integer[ndarray, "X L K"]:
    """Return the logical experts of the rows with recorded routes."""
    if routes is None:
        return np.zeros((0, num_layers, 1), dtype=np.uint8)
    experts_TLK = routes.experts_TLK.cpu()
    return (experts_TLK if kinds is None else experts_TLK[kinds.planned_X]).contiguous().numpy()


def _exchange(
    tables_L: Sequence[RankTables], tables: _Stacked, own: _OwnRows, group: dist.ProcessGroup
) -> tuple[Int32[ndarray, " X"], Int32[ndarray, "R Y"]]:
    """Exchange what each rank knows of its rows, and the row of each token-slot; collective.

    returns   the messages of all ranks, and their heads: whether routes differ, live rows, planned rows, and the tokens
              of each layer
    """
    L, R, _ = tables.send_LRP.shape
    head, common = 3 + L, [own.problem is not None, own.live, own.planned]
    send_R, receive_R = head + tables.send_LRP.sum(axis=(0, 2)), head + tables.receive_LRP.sum(axis=(0, 2))
    message_X, heads_RX = own.message_X, np.column_stack([np.tile(common, (R, 1)), own.send_LR.T]).astype(np.int32)
    message_X[(np.cumsum(send_R) - send_R)[:, None] + np.arange(head)] = heads_RX
    sizes = AllToAll(
        send_R=send_R.tolist(), receive_R=receive_R.tolist(), group=group, place=tables_L[0].place._replace(layer_id=-1)
    )
    received = sizes.move(torch.from_numpy(message_X)).numpy()
    return received, received[(np.cumsum(receive_R) - receive_R)[:, None] + np.arange(head)]
