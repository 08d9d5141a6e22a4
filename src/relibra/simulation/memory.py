"""Device memory of a training step: bytes of the fullest rank, and what they leave for replica slots.

A model of bytes, not of an allocator: workspaces, communication buffers and fragmentation are left out, and so are the
scores of attention without a fused kernel. A tenth (RESERVE) stays free for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.costs.copies import slot_bytes
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.cost_model import gathered_bytes, owned_parameters, owned_share, rows_and_scores
from relibra.simulation.layout import ParallelLayout
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.step.group_run import Execution, mini_batches_of
from relibra.simulation.step.training_step import with_mini_batches
from relibra.simulation.units import format_bytes

_MASTER_BYTES, _MOMENT_BYTES = 4.0, 8.0
"""fp32 master, and two Adam moments, per parameter; sharded over the ranks with equal weights."""
_LOGIT_BYTES = 12.0
"""Bytes per logit in the backward pass of the loss: three fp32 tensors."""
_CHUNK_BYTES = 3 << 28
"""Upper bound with chunked logits, as in `relibra.rl`: three tensors of 2^28 bytes."""
RESERVE = 0.1
"""Share of the device memory for what the estimate leaves out; the same as in `relibra.rl.memory`, so both agree."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of the fullest rank, in its fullest pipeline stage.

    parts                weights (fp32 masters, and bf16 ones in use), gradients (fp32), optimizer (moments), slots
                         (weights and gradients of replicas), activations, logits (bytes above the activations of one
                         recomputed layer: the two are never in memory together, so the larger counts)
    activations_static   activations with the same schedule, every expert at its first home and no replicas
    capacity             memory of a rank; for a part of a model (`cut_model`) its share
    keeps_activations    for the backward pass; False: they are recomputed, or there is no backward pass
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
        if self.total <= (1 - RESERVE) * self.capacity:
            return ""
        largest = max(self.parts, key=lambda name: self.parts[name])
        recompute = ", or recompute activations" if self.keeps_activations else ""
        return (
            f"a rank of stage {self.stage} would hold {format_bytes(self.total)} of {format_bytes(self.capacity)}, "
            f"of which a tenth stays free, and most of it is {largest} ({format_bytes(self.parts[largest])}): use more "
            f"ranks or pipeline stages, smaller micro-batches{recompute}"
        )


def memory_use(
    plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, model: ModelShape, how: Execution | None = None
) -> MemoryUse:
    """Return the estimated memory of the fullest stage of a step.

    demand   under the schedule of the plan
    """
    how = how or Execution()
    groups = 1 if demand.group_M is None else int(demand.group_M.max(initial=0)) + 1
    layout = how.layout(plan.num_ranks, groups)
    rows_MR, _ = rows_and_scores(plan, demand, model)
    load_MLR, static_MLR = plan.rank_load(demand), StepPlan.static(demand, plan.topology).rank_load(demand)
    found = []
    cut = layout.stage_layers(len(plan.layer_ids)) if how.round_cut is None else how.round_cut.parts()
    for stage, layers in enumerate(cut):
        parts = _parts(model, layout, how, stage, layers, rows_MR, load_MLR)
        slots = slot_bytes(plan, model.expert, num_layers=layers.stop - layers.start, trained=not how.forward_only)
        found.append(
            MemoryUse(
                stage=stage,
                parts={**parts, "slots": float(slots)},
                activations_static=_parts(model, layout, how, stage, layers, rows_MR, static_MLR)["activations"],
                capacity=round(cluster.memory_bytes * model.layers / (model.part_of or model.layers)),
                keeps_activations=not (how.recompute_activations or how.forward_only),
            )
        )
    return max(found, key=lambda use: use.total)


def memory_for_slots(
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    how: Execution | None = None,
    *,
    held_bytes: float = 0.0,
) -> float:
    """Return the GiB of a rank that the static layout of a step leaves for slots in all layers of the demand; 0: none.

    Nothing is measured, so a resumed run gets the same budget. A tenth of the memory stays free.

    demand       `group_M` are mini-batches; with only some of the model's layers, these get their share of the memory
    model        whole; experts and choices are those of the demand
    how          None: activations are recomputed, as `relibra train` does by default for models given by `model.path`
    held_bytes   of a rank for anything else, such as a full copy of the model
    """
    demand, how = with_mini_batches(demand, how or Execution(recompute_activations=True))
    L, E = demand.counts_SLE.shape[1:]
    model = replace(model, experts=E, top_k=demand.top_k or model.top_k)
    layout = how.layout(cluster.num_ranks, 1)
    static = StepPlan.static(demand, cluster.topology, dispatch=cluster.dispatch)
    rows_MR, _ = rows_and_scores(static, demand, model)
    load_MLR = static.rank_load(demand)[:, np.arange(max(L, model.moe_layers)) % L]
    room = (1 - RESERVE) * cluster.memory_bytes - held_bytes
    of_layers = [
        (room - sum(_parts(model, layout, how, stage, layers, rows_MR, load_MLR).values()))
        / (layers.stop - layers.start)
        for stage, layers in enumerate(layout.stage_layers(load_MLR.shape[1]))
    ]
    return max(0.0, L * min(of_layers) / 2**30)


def _parts(
    model: ModelShape,
    layout: ParallelLayout,
    how: Execution,
    stage: int,
    layers: slice,
    rows_MR: ndarray,
    load_MLR: Int64[ndarray, "M L R"],
) -> dict[str, float]:
    """Return the bytes of the fullest rank of a stage by kind, without slots.

    Masters and moments are sharded over all ranks that hold the same weights. With `Execution.shard_dense` (FSDP) a
    rank holds bf16 weights of two layers at a time, and embedding and output matrix for the whole pass; otherwise all
    of them. Gradients are accumulated unsharded until the last micro-batch. Stage s of D keeps activations of at most
    D - s micro-batches (1F1B). With round-robin stages a rank holds the weights of two parts and the activations of one
    micro-batch in one part; the rest waits in host memory.
    """
    first, last, trained = layers.start == 0, layers.stop == load_MLR.shape[1], not how.forward_only
    load_MLR = load_MLR[:, layers]
    num_layers, value_bytes = load_MLR.shape[1], model.expert.bytes_per_value
    of_group = -(-len(rows_MR) // layout.data_parallel)
    most = max(map(len, mini_batches_of(of_group, how.mini_batches)), default=0)  # a pipeline drains behind each
    in_flight = min(how.pipeline_stages - stage, most) if trained and how.round_cut is None else 1
    dense_layers = model.dense_layers if first else 0
    shared, experts = owned_parameters(model, layout, num_layers, first=first, last=last)
    own = owned_share(layout, shared, experts)
    used = float(value_bytes * (shared + experts))
    if how.shard_dense:
        two_layers = value_bytes * experts * min(2, num_layers) / num_layers
        used = min(used, two_layers + sum(gathered_bytes(model, first=first, last=last)))
    shard_bytes = _MASTER_BYTES if trained else value_bytes * how.shard_dense
    weights = used + shard_bytes * own
    if how.fetches:
        weights = 2 * value_bytes * (shared / (layout.expert_parallel if how.shard_dense else 1) + experts)
        weights += how.shard_dense * sum(gathered_bytes(model, first=first, last=last))
        how = replace(how, recompute_activations=False)  # a part is recomputed as a whole
    activations, layer_bytes = _activations(model, rows_MR, load_MLR, dense_layers, in_flight, how)
    logits = _LOGIT_BYTES * model.vocabulary * float(rows_MR.max(initial=0.0)) if last else 0.0
    if not how.whole_logits:
        logits = min(logits, _CHUNK_BYTES * model.layers / (model.part_of or model.layers))
    return {
        "weights": weights,
        "gradients": trained * 4.0 * (shared + experts),
        "optimizer": trained * (not how.fetches) * _MOMENT_BYTES * own,
        "activations": activations,
        "logits": max(0.0, logits - layer_bytes),
    }


def _activations(
    model: ModelShape,
    rows_MR: ndarray,
    load_MLR: Int64[ndarray, "M L R"],
    dense_layers: int,
    in_flight: int,
    how: Execution,
) -> tuple[float, float]:
    """Return peak activation bytes, and the part that one layer holds while it is computed (0 if all layers are kept).

    Kept for backward, per token and layer: residual, two normed copies and the attention's output projection (4 hidden
    values), queries, keys, values, and the attention's result; per token-slot: its row in and out, gate, up and their
    product (2 hidden + 3 width), in a dense layer 3 dense widths per token. All of this for each micro-batch in flight.
    With recomputation: the residual of each layer for each micro-batch in flight, and all of this of one layer in one
    micro-batch. Forward only: of one layer.
    """
    per_row, per_slot = kept_bytes(model)
    of_layers_MLR = per_row * rows_MR[:, None, :] + per_slot * load_MLR
    if not of_layers_MLR.size:
        return 0.0, 0.0
    dense_bytes = _attention_bytes(model) + 3 * model.dense_width * model.expert.bytes_per_value
    of_dense_MR = dense_bytes * rows_MR
    if not (how.recompute_activations or how.forward_only):
        return in_flight * float((of_layers_MLR.sum(axis=1) + dense_layers * of_dense_MR).max()), 0.0
    num_layers = load_MLR.shape[1] + dense_layers
    residuals = 0 if how.forward_only else num_layers * model.expert.row_bytes * float(rows_MR.max())
    largest = max(float(of_layers_MLR.max()), float(of_dense_MR.max()) if dense_layers else 0.0)
    return in_flight * residuals + largest, largest


def kept_bytes(model: ModelShape) -> tuple[int, int]:
    """Return what an expert layer keeps for its backward pass: bytes per token, and per token-slot."""
    expert = model.expert
    per_row = _attention_bytes(model) + 3 * model.shared_width * expert.bytes_per_value
    return per_row, (2 * expert.hidden + 3 * expert.width) * expert.bytes_per_value


def _attention_bytes(model: ModelShape) -> int:
    heads = 2 * (model.query_heads + model.kv_heads) * model.head_dim
    if model.latent is not None:
        latent = model.latent
        heads = model.query_heads * (2 * (latent.nope_dim + latent.rope_dim) + 2 * latent.value_dim) + latent.kv_rank
    return (4 * model.hidden + heads) * model.expert.bytes_per_value
