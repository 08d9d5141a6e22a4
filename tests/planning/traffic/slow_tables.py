"""The slow and obvious tables of one rank in one layer, and chunks that are dealt one by one."""

from dataclasses import replace

import numpy as np

from relibra.planning.traffic.rank_tables import Place, Push, RankTables
from relibra.planning.traffic.split import split_tokens


def rank_tables_reference(plan, demand, rank, micro_batch, layer, chunk=None):
    """Return the tables of a rank in a micro-batch and layer, from the split of all its tokens."""
    tokens_RE = demand.tokens_MLRE[micro_batch, layer]
    replica_RB, quota_RB = plan.replica_MLRB[micro_batch, layer], plan.quota_MLRB[micro_batch, layer]
    split = split_tokens(tokens_RE, plan.home_LE[layer], replica_RB, quota_RB, plan.ranks_per_node)
    if chunk is not None:
        split = chunked_split(split, chunk)
    place = Place(rank, int(plan.layer_ids[layer]), micro_batch)
    map_E, per_node = plan.physical_to_logical_map[layer], plan.ranks_per_node
    return _make_tables(split, tokens_RE, map_E, place, slots=plan.slots, ranks_per_node=per_node)


def _make_tables(split, tokens_RE, physical_to_logical_E, place, *, slots, ranks_per_node):
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


def _pushes(split, home_slot_E):
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


def chunked_split(split, chunk):
    """Return the split with each instance's share in whole chunks, expert by expert."""
    tokens_RI = np.zeros_like(split.tokens_RI)
    for expert in np.unique(split.expert_I):
        own = np.flatnonzero(split.expert_I == expert)
        supply_R, quota_I = split.tokens_RI[:, own].sum(axis=1), split.tokens_RI[:, own].sum(axis=0)
        tokens_RI[:, own] = deal_chunks(supply_R.tolist(), quota_I.tolist(), chunk)
    return replace(split, tokens_RI=tokens_RI)


def deal_chunks(supply_R, quota_I, chunk):
    """Number the token-slots of an expert by source, cut them into chunks, and deal these out one by one."""
    sources = [rank for rank, supply in enumerate(supply_R) for _ in range(supply)]
    pieces = [sources[begin : begin + chunk] for begin in range(0, len(sources), chunk)]
    shares = [quota // chunk for quota in quota_I]
    while sum(shares) < len(pieces):
        short = [quota - share * chunk for quota, share in zip(quota_I, shares, strict=True)]
        shares[short.index(max(short))] += 1
    result = np.zeros((len(supply_R), len(quota_I)), dtype=int)
    for instance, share in enumerate(shares):
        for piece in pieces[:share]:
            for source in piece:
                result[source, instance] += 1
        pieces = pieces[share:]
    return result
