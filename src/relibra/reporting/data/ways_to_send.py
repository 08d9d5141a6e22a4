"""`ways_to_send`: one step's rows sent per choice, once per rank, once per node, or all gathered, side by side.

Bytes, messages and factors are those of the forward dispatches (`byte_ledger`), seconds those of rows forward and
backward, as a simulated step has them. A plan knows counts before the step; a router's have to be exchanged in each
layer before any row has an address (MoE-Hub, arXiv 2605.05888). Gathering needs no counts of experts: a rank takes
every token, and picks. Per choice sends fewer rows than gathering while a token has fewer choices than there are
ranks; once per rank never sends more (MegaScale-MoE, arXiv 2505.11432).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from relibra.cluster import Cluster
from relibra.planning.costs.exchange import exchange_costs
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.layer_costs import counts_seconds
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.reporting.data.byte_ledger import byte_ledger
from relibra.routing.demand import ScheduledDemand

Way = Literal["per choice", "once per rank", "once per node", "gather all"]


class SentRows(NamedTuple):
    """A step's rows, sent in one way.

    used               the plan sends its rows in this way; True for none if that is once per node and pairs are unknown
    ..._bytes, ..._factor   as in `ByteLedger`, of all layers together
    messages, fences   of all ranks; with puts per expert, a message to another node for each expert that gets rows,
                       even where a token is sent to its rank once
    seconds            with counts known before the step
    seconds_counting   with counts exchanged in each layer's forward pass
    """

    way: Way
    used: bool
    useful_bytes: float
    duplicate_bytes: float
    forwarded_bytes: float
    messages: int
    fences: int
    data_factor: float
    routing_factor: float
    port_factor: float
    seconds: float
    seconds_counting: float


def ways_to_send(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    top_k: int,
    distinct: DistinctRows | None = None,
) -> list[SentRows]:
    """Return the ways to send the rows of a plan; ways that send a token once are there if shared choices are known.

    demand     with the schedule of the plan
    top_k      choices of a token
    distinct   rows counted token by token; None: `demand.pairs_LEE`, if known, bounds rows sent once from below
    returns    [] on one rank
    raises     as `exchange_costs`
    """
    if plan.num_ranks == 1:
        return []
    known, flat = distinct is not None or demand.pairs_LEE is not None, replace(plan, dispatch="flat")
    all_rows = gathered_rows(demand, top_k, plan.num_nodes)
    puts_to_peers = replace(cluster, transport=replace(cluster.transport, puts="peer"))
    ways: list[tuple[Way, StepPlan, ScheduledDemand, Cluster, DistinctRows | None]] = [
        ("per choice", flat, replace(demand, pairs_LEE=None), cluster, None),
        ("once per rank", flat, demand, cluster, distinct),
        ("once per node", replace(plan, dispatch="hierarchical"), demand, cluster, distinct),
        ("gather all", flat, demand, puts_to_peers, all_rows),
    ]
    flat_way = "once per rank" if known else "per choice"
    used = flat_way if plan.dispatch == "flat" or plan.num_nodes == 1 else "once per node"
    if plan.num_nodes == 1:
        del ways[2]
    counting = demand.tokens_MLRE[..., 0, 0].size * counts_seconds(cluster, plan.num_experts)
    found = []
    for way, own, own_demand, machine, rows in ways:
        if way.startswith("once") and not known:
            continue
        costs = exchange_costs(own, own_demand, machine, expert, rows)
        once, gathered = way.startswith("once"), all_rows if way == "gather all" else None
        ledger = byte_ledger(
            own, demand, cluster, expert.row_bytes, distinct=distinct, send_once=once, gathered=gathered
        ).total()
        seconds = 2.0 * float((costs.dispatch_ML + costs.combine_ML).sum())
        found.append(
            SentRows(
                way=way,
                used=way == used,
                useful_bytes=float(ledger.useful_L[0]),
                duplicate_bytes=float(ledger.duplicate_L[0]),
                forwarded_bytes=float(ledger.forwarded_L[0]),
                messages=sum(int(stage.messages_ML.sum()) for stage in costs.stages),
                fences=sum(int(stage.fences_ML.sum()) for stage in costs.stages),
                data_factor=float(ledger.data_factor_L[0]),
                routing_factor=float(ledger.routing_factor_L[0]),
                port_factor=float(ledger.port_factor_L[0]),
                seconds=seconds,
                seconds_counting=seconds + counting * (gathered is None),
            )
        )
    return found


def gathered_rows(demand: ScheduledDemand, top_k: int, num_nodes: int) -> DistinctRows:
    """Return the rows of ranks that send each token to all ranks."""
    tokens_MLR1 = demand.tokens_MLRE.sum(axis=3, keepdims=True) // top_k
    shape = demand.tokens_MLRE.shape[:3]
    return DistinctRows(
        ranks_MLRR=np.broadcast_to(tokens_MLR1, (*shape, shape[2])),
        nodes_MLRN=np.broadcast_to(tokens_MLR1, (*shape, num_nodes)),
    )
