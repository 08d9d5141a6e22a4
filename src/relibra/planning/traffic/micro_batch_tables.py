"""`micro_batch_tables`: the tables of one rank in all layers of a micro-batch, compiled.

The same values as `rank_tables`, layer by layer, at a twentieth of its time; tests compare both.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from numpy import ndarray

from relibra.planning.plan import StepPlan
from relibra.planning.traffic.rank_tables import Place, Push, RankTables
from relibra.planning.traffic.split import split_expert
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand


def micro_batch_tables(
    plan: StepPlan, demand: ScheduledDemand, rank: int, micro_batch: int, chunk: int | None = None
) -> list[RankTables]:
    """Return the tables of a rank in each layer of a micro-batch.

    demand   under the schedule of the plan (`plan.scheduled`)
    chunk    whole chunks of this many token-slots per instance, see `chunked_split`; None: the quotas of the plan
    """
    tokens_LRE, replica_LRB = demand.tokens_MLRE[micro_batch], plan.replica_MLRB[micro_batch]
    L, R, E = tokens_LRE.shape
    B, num_homes = replica_LRB.shape[2], E // R
    position_LE = np.argsort(plan.physical_to_logical_map, axis=1, kind="stable")
    send_LRP, first_LRP, receive_LRP = np.zeros((3, L, R, num_homes + B), dtype=np.int64)
    tokens_LRB = np.zeros((L, R, B), dtype=np.int64)
    leaves_L, changes_L = np.zeros((2, L), dtype=np.bool_)
    _fill(
        np.ascontiguousarray(tokens_LRE),
        position_LE,
        np.ascontiguousarray(replica_LRB),
        np.ascontiguousarray(plan.quota_MLRB[micro_batch]),
        plan.ranks_per_node,
        rank,
        0 if chunk is None else chunk,
        (send_LRP, first_LRP, receive_LRP, tokens_LRB, leaves_L, changes_L),
    )
    own_LE, layer_ids = tokens_LRE[:, rank].astype(np.int64), plan.layer_ids.tolist()
    pushes_L = _pushes(tokens_LRB, replica_LRB, position_LE, num_homes)
    return [
        RankTables(
            place=Place(rank, layer_ids[layer], micro_batch),
            num_homes=num_homes,
            tokens_E=own_LE[layer],
            send_RP=send_LRP[layer],
            first_RP=first_LRP[layer],
            receive_RP=receive_LRP[layer],
            pushes=tuple(pushes_L[layer]),
            ranks_per_node=plan.ranks_per_node,
            stay_in_node=not leaves_L[layer],
            stay_on_rail=not changes_L[layer],
        )
        for layer in range(L)
    ]


def _pushes(tokens_LRB: ndarray, replica_LRB: ndarray, position_LE: ndarray, num_homes: int) -> list[list[Push]]:
    """Return the pushes of replicas that get tokens, by (replica rank, slot): an idle replica needs no weights."""
    layer_X, rank_X, slot_X = np.nonzero(tokens_LRB)
    expert_X = replica_LRB[layer_X, rank_X, slot_X].astype(np.int64)
    home_X, home_slot_X = np.divmod(position_LE[layer_X, expert_X], num_homes)
    columns = (layer_X, expert_X, home_X, home_slot_X, rank_X, slot_X, tokens_LRB[layer_X, rank_X, slot_X])
    pushes_L: list[list[Push]] = [[] for _ in tokens_LRB]
    for layer, *push in np.stack(columns, axis=1).tolist():
        pushes_L[layer].append(Push(*push))
    return pushes_L


@compiled
@no_type_check
def _fill(tokens_LRE, position_LE, replica_LRB, quota_LRB, ranks_per_node, rank, chunk, tables) -> None:
    """Write send, first and receive `[L, R, P]`, tokens of replicas `[L, R, B]`, and two flags `[L]`.

    Flags: whether any row of any rank leaves its node, and whether any goes to a rank with another number in its node.
    """
    send_LRP, first_LRP, receive_LRP, tokens_LRB, leaves_L, changes_L = tables
    G = ranks_per_node
    L, R, E = tokens_LRE.shape
    B = replica_LRB.shape[2]
    num_homes = E // R
    rank_I, local_I = np.empty(R * B + 1, np.int64), np.empty(R * B + 1, np.int64)
    left_I, column_I = np.empty(R * B + 1, np.int64), np.arange(R * B + 1)
    remainder_I, open_I = np.empty(R * B + 1, np.int64), np.empty(R * B + 1, np.int64)
    supply_R, split_RI = np.empty(R, np.int64), np.zeros((R, R * B + 1), np.int64)
    first_E, next_X = np.empty(E, np.int64), np.empty(R * B, np.int64)  # linked list of each expert's slots, by rank
    for layer in range(L):
        replica_RB, quota_RB, tokens_RE = replica_LRB[layer], quota_LRB[layer], tokens_LRE[layer]
        first_E[:] = -1
        for x in range(R * B - 1, -1, -1):
            e = replica_RB[x // B, x % B]
            if e >= 0:
                next_X[x], first_E[e] = first_E[e], x
        start = 0
        for e in range(E):
            home, home_slot = position_LE[layer, e] // num_homes, position_LE[layer, e] % num_homes
            x = first_E[e]
            if x < 0:
                own = tokens_RE[rank, e]
                send_LRP[layer, home, home_slot], first_LRP[layer, home, home_slot] = own, start
                start += own
                for s in range(R):
                    if home == rank:
                        receive_LRP[layer, s, home_slot] = tokens_RE[s, e]
                    if tokens_RE[s, e] > 0:
                        leaves_L[layer] |= s // G != home // G
                        changes_L[layer] |= s % G != home % G
                continue
            rank_I[0], local_I[0], left_I[0], n = home, home_slot, 0, 1
            for s in range(R):
                supply_R[s] = tokens_RE[s, e]
                left_I[0] += supply_R[s]
            while x >= 0:
                rank_I[n], local_I[n], left_I[n] = x // B, num_homes + x % B, quota_RB[x // B, x % B]
                left_I[0] -= left_I[n]
                n, x = n + 1, next_X[x]
            split_RI[:, :n] = 0
            if chunk:
                _split_in_chunks(tokens_RE[:, e], left_I[:n], chunk, remainder_I, split_RI)
            else:
                split_expert(supply_R, rank_I[:n], left_I[:n], ranks_per_node, remainder_I, open_I, column_I, split_RI)
            for i in range(n):
                r, p = rank_I[i], local_I[i]
                send_LRP[layer, r, p], first_LRP[layer, r, p] = split_RI[rank, i], start
                start += split_RI[rank, i]
                for s in range(R):
                    if r == rank:
                        receive_LRP[layer, s, p] = split_RI[s, i]
                    if i > 0:
                        tokens_LRB[layer, r, p - num_homes] += split_RI[s, i]
                    if split_RI[s, i] > 0:
                        leaves_L[layer] |= s // G != r // G
                        changes_L[layer] |= s % G != r % G


@compiled
@no_type_check
def _split_in_chunks(supply_R, quota_I, chunk, chunks_I, split_RI) -> None:
    """Write the split of one expert in whole chunks; the rule is that of `chunked_split`."""
    n, total = len(quota_I), quota_I.sum()
    missing = -(-total // chunk)
    for i in range(n):
        chunks_I[i] = quota_I[i] // chunk
        missing -= chunks_I[i]
    for _ in range(missing):  # by largest remainder; ties go to the earlier instance
        best = -1
        for i in range(n):
            if chunks_I[i] * chunk <= quota_I[i] and (
                best < 0 or quota_I[i] - chunks_I[i] * chunk > quota_I[best] - chunks_I[best] * chunk
            ):
                best = i
        chunks_I[best] += 1
    s, from_s, start = 0, supply_R[0], 0  # source of the next token-slot, and how many it has left
    for i in range(n):
        end = min(start + chunks_I[i] * chunk, total)
        while start < end:
            while from_s == 0:
                s += 1
                from_s = supply_R[s]
            moved = min(from_s, end - start)
            split_RI[s, i] += moved
            from_s -= moved
            start += moved
