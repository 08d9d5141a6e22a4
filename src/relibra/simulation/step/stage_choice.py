"""`choose_stages`: the cut of a planned step into pipeline stages, from simulated seconds of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from relibra.cluster import Cluster
from relibra.planning.plan import StepPlan
from relibra.planning.traffic.distinct_rows import DistinctRows
from relibra.routing.demand import ScheduledDemand
from relibra.simulation.layout import even_sizes
from relibra.simulation.model_shape import ModelShape
from relibra.simulation.step.group_run import Execution, mini_batches_of, run_part
from relibra.simulation.step.stage_cuts import RoundCut, best_cut, round_cuts
from relibra.simulation.step.training_step import costs_of_groups, simulate_step

_TRIED = 4
"""Round-robin cuts to simulate, each with one round and with the most rounds: weights come once per round."""


def choose_stages(
    plan: StepPlan,
    demand: ScheduledDemand,
    cluster: Cluster,
    model: ModelShape,
    how: Execution,
    *,
    cut: Literal["even", "best"] = "best",
    pipeline: Literal["1f1b", "round"] = "1f1b",
    distinct: DistinctRows | None = None,
) -> Execution:
    """Return the execution with stages: of even sizes in expert layers, or of the cut whose step ends first.

    Each layer is simulated alone, in each micro-batch, forward and backward apart; dense layers count with the first
    one, the output matrix with the last. The even cut is kept where no other step is faster, moves of homes aside.

    demand, distinct   as for `simulate_step`; cuts are those of the first group
    """
    how, L, D = how.on(cluster), model.moe_layers, how.pipeline_stages
    even, most = even_sizes(L, D), max(map(len, mini_batches_of(len(plan.replica_MLRB), how.mini_batches)))
    if pipeline == "round":
        how = replace(how, round_cut=RoundCut(even[:-1], even[-1], even[-2::-1], max(1, most // D)))
    if cut == "even" or (D == 1 and pipeline == "1f1b"):
        return how
    layers = [slice(layer, layer + 1) for layer in range(L)]
    costs_L = next(costs_of_groups(plan, demand, cluster, model, how, distinct, layers))
    alone = replace(how, round_cut=None, recompute_activations=how.recompute_activations or pipeline == "round")
    sides = ((True, False), (False, True))[: 1 if how.forward_only else 2]
    seconds_XLM = np.array([[run_part(c, alone, forward=f, backward=b).seconds_M for c in costs_L] for f, b in sides])
    found = [how]
    if pipeline == "1f1b":
        mini_batches = mini_batches_of(seconds_XLM.shape[2], how.mini_batches)
        found.append(replace(how, stage_sizes=best_cut(seconds_XLM, costs_L[0].handover_M, D, mini_batches)))
    else:
        forward_L, backward_L = seconds_XLM.mean(axis=2).tolist()
        cuts = [cut for _, cut in round_cuts(forward_L, backward_L, D, most)[:_TRIED]]
        found += [replace(how, round_cut=cut._replace(rounds=n)) for cut in cuts for n in sorted({1, cut.rounds})]
    steps = [simulate_step(plan, demand, cluster, model, one, distinct=distinct) for one in found]
    return found[int(np.argmin([step.seconds_without_relocation for step in steps]))]
