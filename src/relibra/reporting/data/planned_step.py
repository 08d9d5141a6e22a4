"""The last recorded step of a run, planned again: what a page about a run shows beside its curves.

A run keeps its routes, not its plans. So micro-batches are cut from the recording as large as the run's, which is not
the schedule that the trainer had.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from relibra.cluster import Cluster, cluster_preset
from relibra.errors import RelibraError, TraceError
from relibra.planning.budget import DEFAULT_MODEL, Budget
from relibra.planning.planner import plan_step
from relibra.planning.traffic.byte_ledger import MAX_PAIRS, distinct_rows_of_step
from relibra.reporting.data.compared_plans import Side, side_of, static_side
from relibra.reporting.data.recording import Recording
from relibra.reporting.pages.plan_page import Question
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.micro_batches import cut_recorded
from relibra.routing.readers import open_trace
from relibra.routing.trace import RoutingTrace
from relibra.routing.trace_statistics import default_micro_batch_tokens
from relibra.simulation import ModelShape, cut_model, model_shape, model_shape_from_config

MAX_CHOICES = 1 << 28
"""Choices (row, layer, k) of a step that is planned for a page; more take minutes and gigabytes."""


class PlannedStep(NamedTuple):
    """Both sides of a step, what the page needs to know about them, and in words where they come from."""

    before: Side
    after: Side
    question: Question
    about: str


def plan_last_step(
    recording: Recording, *, ranks: int | None = None, cluster: Cluster | None = None, model: ModelShape | None = None
) -> PlannedStep | str:
    """Plan the last recorded step, or say in a sentence why not; "" where nobody would ask: on one rank.

    ranks     None: the run's own
    cluster   is resized to the ranks, with as many on a node as fill nodes; None: H100 nodes of 8
    model     None: what the run trained, else Qwen3-30B-A3B
    raises    TraceError for a damaged trace
    """
    ranks = ranks or recording.num_ranks
    if not recording.traces or ranks is None or ranks < 2:
        return ""
    number, path = recording.traces[-1]
    trace = open_trace(path, recording.num_experts)
    tokens = recording.micro_batch_tokens or default_micro_batch_tokens(trace.num_rows)
    if trace.num_experts % ranks or trace.num_rows == 0 or trace.experts_TLK.size > MAX_CHOICES:
        return (
            f"The last recorded step ({trace.num_rows:,} rows, {trace.num_layers} layers, {trace.num_experts} experts) "
            f"was not planned here for {ranks} ranks: experts have to be shared evenly, and a page plans at most "
            f"{MAX_CHOICES:,} choices; see relibra plan."
        )
    demand = cut_recorded(trace, min(tokens, trace.num_rows), ranks)
    machine = cluster or cluster_preset("h100x8")
    per_node = ranks if ranks < machine.ranks_per_node else math.gcd(ranks, machine.ranks_per_node)
    machine = machine.with_ranks(ranks, per_node)
    routed = cut_model(model or model_of_run(recording) or model_shape(DEFAULT_MODEL), demand)
    slots = recording.setting("plan", "slots")
    budget = Budget(slots=slots if isinstance(slots, int) and slots >= 0 else 1, objective="tokens")
    plan = plan_step(demand, machine, budget, expert=routed.expert)
    before, after = static_side(plan, demand), side_of("the plan", plan, demand)
    which = "The recording" if number is None else f"Step {number}, the last recorded one,"
    about = (
        f"{which} is planned here again, on {ranks} ranks, in micro-batches of {min(tokens, trace.num_rows):,} tokens "
        "cut in recorded order: not the schedule that a trainer had, so figures differ from those of the run."
    )
    question = Question(cluster=machine, model=routed, distinct=distinct_of(trace, before, after))
    return PlannedStep(before, after, question, about)


def model_of_run(recording: Recording) -> ModelShape | None:
    """Read the sizes of the policy that a run left; None without one, or of a family that is not known."""
    path = recording.path / "policy" / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return model_shape_from_config(config, str(config.get("model_type", "policy")))
    except (OSError, ValueError, AttributeError, RelibraError):
        return None


def countable(*sides: Side) -> bool:
    """Tell whether `distinct_of` would count the rows of these sides, given their trace."""
    return _are_few(sides) and _share_samples(sides)


def distinct_of(trace: RoutingTrace | None, *sides: Side) -> dict[str, ndarray] | None:
    """Count distinct rows of both sides token by token; None without the tokens, or where that would take too long.

    raises    TraceError when a demand was not counted from this trace
    """
    if trace is None or not _are_few(sides):
        return None
    experts_TLK = np.asarray(trace.experts_TLK)
    sample_T = sample_of_rows(trace, sides[0].given)
    if not _share_samples(sides):
        raise TraceError("the plans were made for other samples, so one trace does not hold both: name none")
    return {side.name: distinct_rows_of_step(side.plan, side.demand, experts_TLK, sample_T) for side in sides}


def _are_few(sides: Sequence[Side]) -> bool:
    return max(side.rank_load_MLR.size * side.plan.num_ranks for side in sides) <= MAX_PAIRS


def _share_samples(sides: Sequence[Side]) -> bool:
    return all(np.array_equal(side.given.sample_ids, sides[0].given.sample_ids) for side in sides)
