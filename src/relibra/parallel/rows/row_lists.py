"""`RowLists`: which rows of a layer travel, and in which order.

The plan gives the counts. It does not say which tokens have two experts on one rank: only the source rank has their
routes. So, once per micro-batch, each source sends row numbers for all layers to each destination (4 bytes per
token-slot), and layers then exchange rows only. (Sending a token once: UniEP, arXiv 2604.19241.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int, Int32, Int64
from numpy import ndarray
from torch import Tensor

from relibra.parallel.rows.exchange import AllToAll
from relibra.planning.traffic.rank_tables import RankTables


@dataclass(frozen=True, kw_only=True, eq=False)
class SendOnce:
    """Rows that travel when each token goes to a rank once: one row Z per (destination, token).

    token_Z     row of the batch sent as the Z-th, in the order of destination and token
    send_R      rows to each destination
    receive_R   rows from each source
    arrived_Y   index of the arrived row (in the order of source and token) that is the input of the Y-th computed row
    """

    token_Z: Int64[Tensor, " Z"]
    send_R: list[int]
    receive_R: list[int]
    arrived_Y: Int64[Tensor, " Y"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowLists:
    """Indices of the rows of one layer that this rank sends and computes, on the device.

    choice_X          token-slot (index into `[T, K]`, flattened) sent as the X-th: by destination, local slot, position
    compute_order_Y   arrived token-slot (by source, local slot, position) that is computed Y-th
    slot_Y            local slot of the Y-th computed row
    once              what is sent when each token goes to a rank once; None: one row per token-slot
    """

    choice_X: Int64[Tensor, " X"]
    compute_order_Y: Int64[Tensor, " Y"]
    slot_Y: Int64[Tensor, " Y"]
    once: SendOnce | None = None


def sent_order(tables: RankTables, experts_TK: Int[ndarray, "T K"]) -> Int64[ndarray, " X"]:
    """Return the token-slots of this rank in the order in which they go out."""
    return np.argsort(experts_TK, axis=None, kind="stable")[tables.send_order_X]


def row_lists(tables: RankTables, experts_TK: Int[ndarray, "T K"], device: torch.device) -> RowLists:
    """Return the row lists of a layer in which each token-slot is a row.

    experts_TK   logical ids of the rows of this rank, with the counts of the tables
    """
    return _row_lists(tables, sent_order(tables, experts_TK), device)


def _row_lists(tables: RankTables, choice_X: Int64[ndarray, " X"], device: torch.device) -> RowLists:
    return RowLists(
        choice_X=_on(device, choice_X),
        compute_order_Y=_on(device, tables.compute_order_Y),
        slot_Y=_on(device, tables.slot_Y),
    )


def rows_to_send(
    tables: RankTables, choice_X: Int64[ndarray, " X"], num_rows: int, top_k: int
) -> tuple[Int64[ndarray, " Z"], Int64[ndarray, " R"], Int32[ndarray, " X"]]:
    """Return the rows to send so that each token goes to each destination once.

    returns   token of each row, rows per destination, and for each token-slot the index of its row among the rows to
              the same destination
    """
    choices_R = tables.send_RP.sum(axis=1)
    rank_X = np.repeat(np.arange(len(choices_R)), choices_R)
    # One sort of (rank, token): with many ranks a table of ranks x tokens takes longer.
    row_Z, number_X = np.unique(rank_X * num_rows + choice_X // top_k, return_inverse=True)
    rows_R = np.bincount(row_Z // max(1, num_rows), minlength=len(choices_R))
    first_R = np.cumsum(rows_R) - rows_R
    return row_Z % max(1, num_rows), rows_R, (number_X - first_R[rank_X]).astype(np.int32)


def exchange_row_lists(
    tables_L: Sequence[RankTables], experts_TLK: Int[ndarray, "T L K"], group: dist.ProcessGroup, device: torch.device
) -> list[RowLists]:
    """Return the row lists of all layers of a micro-batch, with tokens sent once; collective over the group.

    tables_L      of this rank, with the counts of the routes
    experts_TLK   logical ids of the planned rows of this rank
    raises        EngineError when a peer is gone or the group's time-out has passed
    """
    T, L, K = experts_TLK.shape
    choices_L = [sent_order(tables, experts_TLK[:, layer]) for layer, tables in enumerate(tables_L)]
    own_L = [rows_to_send(tables, choice_X, T, K) for tables, choice_X in zip(tables_L, choices_L, strict=True)]
    gathered_R = _exchange_row_numbers(tables_L, own_L, group, device)
    read_R = [L] * len(gathered_R)  # next position to read in each message, after its L numbers of rows
    result = []
    for layer, tables in enumerate(tables_L):
        token_Z, send_R, _ = own_L[layer]
        receive_R = np.array([message[layer] for message in gathered_R])
        first_R = np.cumsum(receive_R) - receive_R
        arrived = []
        for source, message in enumerate(gathered_R):
            end = read_R[source] + int(tables.receive_RP[source].sum())
            arrived.append(first_R[source] + message[read_R[source] : end])
            read_R[source] = end
        once = SendOnce(
            token_Z=_on(device, token_Z),
            send_R=send_R.tolist(),
            receive_R=receive_R.tolist(),
            arrived_Y=_on(device, np.concatenate(arrived)[tables.compute_order_Y]),
        )
        result.append(replace(_row_lists(tables, choices_L[layer], device), once=once))
    return result


def _exchange_row_numbers(
    tables_L: Sequence[RankTables],
    own_L: list[tuple[ndarray, ndarray, ndarray]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[ndarray]:
    """Exchange the number of rows in each layer and, layer by layer, the row of each token-slot; collective.

    own_L     of this rank, see `rows_to_send`
    returns   message of each source: L numbers of rows, then the rows
    """
    send_LR = np.stack([tables.send_RP.sum(axis=1) for tables in tables_L])
    receive_LR = np.stack([tables.receive_RP.sum(axis=1) for tables in tables_L])
    pieces_LR = [np.split(own[2], np.cumsum(send_R)[:-1]) for own, send_R in zip(own_L, send_LR, strict=True)]
    message = []
    for rank in range(send_LR.shape[1]):
        message.append(np.array([rows_R[rank] for _, rows_R, _ in own_L], dtype=np.int32))
        message += [pieces_R[rank] for pieces_R in pieces_LR]
    sizes = AllToAll(
        send_R=(len(tables_L) + send_LR.sum(axis=0)).tolist(),
        receive_R=(len(tables_L) + receive_LR.sum(axis=0)).tolist(),
        group=group,
        place=tables_L[0].place._replace(layer_id=-1),
    )
    received = sizes.move(torch.from_numpy(np.concatenate(message)).to(device)).cpu().numpy()
    return np.split(received, np.cumsum(sizes.receive_R)[:-1])


def _on(device: torch.device, numbers: ndarray) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64)).to(device, non_blocking=True)
