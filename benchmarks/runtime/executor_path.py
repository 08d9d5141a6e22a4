"""The executor's own path for every rank of a group, run one after another on one device.

For a few (micro-batch, layer) pairs the static layout and the plan of `relibra` are executed by the functions of the
executor, forward and backward: rows are prepared on the host, then run part by part (layer_parts.py). Exchanges between
ranks are left out: rows arrive from a buffer. Copies into slots run on a stream of their own beside the product; what
they add to it is exposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from jaxtyping import Float64
from numpy import ndarray
from torch import Tensor

from benchmarks.harness.provenance import quartiles
from benchmarks.runtime.emulated_ranks import busiest_over_mean, choose_pairs
from benchmarks.runtime.layer_parts import NO_GROUP, PARTS, SEED, Path, PathModel, RankLayer
from relibra.calibration.grouped_experts import seconds_each
from relibra.cluster import cluster_preset
from relibra.parallel.rows.exchange import AllToAll
from relibra.parallel.rows.prepared_rows import prepare_rows
from relibra.planning.budget import Budget
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.planning.traffic.rank_tables import micro_batch_tables
from relibra.replay import BatchRoutes
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.trace import RoutingTrace

BALANCERS = ("static", "relibra_paper_tokens")
SLOTS = 1
ALLOWED = 0.15
"""What the busiest rank in seconds may differ from the busiest rank in token-slots, both over the mean rank."""

UNIT = (
    "milliseconds of the busiest rank, forward and backward, per micro-batch and layer (prepare: on the host, per "
    "layer); straggler and token skew: busiest / mean rank in seconds of the layer and in token-slots; off: straggler "
    "/ token skew - 1; product: experts at home, then those in slots; one product: all of them at once, from one "
    "tensor; join: copies of the experts at home into that tensor; exposed: copies into slots and product at once, "
    "less the product alone"
)
FIGURES = tuple(f"{part} ms" for part in ("prepare", *PARTS, "push", "exposed"))


class Step(NamedTuple):
    """Routes of all micro-batches of a group, `[M, R]` samples of equal length."""

    trace: RoutingTrace
    demand: ScheduledDemand

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return int(self.demand.tokens_MLRE.shape[2])


def cut_step(trace: RoutingTrace, tokens: int, ranks: int, layers: int, micro_batches: int) -> Step | None:
    """Cut the recorded rows, in their order, into the last micro-batches of the trace; None: they fill none."""
    rows = np.flatnonzero(np.asarray(trace.valid_T))
    number = min(micro_batches, len(rows) // (tokens * ranks))
    if number == 0:
        return None
    position_L = np.linspace(0, trace.num_layers - 1, min(layers, trace.num_layers)).astype(int)
    experts_TLK = np.asarray(trace.experts_TLK)[rows[-number * tokens * ranks :]][:, position_L]
    samples = np.split(experts_TLK, number * ranks)
    cut = RoutingTrace.from_samples(samples, num_experts=trace.num_experts, layer_ids=list(range(len(position_L))))
    which = np.arange(number * ranks)
    return Step(cut, Demand.from_trace(cut).with_schedule(which // ranks, which % ranks, ranks))


def prepared_layers(plan: StepPlan, step: Step, micro_batch: int, layer: int, *, pinned: bool) -> list[RankLayer]:
    """Prepare a micro-batch on every rank, one after another, as its executor does; return one layer.

    The first round collects what the ranks tell each other, the second one, which is timed, has it.
    """
    sent: dict[int, tuple[Tensor, list[int]]] = {}

    def tell(sizes: AllToAll, message: Tensor) -> Tensor:
        rank = sizes.place.rank
        sent[rank] = message, sizes.send_R
        if len(sent) < plan.num_ranks or not complete:
            return message.new_zeros(sum(sizes.receive_R))
        return torch.cat([torch.split(text, sizes_R)[rank] for _, (text, sizes_R) in sorted(sent.items())])

    found: list[RankLayer] = []
    with mock.patch.object(AllToAll, "move", tell):
        for complete in (False, True):
            for rank in range(plan.num_ranks):
                routes = _routes_of(step, micro_batch, rank)
                start = time.thread_time()
                tables_L = micro_batch_tables(plan, step.demand, rank, micro_batch)
                rows = prepare_rows(tables_L, routes, NO_GROUP, pinned=pinned)
                seconds = (time.thread_time() - start) / len(tables_L)
                assert rows.problem is None, "the routes are those of the plan"
                if complete:
                    found.append(RankLayer(tables_L[layer], rows, layer, seconds))
    return found


def _routes_of(step: Step, micro_batch: int, rank: int) -> BatchRoutes:
    (sample,) = np.flatnonzero((step.demand.micro_batch_S == micro_batch) & (step.demand.rank_S == rank))
    return BatchRoutes.of_rows(
        [np.asarray(step.trace.experts_TLK)[step.trace.sample_rows(int(sample))]],
        num_experts=step.trace.num_experts,
        layer_ids=step.trace.layer_ids.tolist(),
        sample_ids=[0],
        weight_versions=[0],
    )


Span = Callable[[Callable[[], object] | None, Callable[[], object] | None, Callable[[], object]], float]
"""Returns the seconds of copies and work at once, either of which may be left out."""


def path_rows(
    model: PathModel, source: str, step: Step, pairs: int, repetitions: int, device: torch.device, span: Span
) -> Iterator[dict]:
    """Measure a model's layers with each balancer; the first repetition warms up and is thrown away."""
    ranks, top_k = step.num_ranks, step.trace.top_k
    chosen = choose_pairs(step.demand, pairs)
    layers = {name: _layers_of(name, model, step, chosen, device) for name in BALANCERS}
    every = [one for of_pairs in layers.values() for of_ranks in of_pairs for one in of_ranks]
    most = max(max(int(one.tables.receive_RP.sum()), int(one.tables.tokens_E.sum())) for one in every)
    path = Path(model, model.num_experts // ranks, SLOTS, max(most, 64), device)
    error = path.check()
    whole: dict[str, float] = {}
    for name in BALANCERS:
        times = _times(path, layers[name], top_k, repetitions, device, span)
        load_PR = np.array([[int(one.tables.receive_RP.sum()) for one in ranks_] for ranks_ in layers[name]])
        medians = {part: np.median(found_NPR, axis=0) for part, found_NPR in times.items()}
        skew, straggler = busiest_over_mean(load_PR), busiest_over_mean(medians["layer"])
        busiest_NP = times["layer"][:, np.arange(len(load_PR)), medians["layer"].argmax(axis=1)]
        whole[name] = float(medians["layer"].max(axis=1).sum())
        off = straggler / skew - 1
        yield {
            "case": f"{model.name}, EP {ranks}, {name}", "label": "measured", "unit": UNIT, "source": source,
            "ep": ranks, "balancer": name, "pairs": len(load_PR), "token_skew": skew, "straggler": straggler,
            "off": off, "target": ALLOWED, "ok": bool(abs(off) <= ALLOWED),
            **{f"{part} ms": 1000 * float(of_part.max(axis=1).mean()) for part, of_part in medians.items()},
            **quartiles(1000 * busiest_NP.mean(axis=1), "layer ms"),
            "layer / static": whole[name] / whole["static"],
            "ms of ranks": {part: (1000 * of_part.mean(axis=0)).tolist() for part, of_part in medians.items()},
            "error": error, "seed": SEED, "repetitions": repetitions,
        }  # fmt: skip


def _layers_of(
    balancer: str, model: PathModel, step: Step, pairs: Sequence[tuple[int, int]], device: torch.device
) -> list[list[RankLayer]]:
    ranks = step.num_ranks
    budget = Budget(slots=SLOTS, pack_samples=False)
    plan = plan_step(step.demand, cluster_preset("h100x8", ranks, min(8, ranks)), budget, balancer, expert=model.shape)
    pinned = device.type == "cuda"
    return [prepared_layers(plan, step, m, layer, pinned=pinned) for m, layer in pairs]


def _times(
    path: Path,
    layers: list[list[RankLayer]],
    top_k: int,
    repetitions: int,
    device: torch.device,
    span: Span,
) -> dict[str, Float64[ndarray, "N P R"]]:
    """Time all parts of all ranks, part by part, rank after rank."""
    works = [[path.works(one, top_k) for one in of_ranks] for of_ranks in layers]
    copies = [[path.pushes(one) for one in of_ranks] for of_ranks in layers]
    found: dict[str, list[list[list[float]]]] = {part: [] for part in ("prepare", *PARTS, "push", "exposed")}
    for repetition in range(repetitions + 1):
        turn = {part: [seconds_each([one[part] for one in ranks], device) for ranks in works] for part in PARTS}
        turn["prepare"] = [[one.prepare_seconds for one in of_ranks] for of_ranks in layers]
        turn["push"], turn["exposed"] = [], []
        for copies_R, works_R in zip(copies, works, strict=True):
            alone = [span(copy, None, work["product"]) for copy, work in zip(copies_R, works_R, strict=True)]
            computing = [span(None, work["product"], work["product"]) for work in works_R]
            together = [
                span(copy, work["product"], work["product"]) for copy, work in zip(copies_R, works_R, strict=True)
            ]
            turn["push"].append(alone)
            turn["exposed"].append([max(0.0, both - one) for both, one in zip(together, computing, strict=True)])
        for part, of_part in turn.items():
            if repetition:
                found[part].append(of_part)
    return {part: np.array(of_part) for part, of_part in found.items()}
