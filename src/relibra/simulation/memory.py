"""Device memory of a training step: bytes of the fullest rank, and its activations without balancing.

A model of bytes, not of an allocator: logits, workspaces, communication buffers and fragmentation are left out, so
leave about a tenth free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.costs.copies import slot_bytes
from relibra.planning.loads import home_rank_load
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.cost_model import gathered_bytes, owned_parameters, rows_and_scores
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.step.group_run import Execution
from relibra.simulation.units import bytes_in_words

_STATE_BYTES = 12
"""fp32 master and two Adam moments per parameter; sharded over the ranks with equal weights."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of the fullest rank, in its fullest pipeline stage.

    parts                weights, gradients (fp32), optimizer, slots (weights and gradients of replicas), activations
    activations_static   activations with the same schedule, every expert at its first home and no replicas
    capacity             memory of a rank
    keeps_activations    for the backward pass; False: recomputed, or there is none
    """

    stage: int
    parts: Mapping[str, float]
    activations_static: float
    capacity: int
    keeps_activations: bool

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return sum(self.parts.values())

    @property
    def warning(self) -> str:
        """Return one sentence if it does not fit, else an empty string."""
        if self.total <= self.capacity:
            return ""
        largest = max(self.parts, key=lambda name: self.parts[name])
        recompute = ", or recompute activations" if self.keeps_activations else ""
        return (
            f"a rank of stage {self.stage} would hold {bytes_in_words(self.total)} of {bytes_in_words(self.capacity)}, "
            f"most of it {largest} ({bytes_in_words(self.parts[largest])}): use more ranks or pipeline stages, smaller "
            f"micro-batches{recompute}"
        )


def memory_use(
    plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, model: ModelShape, how: Execution | None = None
) -> MemoryUse:
    """Return the estimated memory of the fullest stage of a step.

    Weights outside of routed experts are spread over the ranks of a group (`Execution.shard_dense`), and gathered two
    layers at a time, embedding and output matrix for the whole pass; their gradients add up whole on every rank, until
    the last micro-batch. Optimizer state is spread over all ranks that hold the same weights. A stage keeps activations
    of as many micro-batches as are in flight: as there are stages from it to the last.

    demand   under the schedule of the plan
    """
    how = how or Execution()
    groups = 1 if demand.group_M is None else int(demand.group_M.max(initial=0)) + 1
    layout = how.layout(plan.num_ranks, groups)
    rows_MR, _ = rows_and_scores(plan, demand, model)
    static_E = np.repeat(np.arange(plan.num_ranks), plan.num_experts // plan.num_ranks)
    loads = (
        plan.rank_load(demand),
        home_rank_load(demand.load_MLE, np.tile(static_E, (len(plan.layer_ids), 1)), plan.num_ranks),
    )
    found = []
    for stage, layers in enumerate(layout.stage_layers(len(plan.layer_ids))):
        num_layers, last = layers.stop - layers.start, stage == how.pipeline_stages - 1
        in_flight = 1 if how.forward_only else min(how.pipeline_stages - stage, len(rows_MR))
        dense_layers = model.dense_layers if stage == 0 else 0
        kept = [_activations(model, rows_MR, load_MLR[:, layers], dense_layers, in_flight, how) for load_MLR in loads]
        shared, experts = owned_parameters(model, layout, num_layers, first=stage == 0, last=last)
        own = shared / (layout.data_parallel * layout.expert_parallel) + experts / layout.data_parallel
        dense = float(shared * model.expert.bytes_per_value)
        if how.shard_dense:
            held = dense / layout.expert_parallel + sum(gathered_bytes(model, first=stage == 0, last=last))
            dense = min(dense, held)
        trained = 0 if how.forward_only else 1
        expert = model.expert
        parts = {
            "weights": dense + float(experts * expert.bytes_per_value),
            "gradients": trained * 4.0 * (shared + experts),
            "optimizer": trained * _STATE_BYTES * own,
            "slots": float(slot_bytes(plan, expert, num_layers=num_layers, trained=not how.forward_only)),
            "activations": kept[0],
        }
        found.append(
            MemoryUse(
                stage=stage,
                parts=parts,
                activations_static=kept[1],
                capacity=cluster.memory_bytes,
                keeps_activations=not (how.recompute_activations or how.forward_only),
            )
        )
    return max(found, key=lambda use: use.total)


def _activations(
    model: ModelShape,
    rows_MR: ndarray,
    load_MLR: Int64[ndarray, "M L R"],
    dense_layers: int,
    in_flight: int,
    how: Execution,
) -> float:
    """Return bytes of the rank and micro-batch with most, times micro-batches in flight.

    Kept for backward, per token and layer: residual, two normed copies and the attention's output projection (4 hidden
    values), queries, keys, values, and the attention's result; per token-slot: its row in and out, gate, up and their
    product (2 hidden + 3 width), in a dense layer 3 dense widths per token. With recomputation: the residual of each
    layer, and all of this of one layer. Forward only: of one layer.
    """
    expert = model.expert
    per_slot = (2 * expert.hidden + 3 * expert.width) * expert.bytes_per_value
    per_row = _attention_bytes(model) + 3 * model.shared_width * expert.bytes_per_value
    of_layers_MLR = per_row * rows_MR[:, None, :] + per_slot * load_MLR
    if not of_layers_MLR.size:
        return 0.0
    dense_bytes = _attention_bytes(model) + 3 * model.dense_width * model.expert.bytes_per_value
    of_dense_MR = dense_bytes * rows_MR
    if not (how.recompute_activations or how.forward_only):
        return in_flight * float((of_layers_MLR.sum(axis=1) + dense_layers * of_dense_MR).max())
    num_layers = load_MLR.shape[1] + dense_layers
    residuals = 0 if how.forward_only else num_layers * model.expert.row_bytes * float(rows_MR.max())
    largest = max(float(of_layers_MLR.max()), float(of_dense_MR.max()) if dense_layers else 0.0)
    return in_flight * residuals + largest


def _attention_bytes(model: ModelShape) -> int:
    heads = 2 * (model.query_heads + model.kv_heads) * model.head_dim
    if model.latent is not None:
        one = model.latent
        heads = model.query_heads * (2 * (one.nope_dim + one.rope_dim) + 2 * one.value_dim) + one.kv_rank
    return (4 * model.hidden + heads) * model.expert.bytes_per_value
