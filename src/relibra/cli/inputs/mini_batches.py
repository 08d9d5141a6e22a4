"""`schedule_mini_batches`: the samples of a trace in mini-batches, as `relibra train` assigns its responses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from relibra.cli.inputs.options import Order
from relibra.cli.inputs.recordings import Recording
from relibra.cli.inputs.requests import WorkloadRequest
from relibra.errors import ConfigError, TraceError
from relibra.printable import plural

if TYPE_CHECKING:
    from jaxtyping import Int64
    from numpy import ndarray

    from relibra.routing.demand import ScheduledDemand
    from relibra.routing.trace import RoutingTrace


def mini_batches_for(recording: Recording, request: WorkloadRequest) -> int | None:
    """Return the mini-batches of a step that is scheduled as a run does; None: a trace of no run, in one mini-batch."""
    if recording.mini_batches is not None:
        return request.mini_batches or recording.mini_batches
    return None if request.mini_batches == 1 else request.mini_batches


def schedule_mini_batches(
    routes: RoutingTrace, recording: Recording, request: WorkloadRequest, mini_batches: int, tokens: int
) -> tuple[ScheduledDemand, tuple[str, ...]]:
    """Schedule whole samples as a step of a run, and say how; `group_M` of the demand are its mini-batches.

    Responses of a run go to the mini-batches in which it trained them, if its filter left none out; on as many ranks
    also to the same micro-batches and ranks, before packing. Other samples fill mini-batches in recorded order.

    mini_batches   at most; tokens: most of a rank in a micro-batch
    raises         TraceError for a trace without samples; ConfigError where --mini-batches asks for more than there are
    """
    import numpy as np

    from relibra.rl.batch.schedule import make_schedule
    from relibra.routing.demand import Demand
    from relibra.routing.statistics import co_activation

    if not routes.num_samples:
        raise TraceError("the trace has no samples: there is no step to plan")
    demand = replace(Demand.from_trace(routes), pairs_LEE=co_activation(routes))
    unit_S, order = _order_of_units(routes, recording, request)
    by_id = np.argsort(routes.sample_ids, kind="stable")  # the trainer's order, by which equal lengths are taken
    made = make_schedule(
        demand.length_S[by_id],
        unit_S[by_id],
        mini_batches=mini_batches,
        micro_batch_tokens=tokens,
        num_ranks=request.ranks,
    )
    micro_batch_S, rank_S = np.empty((2, routes.num_samples), dtype=np.int32)
    micro_batch_S[by_id], rank_S[by_id] = made.micro_batch_S, made.rank_S
    scheduled = demand.with_schedule(micro_batch_S, rank_S, request.ranks, made.num_micro_batches)
    scheduled = replace(scheduled, group_M=made.mini_batch_M)
    sizes = np.bincount(made.mini_batch_M)
    if len(sizes) < (request.mini_batches or 0):
        raise ConfigError(f"--mini-batches {request.mini_batches}: the samples of the trace fill at most {len(sizes)}")
    each = f"{sizes.min()} to " * bool(sizes.min() < sizes.max()) + plural(int(sizes.max()), "micro-batch")
    words = (
        f"{plural(len(sizes), 'mini-batch')} of {each}, whole samples in {order}, at most {plural(tokens, 'token')} "
        f"per rank, {fill_in_words(scheduled)}"
    )
    filtered = ("groups that the run did not train, by algorithm.group_filter, are planned too",) * (
        recording.filters_groups
    )
    return scheduled, (words, *filtered, *samples_in_words(scheduled, request, tokens))


def _order_of_units(
    routes: RoutingTrace, recording: Recording, request: WorkloadRequest
) -> tuple[Int64[ndarray, " S"], str]:
    """Return the position of each sample or its group in the order that fills mini-batches, and that order in words.

    Groups of samples that were drawn again are not whole: these samples are scheduled one by one.
    """
    import numpy as np

    from relibra.rl.batch.schedule import draw_unit_order

    if request.order is Order.SHUFFLED:
        return np.random.default_rng(request.seed).permutation(routes.num_samples), f"random order, seed {request.seed}"
    if recording.mini_batches is None:
        return np.arange(routes.num_samples), "recorded order"
    unit_S = draw_unit_order(
        routes.sample_ids,
        routes.group_ids,
        by_group=recording.keeps_groups and request.micro_batches is None,
        seed=recording.seed,
    )
    return unit_S, "the order of the run"


def samples_in_words(demand: ScheduledDemand, request: WorkloadRequest, tokens: int) -> list[str]:
    """Return whether samples were drawn again, and how many are longer than the limit, as sentences without dots."""
    words = []
    if request.micro_batches is not None:
        drawn = plural(len(demand.sample_ids), "sample")
        words.append(f"samples are drawn again from the recording, seed {request.seed}: {drawn}")
    if long := int((demand.length_S > tokens).sum()):
        words.append(
            f"{plural(long, 'sample')} {'is' if long == 1 else 'are'} longer than that, each alone on its rank"
        )
    return words


def fill_in_words(demand: ScheduledDemand) -> str:
    """Return the tokens of mean and fullest rank."""
    tokens_MR = demand.sum_per_rank(demand.length_S)
    return f"mean {tokens_MR.mean():,.0f} and fullest {tokens_MR.max(initial=0):,.0f}"
