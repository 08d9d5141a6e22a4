"""The slow and obvious tables of one rank in one layer, and the split in whole chunks that they follow."""

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


def _make_tables(
    split,
    tokens_RE,
    physical_to_logical_E,
    place,
    *,
    slots,
    ranks_per_node,
):
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


def _in_chunks(tokens_RI, chunk):
    supply_R = tokens_RI.sum(axis=1)
    total = int(supply_R.sum())
    end_I = np.minimum(np.cumsum(_chunks_per_instance(tokens_RI.sum(axis=0), chunk)) * chunk, total)
    start_I = np.concatenate([[0], end_I[:-1]])
    end_R = np.cumsum(supply_R)[:, None]
    start_R = end_R - supply_R[:, None]
    return np.maximum(0, np.minimum(end_R, end_I) - np.maximum(start_R, start_I))


def _chunks_per_instance(quota_I, chunk):
    """Return the chunks of each instance, by largest remainder; ties go to the earlier instance, the home first."""
    total = -(-int(quota_I.sum()) // chunk)
    chunks_I = quota_I // chunk
    by_remainder = np.argsort(-(quota_I - chunks_I * chunk), kind="stable")
    chunks_I[by_remainder[: total - int(chunks_I.sum())]] += 1
    return chunks_I
