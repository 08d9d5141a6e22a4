"""The last recorded step of a run, planned again: shown on the page of the run beside its curves.

A run keeps its routes, not its plans. So its samples are scheduled again, with its tokens per rank; this
is not the schedule of the trainer.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from relibra.cluster import Cluster, cluster_preset
from relibra.errors import RelibraError
from relibra.planning.budget import DEFAULT_MODEL, MOST_SLOTS, Budget
from relibra.planning.planner import plan_step
from relibra.reporting.data.compared_plans import ComparedStep, compare_plan, compare_static, compare_step
from relibra.reporting.data.recording import Recording
from relibra.routing.micro_batches import schedule_samples
from relibra.routing.readers import open_trace
from relibra.routing.trace_statistics import default_micro_batch_tokens
from relibra.simulation import ModelShape, cut_model, memory_for_slots, model_shape, model_shape_from_config

MAX_CHOICES = 1 << 28
"""Choices (row, layer, k) of a step that is planned for a page; more take minutes and gigabytes."""


def plan_last_step(
    recording: Recording, *, ranks: int | None = None, cluster: Cluster | None = None, model: ModelShape | None = None
) -> tuple[ComparedStep | None, str]:
    """Return the last recorded step under the static layout and under a plan, and a sentence that says how, or why not.

    On one rank nothing is planned, and the sentence is empty.

    ranks     None: the run's own
    cluster   is resized to the ranks: one node, or nodes of gcd(ranks, its ranks per node); None: H100 nodes of 8
    model     None: `default_model`
    raises    TraceError for a damaged trace
    """
    ranks = ranks or recording.num_ranks
    if not recording.traces or ranks is None or ranks < 2:
        return None, ""
    number, path = recording.traces[-1]
    trace = open_trace(path, recording.num_experts)
    tokens = min(recording.micro_batch_tokens or default_micro_batch_tokens(trace.num_rows), trace.num_rows)
    if trace.num_experts % ranks or trace.num_rows == 0 or trace.experts_TLK.size > MAX_CHOICES:
        return None, (
            f"The last recorded step ({trace.num_rows:,} rows, {trace.num_layers} layers, {trace.num_experts} experts) "
            f"is not planned here for {ranks} ranks: the ranks must divide the experts, and a page plans at most "
            f"{MAX_CHOICES:,} choices of experts. Plan it with relibra plan."
        )
    rank_tokens = -(-tokens // ranks)
    demand = schedule_samples(trace, rank_tokens, ranks)
    machine = cluster or cluster_preset("h100x8")
    per_node = ranks if ranks < machine.ranks_per_node else math.gcd(ranks, machine.ranks_per_node)
    machine = machine.with_ranks(ranks, per_node)
    model = model or default_model(path)
    routed, slots = cut_model(model, demand), recording.setting("plan", "slots")
    budget = Budget(
        slots=slots if isinstance(slots, int) and 0 <= slots <= MOST_SLOTS else None,
        memory_gib=memory_for_slots(demand, machine, model),
    )
    plan = plan_step(demand, machine, budget, expert=routed.expert)
    plans = compare_static(plan, demand), compare_plan("the plan", plan, demand)
    which = "The recording" if number is None else f"Step {number}, the last recorded one,"
    about = (
        f"{which} is planned here again, on {ranks} ranks, in micro-batches of whole samples in recorded order, at "
        f"most {rank_tokens:,} tokens per rank. The trainer used another schedule, so figures differ from the run’s."
    )
    return compare_step(plans, machine, model, trace), about


def default_model(trace: Path) -> ModelShape:
    """Return the sizes of the policy of a run; where it saved none, or one of an unknown family, of Qwen3-30B-A3B.

    trace    of the run, or the run's folder; any other trace has no policy
    """
    run = trace.absolute().parent.parent if trace.absolute().parent.name == "traces" else trace
    try:
        config = json.loads((run / "policy" / "config.json").read_bytes())
        return model_shape_from_config(config, f"this run’s policy ({config.get('model_type', 'unnamed type')})")
    except (OSError, ValueError, AttributeError, RecursionError, RelibraError):
        return model_shape(DEFAULT_MODEL)
