"""What each layer keeps of the forward pass for the backward pass, the fastest choice that fits.

Recorded routes tell the token-slots of every rank, layer and micro-batch before a step, and so the bytes to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Int, Num
from numpy import ndarray

from relibra.cluster import Cluster
from relibra.planning.activation_choice import OPTIONS, ActivationChoice
from relibra.planning.costs.compute import dense_seconds
from relibra.planning.costs.layer_costs import layer_costs
from relibra.planning.plan import StepPlan
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.cost_model import rows_and_scores
from relibra.simulation.memory import kept_bytes
from relibra.simulation.model_shape import ModelShape


def choose_activations(
    token_bytes_LX: Num[ndarray, "L X"],
    token_slot_bytes_LX: Num[ndarray, "L X"],
    seconds_LX: Float[ndarray, "L X"],
    *,
    tokens_MR: Num[ndarray, "M R"],
    token_slots_MLR: Num[ndarray, "M L R"],
    free: float | ndarray,
) -> ActivationChoice:
    """Return what each layer keeps, chosen greedily: with one limit an optimum saves at most one option's seconds more.

    While a layer runs backward, memory holds what the layers below keep; while the loss does, what all keep. Options
    are taken by falling seconds per byte on the fullest rank; of equal layers the last first, which is freed first.

    token_bytes_LX  that a layer keeps of a token of the rank, for each of the X `OPTIONS`; the first keeps nothing, and
                    is taken even where nothing fits. token_slot_bytes_LX: of a token-slot that the rank computes
    seconds_LX      that an option of a layer saves in a step
    free            bytes left beside recomputing all layers, `[L + 1, M, R]` or what broadcasts to it: entry l while
                    layer l runs backward, the last one while the loss does
    """
    L, num_options = seconds_LX.shape
    bytes_LXMR = token_bytes_LX[:, :, None, None] * tokens_MR
    bytes_LXMR = bytes_LXMR + token_slot_bytes_LX[:, :, None, None] * token_slots_MLR.transpose(1, 0, 2)[:, None]
    free_LMR = np.broadcast_to(np.asarray(free, dtype=np.float64), (L + 1, *tokens_MR.shape))
    share_MR = bytes_LXMR.max(axis=1, initial=0).sum(axis=0) / np.maximum(free_LMR[-1], 1.0)
    fullest = np.unravel_index(int(share_MR.argmax()), share_MR.shape) if share_MR.size else None
    weight_LX = bytes_LXMR[:, :, *fullest] if fullest else np.zeros((L, num_options))
    found = {}
    for allowed in (range(num_options), *((0, o) for o in range(1, num_options)), (0,)):
        option_L = _fill(weight_LX, seconds_LX, bytes_LXMR, free_LMR, list(allowed))
        kept_LMR = bytes_LXMR[np.arange(L), option_L]
        found[tuple(option_L.tolist())] = ActivationChoice(
            option_L=tuple(OPTIONS[o] for o in option_L),
            nbytes=float(kept_LMR.sum(axis=0).max(initial=0)),
            seconds=float(seconds_LX[np.arange(L), option_L].sum()),
        )
    best, *others = sorted(found.values(), key=lambda one: (-one.seconds, one.nbytes))
    return replace(best, runner_up=others[0] if others else None)


def fits(kept_LMR: Num[ndarray, "L M R"], free_LMR: Float[ndarray, "Y M R"]) -> bool:
    """Return whether what layers keep is within the free bytes (`choose_activations`); keeping nothing always fits."""
    below_LMR = np.concatenate([np.zeros_like(free_LMR[:1]), kept_LMR.cumsum(axis=0)])
    within: Bool[ndarray, "Y M R"] = (below_LMR == 0) | (below_LMR <= free_LMR)
    return bool(within.all())


def _fill(
    weight_LX: ndarray, seconds_LX: ndarray, bytes_LXMR: ndarray, free_LMR: ndarray, allowed: list[int]
) -> Int[ndarray, " L"]:
    """Return the option of each layer, from those allowed."""
    L = len(weight_LX)
    option_L = np.zeros(L, dtype=np.int64)
    steps = [
        (density, layer, option)
        for layer in range(L)
        for density, option in _steps(weight_LX[layer], seconds_LX[layer], allowed)
    ]
    for _, layer, option in sorted(steps, key=lambda step: (-step[0], -step[1], step[2])):
        tried_L = option_L.copy()
        tried_L[layer] = option
        if fits(bytes_LXMR[np.arange(L), tried_L], free_LMR):
            option_L = tried_L
    return option_L


def _steps(weight_X: ndarray, seconds_X: ndarray, allowed: list[int]) -> Iterator[tuple[float, int]]:
    """Yield (density, option) by rising seconds and falling density: seconds / bytes that it adds to the one before."""
    now = 0
    while better := [o for o in allowed if seconds_X[o] > seconds_X[now]]:
        density = {o: (seconds_X[o] - seconds_X[now]) / max(1e-9, weight_X[o] - weight_X[now]) for o in better}
        now = max(better, key=lambda o: (density[o], -weight_X[o]))
        yield float(density[now]), now


def seconds_saved(
    plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, model: ModelShape, num_layers: int
) -> Float[ndarray, "L X"]:
    """Return the seconds of a step that each decoder layer saves with each of `OPTIONS`: modelled, the busiest rank's.

    demand       under the schedule of the plan
    num_layers   decoder layers; those that the demand has no routes of are dense
    """
    costs = layer_costs(plan, demand, cluster, model.expert)
    rows_MR, scores_MR = rows_and_scores(plan, demand, model)
    experts_ML = (costs.home_MLR + costs.replica_MLR).max(axis=2) + costs.host_seconds
    experts_ML += costs.exchange.dispatch_ML + costs.exchange.combine_ML + costs.exchange.gates_ML
    dense_M = dense_seconds(cluster, rows_MR, model.dense_layer_parameters, scores_MR).max(axis=1)
    attention_M = dense_seconds(cluster, rows_MR, model.non_expert_parameters, scores_MR).max(axis=1)
    seconds_LX = np.tile([0.0, 0.0, float(dense_M.sum())], (num_layers, 1))
    seconds_LX[plan.layer_ids, 1] = attention_M.sum()
    seconds_LX[plan.layer_ids, 2] = attention_M.sum() + experts_ML.sum(axis=0)
    return seconds_LX


def rows_of_layers(
    plan: StepPlan, demand: ScheduledDemand, model: ModelShape, num_layers: int
) -> tuple[Float[ndarray, "M R"], Float[ndarray, "M L R"]]:
    """Return the tokens of each rank and micro-batch, and the token-slots that it computes in each decoder layer."""
    tokens_MR, _ = rows_and_scores(plan, demand, model)
    token_slots_MLR = np.zeros((len(tokens_MR), num_layers, plan.num_ranks))
    token_slots_MLR[:, plan.layer_ids] = plan.rank_load(demand)
    return tokens_MR, token_slots_MLR


def choose_kept_activations(
    plan: StepPlan, demand: ScheduledDemand, cluster: Cluster, model: ModelShape, free_bytes: float
) -> ActivationChoice:
    """Return what each decoder layer keeps in a step of a plan, by sizes of the model alone (label `model`).

    demand       under the schedule of the plan, routes of all expert layers of the model
    free_bytes   of a rank, beside all that it holds while it recomputes every layer
    """
    dense, (per_row, per_slot) = np.ones(model.layers, dtype=bool), kept_bytes(model)
    dense[plan.layer_ids] = False
    token_bytes_LX = np.tile([0, 1, 1], (model.layers, 1)) * (per_row - model.expert.row_bytes)
    token_bytes_LX[dense, 2] += 3 * model.dense_width * model.expert.bytes_per_value
    tokens_MR, token_slots_MLR = rows_of_layers(plan, demand, model, model.layers)
    return choose_activations(
        token_bytes_LX,
        np.tile([0, 0, per_slot], (model.layers, 1)),
        seconds_saved(plan, demand, cluster, model, model.layers),
        tokens_MR=tokens_MR,
        token_slots_MLR=token_slots_MLR,
        free=free_bytes,
    )
