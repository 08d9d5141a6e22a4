"""`RankTables`: what one rank sends, receives, computes and pushes in one (micro-batch, layer).

Every rank derives its tables from the same plan and demand, so no counts are exchanged: each rank expects what the
others send. No torch here; rows are moved by `parallel/rows/dispatch.py` in transformers, and by
`integrations/megatron/moe_layer.py` in Megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.plan import StepPlan
from relibra.planning.traffic.split import split_expert
from relibra.routing.compiled import compiled
from relibra.routing.demand import ScheduledDemand


class Place(NamedTuple):
    """Place in a step, for messages and events; -1: no layer or no micro-batch."""

    rank: int
    layer_id: int
    micro_batch: int

    def __str__(self) -> str:
        """Name rank, layer and micro-batch, as far as they apply."""
        layer = f", layer {self.layer_id}" * (self.layer_id >= 0)
        return f"rank {self.rank}{layer}" + f", micro-batch {self.micro_batch}" * (self.micro_batch >= 0)


class Push(NamedTuple):
    """Copy of one expert from its home to a replica slot; gradients go the reverse way.

    expert            logical expert
    home, home_slot   rank of the home, and the expert's position in that rank's parameters
    replica, slot     rank of the replica, and its spare slot (0..B-1)
    tokens            token-slots that the replica computes; 0 where only a resident slot's gradient sum travels home
    """

    expert: int
    home: int
    home_slot: int
    replica: int
    slot: int
    tokens: int


def from_homes_on(rank: int, pushes: Sequence[Push]) -> list[tuple[int, Push]]:
    """Return the pushes of experts that are at home on a rank, with their numbers."""
    return [(n, push) for n, push in enumerate(pushes) if push.home == rank]


def to_slots_on(rank: int, pushes: Sequence[Push]) -> list[tuple[int, Push]]:
    """Return the pushes into the slots of a rank, with their numbers."""
    return [(n, push) for n, push in enumerate(pushes) if push.replica == rank]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTables:
    """What one rank sends, receives, computes and pushes in one (micro-batch, layer).

    Local slots `P` of a rank: its E / R experts at home, in the order of their parameters, then its B replica slots.

    num_homes       E / R
    tokens_E        token-slots that this rank sends to each expert
    send_RP         token-slots that this rank sends to local slot P of rank R
    first_RP        first one sent there, as index in this rank's token-slots in stable order by expert; the others
                    follow it
    receive_RP      token-slots that arrive from source rank R for own local slot P
    pushes          replicas of all ranks that get tokens, by (replica rank, slot): the same list on every rank. Each is
                    pushed unless its slot holds the weights already
    ranks_per_node  rank r is on node r // ranks_per_node
    stay_in_node    no rank sends a token-slot to another node; the same on every rank
    stay_on_rail    every token-slot goes to a rank with the same rank % ranks_per_node as its source, on any node;
                    the same on every rank
    """

    place: Place
    num_homes: int
    tokens_E: Int64[ndarray, " E"]
    send_RP: Int64[ndarray, "R P"]
    first_RP: Int64[ndarray, "R P"]
    receive_RP: Int64[ndarray, "R P"]
    pushes: tuple[Push, ...]
    ranks_per_node: int
    stay_in_node: bool
    stay_on_rail: bool

    @property
    def all_stay(self) -> bool:
        """Return whether no rank sends a token-slot to another: nothing has to be exchanged."""
        return self.stay_in_node and self.stay_on_rail

    @cached_property
    def send_order_X(self) -> Int64[ndarray, " X"]:
        """Return which token-slot is sent X-th, as index in this rank's token-slots in stable order by expert.

        They are sent in order of destination rank, local slot, position.
        """
        runs = zip(self.first_RP.ravel().tolist(), self.send_RP.ravel().tolist(), strict=True)
        return np.concatenate([np.arange(first, first + length) for first, length in runs])

    @cached_property
    def compute_order_Y(self) -> Int64[ndarray, " Y"]:
        """Return which arrived row is computed Y-th; rows arrive in order of source rank, local slot, position.

        They are computed in order of local slot, source rank, position.
        """
        return np.argsort(self._arrived_slot_Y, kind="stable")

    @property
    def slot_Y(self) -> Int64[ndarray, " Y"]:
        """Return the local slot of each row in the order of computation; homes come first."""
        return self._arrived_slot_Y[self.compute_order_Y]

    @property
    def _arrived_slot_Y(self) -> Int64[ndarray, " Y"]:
        num_ranks, P = self.receive_RP.shape
        return np.repeat(np.tile(np.arange(P), num_ranks), self.receive_RP.ravel())

    @property
    def num_home_rows(self) -> int:
        """Return the number of rows for the experts at home on this rank; its replicas compute the others."""
        return int(self.receive_RP[:, : self.num_homes].sum())

    @property
    def pushes_from_here(self) -> list[tuple[int, Push]]:
        """Return the pushes of experts that are at home on this rank, with their numbers."""
        return from_homes_on(self.place.rank, self.pushes)

    @property
    def pushes_to_here(self) -> list[tuple[int, Push]]:
        """Return the pushes into the slots of this rank, with their numbers."""
        return to_slots_on(self.place.rank, self.pushes)


def micro_batch_tables(
    plan: StepPlan, demand: ScheduledDemand, rank: int, micro_batch: int, chunk: int | None = None
) -> list[RankTables]:
    """Return the tables of a rank in each layer of a micro-batch.

    demand   under the schedule of the plan (`plan.scheduled`)
    chunk    token-slots of a chunk: homes and replicas get whole ones (`chunked_split`); None: the quotas of the plan
    """
    return _make_tables(
        demand.tokens_MLRE[micro_batch],
        plan.physical_to_logical_map,
        plan.replica_MLRB[micro_batch],
        plan.quota_MLRB[micro_batch],
        plan.ranks_per_node,
        [Place(rank, layer_id, micro_batch) for layer_id in plan.layer_ids.tolist()],
        chunk,
    )


def rank_tables(
    plan: StepPlan, demand: ScheduledDemand, rank: int, micro_batch: int, layer: int, chunk: int | None = None
) -> RankTables:
    """Return the tables of a rank in a micro-batch and a layer, given as position on the plan's layer axis."""
    at, place = (micro_batch, layer), Place(rank, int(plan.layer_ids[layer]), micro_batch)
    placed = plan.physical_to_logical_map[layer], plan.replica_MLRB[at], plan.quota_MLRB[at]
    return layer_tables(demand.tokens_MLRE[at], *placed, plan.ranks_per_node, place, chunk)


def home_tables(
    tokens_RE: Int64[ndarray, "R E"],
    physical_to_logical_E: Int64[ndarray, " E"],
    place: Place,
    ranks_per_node: int | None = None,
) -> RankTables:
    """Return the tables of a rank when every expert is computed at home, as without a plan.

    ranks_per_node   None: all ranks are one node
    """
    none_RB, per_node = np.zeros((len(tokens_RE), 0), dtype=np.int64), ranks_per_node or len(tokens_RE)
    return layer_tables(tokens_RE, physical_to_logical_E, none_RB, none_RB, per_node, place)


def layer_tables(
    tokens_RE: Int[ndarray, "R E"],
    physical_to_logical_E: Int[ndarray, " E"],
    replica_RB: Int[ndarray, "R B"],
    quota_RB: Int[ndarray, "R B"],
    ranks_per_node: int,
    place: Place,
    chunk: int | None = None,
) -> RankTables:
    """Return the tables of a rank in a layer whose counts and replicas are known, and nothing else of the step.

    replica_RB, quota_RB   expert in each slot (-1: empty) and its token-slots
    chunk                  as for `micro_batch_tables`
    """
    [tables] = _make_tables(
        tokens_RE[None], physical_to_logical_E[None], replica_RB[None], quota_RB[None], ranks_per_node, [place], chunk
    )
    return tables


def _make_tables(
    tokens_LRE: Int[ndarray, "L R E"],
    physical_to_logical_LE: Int[ndarray, "L E"],
    replica_LRB: Int[ndarray, "L R B"],
    quota_LRB: Int[ndarray, "L R B"],
    ranks_per_node: int,
    places: Sequence[Place],
    chunk: int | None,
) -> list[RankTables]:
    """Return the tables of the rank of `places` in their layers, one after another."""
    (L, R, E), rank = tokens_LRE.shape, places[0].rank if places else 0
    B, num_homes = replica_LRB.shape[2], E // R
    position_LE = np.argsort(physical_to_logical_LE, axis=1, kind="stable")
    send_LRP, first_LRP, receive_LRP = np.zeros((3, L, R, num_homes + B), dtype=np.int64)
    tokens_LRB = np.zeros((L, R, B), dtype=np.int64)
    leaves_L, changes_L = np.zeros((2, L), dtype=np.bool_)
    _fill(  # arrays of the types that plans have: the kernel is compiled once
        np.ascontiguousarray(tokens_LRE, dtype=np.int32),
        position_LE,
        np.ascontiguousarray(replica_LRB, dtype=np.int16),
        np.ascontiguousarray(quota_LRB, dtype=np.int32),
        ranks_per_node,
        rank,
        0 if chunk is None else chunk,
        (send_LRP, first_LRP, receive_LRP, tokens_LRB, leaves_L, changes_L),
    )
    pushes_L = _pushes(tokens_LRB, replica_LRB, position_LE, num_homes)
    return [
        RankTables(
            place=place,
            num_homes=num_homes,
            tokens_E=tokens_LRE[layer, rank].astype(np.int64),
            send_RP=send_LRP[layer],
            first_RP=first_LRP[layer],
            receive_RP=receive_LRP[layer],
            pushes=tuple(pushes_L[layer]),
            ranks_per_node=ranks_per_node,
            stay_in_node=not leaves_L[layer],
            stay_on_rail=not changes_L[layer],
        )
        for layer, place in enumerate(places)
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
                chunked_split(tokens_RE[:, e], left_I[:n], chunk, remainder_I, split_RI)
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
def chunked_split(supply_R, quota_I, chunk, chunks_I, split_RI) -> None:
    """Write the split of one expert with each instance's share rounded to whole chunks, for canonical sums.

    supply_R, quota_I   token-slots of each source rank and of each instance, the home first
    chunks_I, split_RI  receive the chunks of each instance, and its token-slots by source rank (all 0 before the call)

    The token-slots of an expert in a micro-batch are numbered by (source rank, position). Chunk `c` holds numbers
    `c C` to `(c + 1) C - 1` under every plan; the last one may be short. A plan only decides which instance computes
    which chunks: consecutive ones, so that its rows, in the order of computation, are its chunks one after another.
    Source: UniEP, arXiv 2604.19241. `tests/planning/traffic/slow_tables.py` deals chunks one by one.
    """
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
