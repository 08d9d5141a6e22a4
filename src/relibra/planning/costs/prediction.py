"""The objective: the predicted seconds of a planned step, term by term.

    total = sum over micro-batches and layers of (busiest rank's experts + busiest rank's attention + exchange
            + exposed copies + host) + relocation

Ranks wait for each other in every layer of every micro-batch, so each term takes its maximum over ranks before it is
summed (ReLibra, arXiv 2605.08639; ForeMoE, arXiv 2606.11867). All figures are a model of the machine, not a
measurement, and carry the label `model`. Router and optimizer are not in the total: no plan changes them. Attention is,
because a schedule that gathers long samples on some ranks lets the others wait; host work is, because a live balancer
decides while everybody waits. The total counts moves in full; plans are compared with moves / `Budget.steps_served`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from relibra.cluster import Cluster
from relibra.planning.costs.compute import busiest_attention_M
from relibra.planning.costs.copies import relocation_seconds
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.costs.layer_costs import layer_costs
from relibra.planning.costs.step_bytes import StepBytes, moved_bytes, sent_bytes
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted cost of a plan in one step, summed over micro-batches and layers.

    compute, attention, exchange             seconds
    copies                                   seconds that ranks wait for copies
    host                                     seconds of launches and host work, and of a live balancer's decisions
    relocation                               seconds of all moves, once before the step
    cross_node_token_slots                   token-slots computed on another node than the one they come from
    bytes                                    by kind, inside nodes and between them
    """

    compute: float
    attention: float
    exchange: float
    copies: float
    host: float
    relocation: float
    cross_node_token_slots: int
    bytes: StepBytes

    @property
    def total(self) -> float:
        """Return the sum of the six terms, in seconds."""
        return self.compute + self.attention + self.exchange + self.copies + self.host + self.relocation

    def as_dict(self) -> dict[str, float]:
        """Return the six terms and their total by name, in seconds, as `StepPlan.predicted` holds them."""
        names = ("compute", "attention", "exchange", "copies", "host", "relocation", "total")
        return {name: float(getattr(self, name)) for name in names}


def predict(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    expert: ExpertShape,
    *,
    attention_seconds: float | None = None,
    live: bool = False,
) -> Prediction:
    """Return the modelled seconds and bytes of a step under a plan.

    demand             with the plan's schedule (`plan.scheduled`). With `pairs_LEE` a token travels once per
                       destination rank, or node (`exchange_costs`); without, each token-slot travels, which is the
                       upper bound
    attention_seconds  forward attention of one layer and micro-batch, under which copies hide; None: that of the
                       busiest rank
    live               as for `layer_costs`
    raises             PlanError when plan, demand and cluster do not fit together
    """
    attention_M = busiest_attention_M(demand, cluster, expert)
    hiding_M = attention_M if attention_seconds is None else np.full(len(attention_M), attention_seconds)
    costs = layer_costs(plan, demand, cluster, expert, live=live)
    executed = replace(costs, push_again=costs.push_again.without_last())  # the last layer's are still in the slots
    return Prediction(
        compute=float(costs.compute_ML.sum()),
        attention=3.0 * len(demand.layer_ids) * float(attention_M.sum()),
        exchange=float(costs.exchange_ML.sum()),
        copies=float(costs.exposed_copies_ML(hiding_M).sum()),
        host=float(costs.host_ML.sum()),
        relocation=relocation_seconds(plan.previous, plan, cluster, expert),
        cross_node_token_slots=int(costs.exchange.cross_node_ML.sum()),
        bytes=sent_bytes(executed, expert.row_bytes, expert.bytes_per_value)._replace(
            moves=moved_bytes(plan.previous, plan, expert)
        ),
    )
