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
    push, push_again, gradients   weights before forward and again before backward, gradients home after it
    host_seconds             launches and host work of a layer's forward pass; backward takes twice them
    decision_seconds         between a layer's router and its exchange in the forward pass: 0 where the plan is made
                             before the step; where it is live, the exchange of counts and the solver
    live                     weights are pushed after the decision, so no attention hides them in the forward pass
    hides_copies             as for `Cluster`
    resident                 every layer has slots of its own
    """

    home_MLR: Float64[ndarray, "M L R"]
    replica_MLR: Float64[ndarray, "M L R"]
    exchange: ExchangeCosts
    push: CopyCosts
    push_again: CopyCosts
    gradients: CopyCosts
    host_seconds: float
    decision_seconds: float
    live: bool
    hides_copies: bool
    resident: bool

    @property
    def compute_ML(self) -> Float64[ndarray, "M L"]:
        """Return the seconds of the busiest rank's experts, forward and backward."""
        return 3.0 * (self.home_MLR + self.replica_MLR).max(axis=2)

    @property
    def exchange_ML(self) -> Float64[ndarray, "M L"]:
        """Return the seconds of rows and gate weights, forward and backward: rows travel twice each way."""
        gates_ML = self.exchange.gates_ML + self.exchange.gates_back_ML
        return 2.0 * (self.exchange.dispatch_ML + self.exchange.combine_ML) + gates_ML

    def exposed_copies_ML(
        self, attention_M: Float64[ndarray, " M"], *, without_queue: bool = False
    ) -> Float64[ndarray, "M L"]:
        """Return the seconds that ranks wait for copies, forward and backward, as the executor runs them.

        attention_M     forward seconds before the experts of each layer; backward takes twice as long
        without_queue   if copies are hidden, leave out waits for pushes before forward, whose queue spans all layers
        """
        if not self.hides_copies:
            return self.push.seconds_ML + self.push_again.seconds_ML + self.gradients.seconds_ML
        backward_ML = self._exposed_backward_ML(attention_M)
        return backward_ML if without_queue else self._exposed_forward_ML(attention_M) + backward_ML

    def _exposed_forward_ML(self, attention_M: Float64[ndarray, " M"]) -> Float64[ndarray, "M L"]:
        """Return the waits for pushes, which run one after another beside everything before the replicas.

        Resident slots are free from the start of the pass, shared slots when results of the layer that used them are
        back, and a live balancer pushes after its decision. There are two clocks: `t` always runs; `v` stops while rows
        cross between nodes, as pushes between nodes pause then. A push may start at `free` and has arrived at `here`.
        """
        rows_ML = self.exchange.dispatch_ML + self.exchange.gates_ML
        inside_ML, inside_back_ML = self.exchange.inside_ML
        host = self.host_seconds + self.decision_seconds
        exposed_ML = np.zeros_like(rows_ML)
        now_t, now_v, free_t, free_v = (np.zeros(len(rows_ML)) for _ in range(4))
        for layer in range(rows_ML.shape[1]):
            sends_t, sends_v = now_t + attention_M + host, now_v + attention_M + host
            start_t, start_v = sends_t + rows_ML[:, layer], sends_v + inside_ML[:, layer]
            if self.live:
                free_t, free_v = np.maximum(free_t, sends_t), np.maximum(free_v, sends_v)
            here_t, here_v = free_t + self.push.seconds_ML[:, layer], free_v + self.push.network_ML[:, layer]
            wait_MR = np.maximum(here_t - start_t, here_v - start_v)[:, None] * self.push.takes_part_MLR[:, layer]
            home_MR, replica_MR = self.home_MLR[:, layer], self.replica_MLR[:, layer]
            experts_M = (np.maximum(home_MR, wait_MR) + replica_MR).max(axis=1)
            exposed_ML[:, layer] = experts_M - (home_MR + replica_MR).max(axis=1)
            now_t = start_t + experts_M + self.exchange.combine_ML[:, layer]
            now_v = start_v + experts_M + inside_back_ML[:, layer]
            if self.resident:
                free_t, free_v = here_t, here_v
            else:
                pushes_M = self.push.takes_part_MLR[:, layer].any(axis=1)
                free_t, free_v = np.where(pushes_M, now_t, free_t), np.where(pushes_M, now_v, free_v)
        return exposed_ML

    def _exposed_backward_ML(self, attention_M: Float64[ndarray, " M"]) -> Float64[ndarray, "M L"]:
        """Return the waits for second pushes and for gradients.

        The second push of a layer begins when gradients of the layer above are at home. Gradients leave when the last
        rank has computed those of its replicas, and travel beside the experts at home.
        """
        back_ML = self.exchange.combine_ML + self.exchange.gates_back_ML
        inside_ML, inside_back_ML = self.exchange.inside_ML
        computing_M1 = 2 * (attention_M + self.host_seconds)[:, None]
        # The top layer has no second push, so what `roll` brings there is not used.
        free_t = computing_M1 + self.exchange.dispatch_ML + np.roll(back_ML, -1, axis=1)
        free_v = computing_M1 + inside_ML + np.roll(inside_back_ML, -1, axis=1)
        wait_ML = np.maximum(self.push_again.seconds_ML - free_t, self.push_again.network_ML - free_v)
        replica_MLR = np.maximum(0.0, wait_ML[..., None] * self.push_again.takes_part_MLR) + 2 * self.replica_MLR
        done_ML = (replica_MLR + 2 * self.home_MLR).max(axis=2)
        gradients_home_ML = np.where(
            self.gradients.seconds_ML > 0, replica_MLR.max(axis=2) + self.gradients.seconds_ML, 0.0
        )
        return np.maximum(done_ML, gradients_home_ML) - 2 * (self.home_MLR + self.replica_MLR).max(axis=2)

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
    live: bool = False,
) -> LayerCosts:
    """Return the costs of every micro-batch and layer under a plan.

    demand     under the schedule of the plan
    distinct   as for `exchange_costs`
    live       the plan is made layer by layer, after the router: as UltraEP and MoonEP do
    raises     PlanError when plan, demand and cluster do not fit together
    """
    check_fit(plan, demand, cluster)
    home_MLR, replica_MLR = expert_seconds(plan, demand, cluster, expert)
    push, push_again, gradients = copy_costs(plan, cluster, expert)
    return LayerCosts(
        home_MLR=home_MLR,
        replica_MLR=replica_MLR,
        exchange=exchange_costs(plan, demand, cluster, expert, distinct),
        push=push,
        push_again=push_again,
        gradients=gradients,
        host_seconds=cluster.layer_seconds,
        decision_seconds=decision_seconds(cluster, plan.num_experts) if live else 0.0,
        live=live,
        hides_copies=cluster.hides_copies,
        resident=plan.resident,
    )


def decision_seconds(cluster: Cluster, num_experts: int) -> float:
    """Return the seconds of a live decision: counts and the solver."""
    return counts_seconds(cluster, num_experts) + cluster.solve_seconds


def counts_seconds(cluster: Cluster, num_experts: int) -> float:
    """Return the seconds of an all-gather of every rank's counts, 4 bytes per expert.

    It doubles what each rank has in every round, first inside nodes, then between them.
    """
    G, N, own = cluster.ranks_per_node, cluster.num_nodes, 4.0 * num_experts
    inside = cluster.intra.seconds(own * (G - 1), (G - 1).bit_length())
    between = max(
        link.seconds(own * G * (N - 1), (N - 1).bit_length()) for link in (cluster.inter_send, cluster.inter_receive)
    )
    return inside + between


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
