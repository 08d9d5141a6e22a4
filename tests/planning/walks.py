"""A walk over the tokens of a step, one by one: slow and obvious, to compare counts of rows and bytes with."""

import numpy as np

from relibra.planning.traffic.split import split_tokens


def ranks_of_tokens(plan, demand, experts_TLK, sample_T, m, layer):
    """Yield the source rank and the rank that computes each choice, for each token of a micro-batch.

    demand     scheduled as the plan says
    sample_T   sample of each token; -1: in none
    """
    at = (m, layer)
    arrays = (demand.tokens_MLRE[at], plan.home_LE[layer], plan.replica_MLRB[at], plan.quota_MLRB[at])
    split = split_tokens(*arrays, plan.ranks_per_node)
    left_RI = split.tokens_RI.copy()
    for token in np.flatnonzero((sample_T >= 0) & (demand.micro_batch_S[sample_T] == m)):
        source, ranks = int(demand.rank_S[sample_T[token]]), []
        for expert in experts_TLK[token, layer]:
            i = next(i for i in np.flatnonzero(split.expert_I == expert) if left_RI[source, i] > 0)
            left_RI[source, i] -= 1
            ranks.append(int(split.rank_I[i]))
        yield source, ranks
