"""`PreparedRows`: tables and row lists of all layers of a micro-batch, made on the host before its first layer runs.

The plan gives the counts. It does not say which tokens have two experts on one rank: only the source rank has their
routes. So, once per micro-batch, each source sends row numbers for all layers to each destination (4 bytes per
token-slot), and layers then exchange rows only. (Sending a token once: UniEP, arXiv 2604.19241.) The same message says
whether the routes of the source are those of the plan; its size follows from the plan, whatever the routes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int32, Int64, Integer
from numpy import ndarray
from torch import Tensor

from relibra.parallel.rows.exchange import AllToAll
from relibra.parallel.rows.row_kernels import order_arrived, order_rows, place_arrived
from relibra.parallel.rows.row_lists import RowLists, SendOnce
from relibra.planning.traffic.rank_tables import RankTables
from relibra.replay import BatchRoutes

_DIFFERS, _LIVE = 1, 2  # bits of the first number of a message


class RowKinds(NamedTuple):
    """Rows of a batch with recorded routes (planned), and rows that the router decides on (live).

    planned_X, live_Y   indices of rows
    back_T              undoes `cat(planned, live)`
    """

    planned_X: Int64[Tensor, " X"]
    live_Y: Int64[Tensor, " Y"]
    back_T: Int64[Tensor, " T"]

    @staticmethod
    def of(routes: BatchRoutes, *, pinned: bool) -> RowKinds:
        """Return the rows of a batch, on the CPU."""
        valid_T = routes.valid_T.cpu()
        kinds = valid_T.nonzero().flatten(), (~valid_T).nonzero().flatten()
        back_T = torch.empty(len(valid_T), dtype=torch.int64)
        back_T[torch.cat(kinds)] = torch.arange(len(valid_T))
        return RowKinds(*(index.pin_memory() if pinned else index for index in (*kinds, back_T)))

    def on(self, device: torch.device) -> RowKinds:
        """Return the same on a device."""
        return RowKinds(*(index.to(device, non_blocking=True) for index in self))


class SentTokens(NamedTuple):
    """Tokens that go to each rank, and come from each, by layer, when each goes to a rank once."""

    send_LR: Int64[ndarray, "L R"]
    receive_LR: Int64[ndarray, "L R"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRows:
    """Tables and row lists of a micro-batch on one rank, on the host.

    tables_L     by position of the layer
    differs_R    whether the routes of a rank are not those of the plan; if any are not, there are no lists
    problem      where those of this rank first differ; None: nowhere
    any_live     whether any rank has rows without recorded routes
    kinds        planned and live rows of this rank; None: all are of one kind
    numbers      choices of all layers, then their orders of computation, local slots, arrived rows and tokens
    sent         None: one row per token-slot, without arrived rows and tokens
    """

    tables_L: Sequence[RankTables]
    differs_R: Sequence[bool]
    problem: str | None
    any_live: bool
    kinds: RowKinds | None
    numbers: Int32[Tensor, " X"]
    sent: SentTokens | None

    def lists_on(self, device: torch.device) -> list[RowLists]:
        """Return the lists of all layers on a device, in one copy."""
        choices_L = [int(tables.tokens_E.sum()) for tables in self.tables_L]
        rows_L = [int(tables.receive_RP.sum()) for tables in self.tables_L]
        sent_L = [] if self.sent is None else self.sent.send_LR.sum(axis=1).tolist()
        sizes = [*choices_L, *rows_L * (2 if self.sent is None else 3), *sent_L]
        pieces, result = self.numbers.to(device, non_blocking=True).split(sizes), []
        for layer in range(len(rows_L)):
            choice_X, order_Y, slot_Y, *of_once = pieces[layer :: len(rows_L)]
            once = None
            if self.sent is not None:
                send_R, receive_R = self.sent.send_LR[layer].tolist(), self.sent.receive_LR[layer].tolist()
                once = SendOnce(token_Z=of_once[1], send_R=send_R, receive_R=receive_R, arrived_Y=of_once[0])
            result.append(RowLists(choice_X=choice_X, compute_order_Y=order_Y, slot_Y=slot_Y, once=once))
        return result


def prepare_rows(
    tables_L: Sequence[RankTables],
    routes: BatchRoutes | None,
    group: dist.ProcessGroup,
    *,
    send_once: bool,
    pinned: bool = False,
) -> PreparedRows:
    """Return the tables and lists of a micro-batch; collective over the group.

    tables_L    of this rank
    routes      None: this rank has no sample, and its whole batch is live
    group       exchanges tensors of the CPU
    send_once   tokens go to a rank once; False: one row per token-slot
    pinned      the lists lie in page-locked memory, from which a GPU copies beside its work
    raises      EngineError when a peer is gone or the group's time-out has passed
    """
    tables = _Stacked.of(tables_L)
    choices, computed = int(tables.send_LRP.sum()), int(tables.receive_LRP.sum())
    sizes = [choices, computed, computed, computed * send_once, choices * send_once]
    numbers = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pinned)
    choice_X, order_Y, slot_Y, arrived_Y, token_Z = np.split(numbers.numpy(), np.cumsum(sizes[:-1]))
    live = routes is None or not bool(routes.valid_T.all())
    kinds = RowKinds.of(routes, pinned=pinned) if routes is not None and live else None
    own = _order_own(tables_L, tables, routes, kinds, choice_X, token_Z if send_once else np.empty_like(choice_X))
    order_arrived(tables.receive_LRP, order_Y, slot_Y)
    flags = _DIFFERS * (own.problem is not None) + _LIVE * live
    received, heads_RX = _exchange(tables_L, tables, own, flags, group, send_once=send_once)
    flags_R, sent = heads_RX[:, 0].tolist(), None
    if send_once:
        sent = SentTokens(own.send_LR, heads_RX[:, 1:].T.astype(np.int64))
        place_arrived(tables.receive_LRP, sent.receive_LR, received, arrived_Y)
    return PreparedRows(
        tables_L=tables_L,
        differs_R=[bool(flags & _DIFFERS) for flags in flags_R],
        problem=own.problem,
        any_live=any(flags & _LIVE for flags in flags_R),
        kinds=kinds,
        numbers=numbers[: len(numbers) - len(token_Z) + int(own.send_LR.sum()) * send_once],
        sent=sent,
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

    @staticmethod
    def of(tables_L: Sequence[RankTables]) -> _Stacked:
        return _Stacked(
            np.stack([tables.tokens_E for tables in tables_L]),
            np.stack([tables.send_RP for tables in tables_L]),
            np.stack([tables.first_RP for tables in tables_L]),
            np.stack([tables.receive_RP for tables in tables_L]),
        )


class _OwnRows(NamedTuple):
    """What a rank knows of its rows without the others.

    problem   where its routes first differ from the plan; None: nowhere
    send_LR   tokens that go to each rank
    message_X for each rank: room for 1 + L numbers; layer by layer the row, among the tokens that go there, of each
              token-slot
    """

    problem: str | None
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
    send_LR, message_X = np.zeros((L, R), dtype=np.int64), np.empty(len(choice_X) + R * (1 + L), dtype=np.int32)
    if routes is not None and list(routes.layer_ids) != [one.place.layer_id for one in tables_L]:
        return _OwnRows("they are of other layers", send_LR, message_X)
    experts_XLK = _recorded_experts(routes, kinds, L)
    if experts_XLK.size == len(choice_X):
        if order_rows(experts_XLK, *tables[:3], choice_X.reshape(L, -1), token_Z, send_LR, message_X) < 0:
            return _OwnRows(None, send_LR, message_X)
        send_LR[:] = 0
    return _OwnRows(find_route_mismatch(tables_L, experts_XLK), send_LR, message_X)


def _recorded_experts(routes: BatchRoutes | None, kinds: RowKinds | None, num_layers: int) -> Integer[ndarray, "X L K"]:
    """Return the logical experts of the rows with recorded routes."""
    if routes is None:
        return np.zeros((0, num_layers, 1), dtype=np.uint8)
    experts_TLK = routes.experts_TLK.cpu()
    return (experts_TLK if kinds is None else experts_TLK[kinds.planned_X]).contiguous().numpy()


def _exchange(
    tables_L: Sequence[RankTables],
    tables: _Stacked,
    own: _OwnRows,
    flags: int,
    group: dist.ProcessGroup,
    *,
    send_once: bool,
) -> tuple[Int32[ndarray, " X"], Int32[ndarray, "R Y"]]:
    """Exchange flags, the tokens of each layer, and with `send_once` their rows; collective.

    returns   the messages of all ranks, and their first 1 + L numbers
    """
    L, R, _ = tables.send_LRP.shape
    head = 1 + L
    send_R, receive_R = head + tables.send_LRP.sum(axis=(0, 2)), head + tables.receive_LRP.sum(axis=(0, 2))
    message_X, heads_RX = own.message_X, np.column_stack([np.full(R, flags), own.send_LR.T]).astype(np.int32)
    if send_once:
        message_X[(np.cumsum(send_R) - send_R)[:, None] + np.arange(head)] = heads_RX
    else:
        message_X, send_R, receive_R = heads_RX.ravel(), np.full(R, head), np.full(R, head)
    sizes = AllToAll(
        send_R=send_R.tolist(),
        receive_R=receive_R.tolist(),
        group=group,
        place=tables_L[0].place._replace(layer_id=-1),
    )
    received = sizes.move(torch.from_numpy(message_X)).numpy()
    return received, received[(np.cumsum(receive_R) - receive_R)[:, None] + np.arange(head)]
