"""`LayerCosts`: the seconds of each (micro-batch, layer, rank) that depend on the plan.

The planner's objective takes maxima over ranks and sums of these arrays, the simulator makes events of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.errors import PlanError
from relibra.planning.costs.compute import expert_seconds
from relibra.planning.costs.copies import CopyCosts, copy_costs
from relibra.planning.costs.exchange import ExchangeCosts, exchange_costs
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.placement import Placement
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCosts:
    """Costs of the expert layers of a step.

    home_MLR, replica_MLR    forward seconds of each rank's experts at home and replicas; backward takes twice them
    exchange                 dispatch and combine
    push, again, gradients   copies of weights before forward and before backward, gradients home after it
    host_seconds             launches and host work of a layer's forward pass; backward takes twice them
    decision_seconds         between a layer's router and its exchange in the forward pass: 0 where the plan is made
                             before the step; where it is live, the exchange of counts and the solver
    live                     weights are pushed after the decision, so no attention hides them in the forward pass
    hides_copies             as for `Cluster`
    """

    home_MLR: Float64[ndarray, "M L R"]
    replica_MLR: Float64[ndarray, "M L R"]
    exchange: ExchangeCosts
    push: CopyCosts
    again: CopyCosts
    gradients: CopyCosts
    host_seconds: float
    decision_seconds: float
    live: bool
    hides_copies: bool

    @property
    def compute_ML(self) -> Float64[ndarray, "M L"]:
        """Return the seconds of the busiest rank's experts, forward and backward."""
        return 3.0 * (self.home_MLR + self.replica_MLR).max(axis=2)

    @property
    def exchange_ML(self) -> Float64[ndarray, "M L"]:
        """Return the seconds of rows, forward and backward: two passes along the traffic and two against it."""
        return 2.0 * (self.exchange.dispatch_ML + self.exchange.combine_ML)

    def exposed_copies_ML(self, attention_seconds: float) -> Float64[ndarray, "M L"]:
        """Return the seconds of copies that do not fit beside attention, forward and backward each by itself.

        attention_seconds   forward attention of one layer and micro-batch; backward takes twice as long
        """
        hiding = attention_seconds if self.hides_copies else 0.0
        backward_ML = self.again.seconds_ML + self.gradients.seconds_ML
        forward_ML = np.maximum(0.0, self.push.seconds_ML - (0.0 if self.live else hiding))
        return forward_ML + np.maximum(0.0, backward_ML - 2 * hiding)

    @property
    def host_ML(self) -> Float64[ndarray, "M L"]:
        """Return the seconds of launches, host work and live decisions, forward and backward."""
        return np.full(self.push.seconds_ML.shape, 3.0 * self.host_seconds + self.decision_seconds)


def layer_costs(
    plan: Placement,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    *,
    distinct: DistinctRows | None = None,
    from_pool: bool = False,
    live: bool = False,
    threads: int | None = 1,
) -> LayerCosts:
    """Return the costs of every micro-batch and layer under a plan.

    demand      under the schedule of the plan
    distinct    as for `exchange_costs`
    from_pool   as for `copy_costs`
    live        the plan is made layer by layer, after the router: as UltraEP and MoonEP do
    threads     as for `exchange_costs`
    raises      PlanError when plan, demand and cluster do not fit together
    """
    check_fit(plan, demand, cluster)
    home_MLR, replica_MLR = expert_seconds(plan, demand, cluster, expert)
    push, again, gradients = copy_costs(plan, cluster, expert, from_pool=from_pool)
    return LayerCosts(
        home_MLR=home_MLR,
        replica_MLR=replica_MLR,
        exchange=exchange_costs(plan, demand, cluster, expert, distinct, threads=threads),
        push=push,
        again=again,
        gradients=gradients,
        host_seconds=cluster.layer_seconds,
        decision_seconds=decision_seconds(cluster, plan.num_experts) if live else 0.0,
        live=live,
        hides_copies=cluster.hides_copies,
    )


def decision_seconds(cluster: Cluster, num_experts: int) -> float:
    """Return the seconds of a live decision: an all-gather of every rank's counts, 4 bytes per expert, and the solver.

    The all-gather doubles what each rank has in every round, first inside nodes, then between them.
    """
    G, N, own = cluster.ranks_per_node, cluster.num_nodes, 4.0 * num_experts
    inside = cluster.intra.seconds(own * (G - 1), (G - 1).bit_length())
    between = max(
        link.seconds(own * G * (N - 1), (N - 1).bit_length()) for link in (cluster.inter_send, cluster.inter_receive)
    )
    return inside + between + cluster.solve_seconds


def check_fit(plan: Placement, demand: ScheduledDemand, cluster: Cluster) -> None:
    """Raise PlanError when plan, demand and cluster do not fit together."""
    if (plan.num_nodes, plan.ranks_per_node) != (cluster.num_nodes, cluster.ranks_per_node):
        raise PlanError(
            f"a plan for {plan.num_nodes} x {plan.ranks_per_node} ranks does not fit cluster {cluster.name!r} of "
            f"{cluster.num_nodes} x {cluster.ranks_per_node}: plan again, or use Cluster.with_ranks"
        )
    check_demand(plan, demand)


def check_demand(plan: Placement, demand: ScheduledDemand) -> None:
    """Raise PlanError when the demand is not the plan's."""
    planned = (len(plan.micro_batch_S), *plan.replica_MLRB.shape[:3], plan.num_experts)
    found = (len(demand.counts_SLE), *demand.tokens_MLRE.shape)
    if planned != found:
        raise PlanError(
            f"a plan for (samples, micro-batches, layers, ranks, experts) {planned} does not fit a "
            f"demand of {found}: pass plan.scheduled(demand)"
        )
