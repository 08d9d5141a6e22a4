"""`RankTables`: what one rank sends, receives, computes and pushes in one (micro-batch, layer).

Every rank derives its tables from the same plan and demand, so no counts are exchanged: each rank expects what the
others send. No torch here; rows are moved by `parallel/rows/dispatch.py` in transformers, and by
`integrations/megatron/moe_layer.py` in Megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from relibra.planning.plan import StepPlan
from relibra.planning.traffic.split import TokenSplit, split_tokens
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
    tokens            token-slots that the replica computes; 0: for a resident slot, whose gradient sum travels home
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
    stay_on_rail    every token-slot goes to a rank of the source's number (rank % ranks_per_node), on whichever node;
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


def rank_tables(
    plan: StepPlan, demand: ScheduledDemand, rank: int, micro_batch: int, layer: int, chunk: int | None = None
) -> RankTables:
    """Return the tables of a rank in a micro-batch and layer; for all layers `micro_batch_tables` is faster.

    demand   under the schedule of the plan (`plan.scheduled`)
    layer    position in the plan's layers, not the decoder layer
    chunk    token-slots of a chunk: homes and replicas get whole ones (`chunked_split`); None: the quotas of the plan
    """
    tokens_RE = demand.tokens_MLRE[micro_batch, layer]
    replica_RB, quota_RB = plan.replica_MLRB[micro_batch, layer], plan.quota_MLRB[micro_batch, layer]
    split = split_tokens(tokens_RE, plan.home_LE[layer], replica_RB, quota_RB, plan.ranks_per_node)
    if chunk is not None:
        split = chunked_split(split, chunk)
    place = Place(rank, int(plan.layer_ids[layer]), micro_batch)
    map_E, per_node = plan.physical_to_logical_map[layer], plan.ranks_per_node
    return _make_tables(split, tokens_RE, map_E, place, slots=plan.slots, ranks_per_node=per_node)


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
    tokens_RE: Int64[ndarray, "R E"],
    physical_to_logical_E: Int64[ndarray, " E"],
    replica_RB: Int[ndarray, "R B"],
    quota_RB: Int[ndarray, "R B"],
    ranks_per_node: int,
    place: Place,
    chunk: int | None = None,
) -> RankTables:
    """Return the tables of a rank in a layer whose counts and replicas are known, and nothing else of the step.

    replica_RB, quota_RB   expert in each slot (-1: empty) and its token-slots
    chunk                  as for `rank_tables`
    """
    num_ranks, E = tokens_RE.shape
    home_E = np.argsort(physical_to_logical_E, kind="stable") // (E // num_ranks)
    split = split_tokens(tokens_RE, home_E, replica_RB, quota_RB, ranks_per_node)
    if chunk is not None:
        split = chunked_split(split, chunk)
    slots = replica_RB.shape[1]
    return _make_tables(split, tokens_RE, physical_to_logical_E, place, slots=slots, ranks_per_node=ranks_per_node)


def _make_tables(
    split: TokenSplit,
    tokens_RE: ndarray,
    physical_to_logical_E: ndarray,
    place: Place,
    *,
    slots: int,
    ranks_per_node: int,
) -> RankTables:
    (num_ranks, E), rank = tokens_RE.shape, place.rank
    num_homes = E // num_ranks
    home_slot_E = np.argsort(physical_to_logical_E, kind="stable") % num_homes
    local_I = np.where(split.slot_I < 0, home_slot_E[split.expert_I], num_homes + split.slot_I)
    send_RP, first_RP, receive_RP = np.zeros((3, num_ranks, num_homes + slots), dtype=np.int64)
    own_tokens_I = split.tokens_RI[rank]
    send_RP[split.rank_I, local_I] = own_tokens_I
    first_RP[split.rank_I, local_I] = np.cumsum(own_tokens_I) - own_tokens_I  # instances are ordered by expert
    own_I = split.rank_I == rank
    receive_RP[:, local_I[own_I]] = split.tokens_RI[:, own_I]
    source_R = np.arange(num_ranks)[:, None]
    leaves_RI = split.rank_I // ranks_per_node != source_R // ranks_per_node
    changes_RI = split.rank_I % ranks_per_node != source_R % ranks_per_node
    return RankTables(
        place=place,
        num_homes=num_homes,
        tokens_E=tokens_RE[rank].astype(np.int64),
        send_RP=send_RP,
        first_RP=first_RP,
        receive_RP=receive_RP,
        pushes=_pushes(split, home_slot_E),
        ranks_per_node=ranks_per_node,
        stay_in_node=not split.tokens_RI[leaves_RI].any(),
        stay_on_rail=not split.tokens_RI[changes_RI].any(),
    )


def _pushes(split: TokenSplit, home_slot_E: ndarray) -> tuple[Push, ...]:
    """Return the pushes of replicas that get tokens: an idle replica needs no weights."""
    home_E = split.rank_I[split.slot_I < 0]  # one home per expert, in the order of experts
    tokens_I = split.tokens_RI.sum(axis=0)
    busy_I = np.flatnonzero((split.slot_I >= 0) & (tokens_I > 0))
    expert_I = split.expert_I[busy_I]
    columns = (
        expert_I,
        home_E[expert_I],
        home_slot_E[expert_I],
        split.rank_I[busy_I],
        split.slot_I[busy_I],
        tokens_I[busy_I],
    )
    pushes = [Push(*row) for row in np.stack(columns, axis=1).tolist()]
    return tuple(sorted(pushes, key=lambda push: (push.replica, push.slot)))


def chunked_split(split: TokenSplit, chunk: int) -> TokenSplit:
    """Return the split with each instance's share rounded to whole chunks, for canonical sums.

    The token-slots of an expert in a micro-batch are numbered by (source rank, position). Chunk `c` holds numbers
    `c C` to `(c + 1) C - 1` under every plan; the last one may be short. A plan only decides which instance computes
    which chunks: consecutive ones, so that its rows, in the order of computation, are its chunks one after another.

    chunk    token-slots per chunk, C
    source   UniEP, arXiv 2604.19241
    """
    tokens_RI = np.zeros_like(split.tokens_RI)
    for expert in np.unique(split.expert_I):
        own = np.flatnonzero(split.expert_I == expert)
        tokens_RI[:, own] = _in_chunks(split.tokens_RI[:, own], chunk)
    return replace(split, tokens_RI=tokens_RI)


def _in_chunks(tokens_RI: Int64[ndarray, "R I"], chunk: int) -> Int64[ndarray, "R I"]:
    supply_R = tokens_RI.sum(axis=1)
    total = int(supply_R.sum())
    end_I = np.minimum(np.cumsum(_chunks_per_instance(tokens_RI.sum(axis=0), chunk)) * chunk, total)
    start_I = np.concatenate([[0], end_I[:-1]])
    end_R = np.cumsum(supply_R)[:, None]
    start_R = end_R - supply_R[:, None]
    return np.maximum(0, np.minimum(end_R, end_I) - np.maximum(start_R, start_I))


def _chunks_per_instance(quota_I: Int64[ndarray, " I"], chunk: int) -> Int64[ndarray, " I"]:
    """Return the chunks of each instance, by largest remainder; ties go to the earlier instance, the home first."""
    total = -(-int(quota_I.sum()) // chunk)
    chunks_I = quota_I // chunk
    by_remainder = np.argsort(-(quota_I - chunks_I * chunk), kind="stable")
    chunks_I[by_remainder[: total - int(chunks_I.sum())]] += 1
    return chunks_I
