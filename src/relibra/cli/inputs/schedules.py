"""Schedules of a step: its samples in micro-batches, in one mini-batch, as a run fills them, or as a trainer did."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from relibra.cli.inputs.options import Order
from relibra.cli.inputs.recordings import RecordedStep
from relibra.cli.inputs.requests import WorkloadRequest
from relibra.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from jaxtyping import Int64
    from numpy import ndarray

    from relibra.routing.demand import ScheduledDemand
    from relibra.routing.readers.given_schedule import GivenSchedule
    from relibra.routing.trace import RoutingTrace

Cut = dict[str, Any]
"""How samples were scheduled, as numbers by name, for JSON and for a terminal."""


def mini_batches_for(recording: RecordedStep, request: WorkloadRequest) -> int | None:
    """Return the number of mini-batches to fill as a run does; None: one, as `_schedule_one_mini_batch` fills it."""
    if recording.mini_batches is not None:
        return request.mini_batches or recording.mini_batches
    return None if request.mini_batches == 1 else request.mini_batches


def read_given_schedule(recording: RecordedStep, request: WorkloadRequest) -> GivenSchedule | None:
    """Read the schedule of --schedule, else the one in an .npz trace; None where there is none."""
    from relibra.routing.readers.given_schedule import read_schedule

    drawn_here = request.order is Order.SHUFFLED or request.micro_batches is not None
    if request.schedule is None and (drawn_here or request.mini_batches is not None):
        return None
    found = read_schedule(request.schedule or recording.trace, required=request.schedule is not None)
    contradictions = {
        ("micro-batch", "--order shuffled"): request.order is Order.SHUFFLED,
        ("micro-batch", "--micro-batches"): request.micro_batches is not None,
        ("mini-batch", "--mini-batches"): request.mini_batches is not None,
    }
    for (unit, option), is_given in contradictions.items():
        if found is not None and is_given:
            raise ConfigError(f"--schedule gives the {unit} of every sample: leave out {option}")
    return found


def schedule_step(
    routes: RoutingTrace,
    recording: RecordedStep,
    request: WorkloadRequest,
    given: GivenSchedule | None,
    tokens: int | None,
) -> tuple[ScheduledDemand, Cut]:
    """Return the demand of a step under its schedule, and the figures of that schedule.

    given     schedule of a trainer; None: samples are scheduled here
    tokens    most tokens of a rank in a micro-batch; None: as many as the given schedule has
    raises    TraceError for a damaged schedule or a trace without samples; ConfigError where --mini-batches asks for
              more than there are
    """
    from relibra.routing.readers.given_schedule import schedule_of

    mini_batches, cut = mini_batches_for(recording, request), Cut(order=request.order.value)
    if given is not None:
        demand, cut = schedule_of(routes, given, request.ranks, tokens), {"schedule": str(given.path)}
    else:
        assert tokens is not None, "given, or a default"
        if mini_batches is None:
            demand, cut["named_groups"] = _schedule_one_mini_batch(routes, request, tokens)
        else:
            demand = _schedule_mini_batches(routes, recording, request, mini_batches, tokens)
            if recording.mini_batches is not None and request.order is Order.RECORDED:
                cut["order"] = "of the run"
    tokens_MR, left_S = demand.sum_per_rank(demand.length_S), demand.micro_batch_S < 0
    numbers = {
        "seed": request.seed if request.order is Order.SHUFFLED or request.micro_batches else None,
        "drawn_again": request.micro_batches is not None,
        "mini_batches": 1 if demand.group_M is None else len(set(demand.group_M.tolist())),
        "micro_batches": len(tokens_MR),
        "samples": len(left_S),
        "tokens_per_rank": tokens,
        "mean_tokens": float(tokens_MR.mean()) if tokens_MR.size else 0.0,
        "fullest_tokens": int(tokens_MR.max(initial=0)),
        "samples_above_the_limit": None if tokens is None else int((demand.length_S > tokens).sum()),
        "samples_left_out": int(left_S.sum()),
        "tokens_left_out": int(demand.length_S[left_S].sum()),
        "rows_without_route": int((~routes.valid_T).sum()),
        "untrained_groups_included": given is None and mini_batches is not None and recording.filters_groups,
    }
    return demand, cut | {name: number for name, number in numbers.items() if number or (name, number) == ("seed", 0)}


def _schedule_one_mini_batch(
    routes: RoutingTrace, request: WorkloadRequest, tokens: int
) -> tuple[ScheduledDemand, int | None]:
    """Schedule whole samples; return also how many named groups take turns in micro-batches."""
    import numpy as np

    from relibra.routing.micro_batches import schedule_samples, task_sets

    shuffled = request.order is Order.SHUFFLED
    demand = schedule_samples(routes, tokens, request.ranks, np.random.default_rng(request.seed) if shuffled else None)
    if shuffled or len(routes.group_names) < 2:
        return demand, None
    return demand, len(task_sets(routes, tokens * request.ranks))


def _schedule_mini_batches(
    routes: RoutingTrace, recording: RecordedStep, request: WorkloadRequest, mini_batches: int, tokens: int
) -> ScheduledDemand:
    """Schedule whole samples as a step of a run; `group_M` of the demand are its mini-batches.

    Responses of a run go to the mini-batches in which it trained them, if its filter left none out; on its number of
    ranks also to its micro-batches and ranks, before packing. Other samples fill mini-batches in recorded order.
    """
    import numpy as np

    from relibra.rl.batch.schedule import make_schedule, prompts_of
    from relibra.routing.demand import Demand
    from relibra.routing.statistics import co_activation

    if not routes.num_samples:
        raise TraceError("the trace has no samples: there is no step to plan")
    demand, fed = Demand.from_trace(routes), routes
    attended_S: ndarray | None = None
    piece_S: ndarray | None = None
    by_id = np.argsort(routes.sample_ids, kind="stable")  # the trainer's order, which breaks ties of length
    shares = recording.shares_prompts and request.micro_batches is None
    prompts = prompts_of(routes.group_ids, routes.weight_versions, routes.prompt_lengths) if shares else None
    made = make_schedule(
        demand.length_S[by_id],
        _order_of_units(routes, recording, request)[by_id],
        mini_batches=mini_batches,
        micro_batch_tokens=tokens,
        num_ranks=request.ranks,
        prompts=prompts and prompts.of(by_id),
    )
    if prompts is not None and not made.leads_S.all():  # a prompt is counted with the first response behind it
        shared_S, position_T = np.zeros(routes.num_samples, dtype=np.int64), np.arange(routes.num_rows)
        shared_S[by_id] = np.where(made.leads_S, 0, prompts.tokens_S[by_id])
        position_T -= np.repeat(routes.offsets[:-1], routes.rows_per_sample)
        fed = replace(routes, valid_T=routes.valid_T & (position_T >= np.repeat(shared_S, routes.rows_per_sample)))
        attended_S, piece_S = demand.length_S**2 - shared_S**2, np.empty(routes.num_samples, dtype=np.int64)
        piece_S[by_id] = by_id[made.piece_S]
    counted = demand if fed is routes else Demand.from_trace(fed)
    demand = replace(counted, pairs_LEE=co_activation(fed), attended_S=attended_S, piece_S=piece_S)
    micro_batch_S, rank_S = np.empty((2, routes.num_samples), dtype=np.int32)
    micro_batch_S[by_id], rank_S[by_id] = made.micro_batch_S, made.rank_S
    scheduled = demand.with_schedule(micro_batch_S, rank_S, request.ranks, made.num_micro_batches)
    if (found := len(set(made.mini_batch_M.tolist()))) < (request.mini_batches or 0):
        raise ConfigError(f"--mini-batches {request.mini_batches}: the samples of the trace fill at most {found}")
    return replace(scheduled, group_M=made.mini_batch_M)


def _order_of_units(routes: RoutingTrace, recording: RecordedStep, request: WorkloadRequest) -> Int64[ndarray, " S"]:
    """Return the position of each sample or its group in the order that fills mini-batches.

    Groups of samples that were drawn again are not whole: these samples are scheduled one by one.
    """
    import numpy as np

    from relibra.rl.batch.schedule import draw_unit_order

    if request.order is Order.SHUFFLED:
        return np.random.default_rng(request.seed).permutation(routes.num_samples)
    if recording.mini_batches is None:
        return np.arange(routes.num_samples)
    return draw_unit_order(
        routes.sample_ids,
        routes.group_ids,
        by_group=recording.keeps_groups and request.micro_batches is None,
        seed=recording.seed,
    )
