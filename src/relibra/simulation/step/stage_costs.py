"""`StageCosts`: seconds and rows of one pipeline stage of one expert-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.costs.compute import dense_seconds
from relibra.planning.costs.exchange import combine_arrays
from relibra.planning.costs.layer_costs import LayerCosts, layer_costs
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.cost_model import (
    Gathers,
    gathered_bytes,
    handover_seconds,
    owned_parameters,
    rows_and_scores,
    spread_seconds,
)
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts(LayerCosts):
    """`LayerCosts` of one stage, and the costs around its expert layers; forward seconds, backward takes twice as long.

    layer_ids                  decoder layer of each entry of the layer axis
    rows_MR                    tokens that each rank feeds in
    attention_MR               seconds before the experts of a layer, the same in all layers
    first_MR, last_MR          seconds before the first layer (dense layers) and after the last one (output matrix)
    gather_seconds, gather_bytes   of the all-gathers of weights outside of experts (FSDP); bytes are those that a rank
                               receives. Zeros where every rank holds them
    handover_M                 to the neighbouring stage
    load_MLR                   token-slots that each rank computes
    flops                      useful flops of all ranks, forward and backward
    row_bytes, gate_bytes      of one hidden state, and of one gate weight
    fetch_seconds, store_seconds   of a rank's weights from host memory, and of its fp32 gradients there
    """

    layer_ids: Int64[ndarray, " L"]
    rows_MR: Float64[ndarray, "M R"]
    attention_MR: Float64[ndarray, "M R"]
    first_MR: Float64[ndarray, "M R"]
    last_MR: Float64[ndarray, "M R"]
    gather_seconds: Gathers
    gather_bytes: Gathers
    handover_M: Float64[ndarray, " M"]
    load_MLR: Int64[ndarray, "M L R"]
    flops: float
    row_bytes: int
    gate_bytes: int
    fetch_seconds: float = 0.0
    store_seconds: float = 0.0

    def gather(self, layer: int, *, root: bool) -> float:
        """Return a layer's all-gather seconds; layer 0 has the dense layers, with `root` also embedding and head."""
        seconds = self.gather_seconds
        return seconds.each if layer else seconds.first + (seconds.root if root else 0.0)

    def before_MR(self, layer: int) -> Float64[ndarray, "M R"]:
        """Return the forward seconds of each rank between the experts of the layer before and those of this one."""
        return self.attention_MR + self.first_MR if layer == 0 else self.attention_MR


def stage_costs(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    layout: ParallelLayout,
    *,
    overlap: bool,
    distinct: DistinctRows | None = None,
    live: bool = False,
    shard_dense: bool = True,
    parts: list[slice] | None = None,
) -> list[StageCosts]:
    """Return the costs of each stage of one expert-parallel group, whose micro-batches the plan's arrays hold.

    In the last stage the backward pass of a micro-batch follows its forward pass at once, so the replicas of the last
    layer are still in the slots and are not pushed again.

    demand          under the schedule of the plan
    overlap         False: replicas of the last layer are pushed again too, as the planner's objective counts them
    distinct        as for `exchange_costs`
    live            as for `layer_costs`
    shard_dense     weights outside of experts are spread over the ranks of the group (FSDP)
    parts           expert layers of each stage; None: those of the layout
    """
    expert = model.expert
    rows_MR, score_flops_MR = rows_and_scores(plan, demand, model)
    attention_MR = dense_seconds(cluster, rows_MR, model.non_expert_parameters, score_flops_MR)
    dense_MR = model.dense_layers * dense_seconds(cluster, rows_MR, model.dense_layer_parameters, score_flops_MR)
    head_MR = dense_seconds(cluster, rows_MR, model.head_parameters)
    costs = layer_costs(plan, demand, cluster, expert, distinct=distinct, live=live)
    load_MLR, nothing_MR = plan.rank_load(demand), np.zeros_like(rows_MR)
    found = []
    for layers in layout.stage_layers(len(plan.layer_ids)) if parts is None else parts:
        first, last = layers.start == 0, layers.stop == len(plan.layer_ids)
        around_MR = (layers.stop - layers.start) * attention_MR + first * dense_MR + last * head_MR
        flops = 3 * float(around_MR.sum()) * cluster.flops_per_second
        flops += 3.0 * expert.flops_per_token_slot * float(load_MLR[:, layers].sum())
        gathered = gathered_bytes(model, first=first, last=last) if shard_dense else Gathers(0.0, 0.0, 0.0)
        own = {
            field.name: combine_arrays(lambda one, layers=layers: one[:, layers], getattr(costs, field.name))
            for field in fields(costs)
        }
        shared, experts = owned_parameters(model, layout, layers.stop - layers.start, first=first, last=last)
        held = shared / (plan.num_ranks if shard_dense else 1) + experts
        if last and overlap:
            own["push_again"] = own["push_again"].without_last()
        found.append(
            StageCosts(
                **own,
                layer_ids=plan.layer_ids[layers].astype(np.int64),
                rows_MR=rows_MR,
                attention_MR=attention_MR,
                first_MR=dense_MR if first else nothing_MR,
                last_MR=head_MR if last else nothing_MR,
                gather_seconds=Gathers(*(spread_seconds(cluster, num_bytes) for num_bytes in gathered)),
                gather_bytes=Gathers(*((1 - 1 / plan.num_ranks) * num_bytes for num_bytes in gathered)),
                handover_M=handover_seconds(model, cluster, rows_MR),
                load_MLR=load_MLR[:, layers],
                flops=flops,
                row_bytes=expert.row_bytes,
                gate_bytes=expert.bytes_per_value,
                fetch_seconds=float(cluster.host.seconds(expert.bytes_per_value * held)),
                store_seconds=float(cluster.host.seconds(4.0 * held)),
            )
        )
    return found
