"""Simulated against measured step times, for the runs of `runtime`.

Rows go to results/validation.json.
Run: relibra bench validation [--quick] [--json] [--repetitions N] [--output FOLDER].
Six minutes with three repetitions, on a quiet machine.
Two processes of one thread each train the sizes, routes and plans of `runtime.py`. The simulator gets a cluster that is
calibrated here, in the same run: experts, exchange and copies by the functions of `relibra calibrate`; what it does not
model (norms, copies of rows, autograd) is the measured step of *balanced routes* less the simulated one, once for our
runtime and once for all_to_all. No predicted row uses its own time.
--quick takes a toy model, one repetition, and writes no rows.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness.options import measurement_options
from benchmarks.harness.provenance import quartiles, write_results
from benchmarks.runtime import runtime, steps
from relibra.calibration.fit import fit_cluster
from relibra.calibration.measurement import CPU_SIZES, QUICK_SIZES, Job, describe_machine, measure_machine
from relibra.cluster import Cluster
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.plan import StepPlan
from relibra.routing.statistics import co_activation
from relibra.simulation import ModelShape, simulate_step

BALANCERS = ("all_to_all", "eplb", "relibra", "relibra, homes stay")
OURS, NATIVE = "balanced routes", "balanced routes, all_to_all"
ROWS = (64, 128, 256, 384, 512, 640, 768, 1024)
"""Rows of one expert that are timed: what the experts of these runs get."""

GOAL = 0.10
"""Median error to stay below."""

UNIT = (
    "seconds of forward and backward passes of a step: median of what was measured, and simulated; error of the latter"
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One run: what was measured, in all repetitions, and what the simulator said beforehand."""

    skew: float
    balancer: str
    measured: list[float]
    simulated: float
    parts: dict[str, float]

    @property
    def median(self) -> float:
        """Of the measured seconds."""
        return float(np.median(self.measured))

    @property
    def error(self) -> float:
        """Simulated / measured - 1."""
        return self.simulated / self.median - 1


def main() -> None:
    parser = measurement_options(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    repetitions = 1 if options.quick else options.repetitions
    pairs, cluster = compared(options.quick, repetitions)
    rows = as_rows(pairs, cluster, repetitions)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        _print(pairs, cluster)
        if options.quick:
            print("--quick: a toy model, one repetition. It shows that the program runs; the figures say nothing")
    if not options.quick:
        command = f"relibra bench validation --repetitions {options.repetitions}"
        print(write_results("validation", rows, command, options.output), file=sys.stderr)


def compared(quick: bool, repetitions: int) -> tuple[list[Pair], Cluster]:
    """Calibrate, simulate, then measure all runs, taking turns."""
    sizes = replace(runtime.SYNTHETIC, **runtime.TINY) if quick else runtime.SYNTHETIC
    cluster = _calibrated(sizes, quick)
    variants: dict[tuple[float, str], steps.Variant] = {}
    for skew in list(runtime.TARGETS)[: 1 if quick else None]:
        trace = steps.skewed_routes(sizes, skew, seed=0)
        for name in BALANCERS:
            variants[skew, name] = replace(runtime.make_variant(sizes, trace, name), name=f"{name} @ {skew}")
    even = steps.balanced_routes(sizes)
    variants[1.0, OURS] = replace(runtime.make_variant(sizes, even, "static", slots=0), name=OURS)
    variants[1.0, NATIVE] = replace(runtime.make_variant(sizes, even, "all_to_all"), name=NATIVE)
    simulated = {key: _simulated(sizes, variant, cluster) for key, variant in variants.items()}
    with tempfile.TemporaryDirectory() as folder:
        found = steps.on_ranks(sizes, list(variants.values()), Path(folder), repetitions)
    rest = {name: float(np.median(found.seconds[name])) - sum(simulated[1.0, name].values()) for name in (OURS, NATIVE)}
    print(
        f"experts of a step of balanced routes: {found.expert_seconds:.2f} s measured alone in the model, "
        f"{simulated[1.0, OURS]['compute']:.2f} s by the calibrated table",
        file=sys.stderr,
    )
    pairs = []
    for (skew, name), variant in variants.items():
        parts = {**simulated[skew, name], "rest": rest[NATIVE if variant.plan is None else OURS]}
        seconds = found.seconds[variant.name]
        pairs.append(Pair(skew=skew, balancer=name, measured=seconds, simulated=sum(parts.values()), parts=parts))
    return pairs, cluster


def _calibrated(sizes: steps.Sizes, quick: bool) -> Cluster:
    expert = _expert(sizes)
    rows = QUICK_SIZES.rows if quick else ROWS
    timed = replace(CPU_SIZES, rows=rows, repetitions=3 if quick else 5, seconds=15.0)
    job = Job(ranks=steps.NUM_RANKS, cuda=False, expert=expert, sizes=timed)
    return fit_cluster(measure_machine(job), describe_machine(job), expert).cluster


def _expert(sizes: steps.Sizes) -> ExpertShape:
    return ExpertShape(hidden=sizes.hidden, width=sizes.width, bytes_per_value=4)


def _simulated(sizes: steps.Sizes, variant: steps.Variant, cluster: Cluster) -> dict[str, float]:
    """Return the simulated parts of a step; all_to_all is the static layout, which sends every token-slot by itself."""
    config = sizes.config()
    model = ModelShape(
        name="runtime",
        moe_layers=sizes.layers,
        hidden=sizes.hidden,
        query_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        experts=sizes.experts,
        top_k=sizes.top_k,
        expert=_expert(sizes),
        vocabulary=steps.VOCAB,
    )
    plan: StepPlan | None = variant.plan
    demand = variant.demand
    if plan is None:
        plan = runtime.make_variant(sizes, variant.trace, "static", slots=0).plan
        assert plan is not None, "static is a plan"
    else:
        demand = replace(demand, pairs_LEE=co_activation(variant.trace))
    # Homes move before the clock starts.
    plan = replace(plan, previous_map=plan.physical_to_logical_map)
    step = simulate_step(plan, plan.scheduled(demand), cluster, model)
    kept = ("attention", "host", "gathers", "exchange", "gates", "compute", "copies")
    return {name: step.terms[name] for name in kept}


def error_without_rest(pair: Pair) -> float:
    """Return the error of what is simulated alone: `rest` was measured, and makes every prediction look better."""
    rest = pair.parts["rest"]
    return (pair.simulated - rest) / (pair.median - rest) - 1


def errors_of_guess(pairs: list[Pair]) -> list[float]:
    """Return the errors of whoever says that every run takes as long as the mean of all: what a model must beat."""
    mean = float(np.mean([pair.median for pair in pairs]))
    return [mean / pair.median - 1 for pair in pairs]


def as_rows(pairs: list[Pair], cluster: Cluster, repetitions: int) -> list[dict]:
    """Return a row per predicted run; the balanced runs, which the rest was taken from, are no predictions."""
    predicted = [pair for pair in pairs if pair.balancer in BALANCERS]
    wrong = disagreements(predicted)
    ordered = sum(apart(*both) for both in same_case(predicted))
    median = float(np.median([abs(pair.error) for pair in predicted]))
    simulated_alone = float(np.median([abs(error_without_rest(pair)) for pair in predicted]))
    guess = float(np.median(np.abs(errors_of_guess(predicted))))
    return [
        {
            "case": f"skew {pair.skew:g}, {pair.balancer}", "label": "simulated", "unit": UNIT, "seed": 0,
            "repetitions": repetitions, "case_skew": pair.skew, "balancer": pair.balancer,
            "measured_seconds": pair.median, **quartiles(pair.measured, "measured_seconds"),
            "simulated_seconds": pair.simulated, "error": pair.error, "parts": pair.parts,
            "rest_share": pair.parts["rest"] / pair.median, "error_without_rest": error_without_rest(pair),
            "median_error": median, "median_error_without_rest": simulated_alone, "median_error_of_guess": guess,
            "goal": GOAL, "ordered_pairs": ordered, "pairs": len(same_case(predicted)),
            "ok": "yes" if median <= GOAL and ordered and not wrong else "NO",
            "ranking": _ranking(pair, predicted, wrong),
            "configuration": f"{runtime.SYNTHETIC.layers} layers, 2 processes; {cluster.source}",
        }
        for pair in predicted
    ]  # fmt: skip


def _ranking(pair: Pair, predicted: list[Pair], wrong: list[tuple[Pair, Pair]]) -> str:
    if any(pair in both for both in wrong):
        return "differs"
    ordered = any(pair in both and apart(*both) for both in same_case(predicted))
    return "as measured" if ordered else "no measured order"


def disagreements(pairs: list[Pair]) -> list[tuple[Pair, Pair]]:
    """Return the pairs of runs of one case that the simulator puts in another order than the clock.

    Runs whose measured ranges overlap, from the fastest to the slowest repetition, are equal: no order is asked for.
    """
    found = []
    for one, other in same_case(pairs):
        if apart(one, other) and (one.median < other.median) != (one.simulated < other.simulated):
            found.append((one, other))
    return found


def same_case(pairs: list[Pair]) -> list[tuple[Pair, Pair]]:
    """Return every two runs of one case."""
    return [both for both in itertools.combinations(pairs, 2) if both[0].skew == both[1].skew]


def apart(one: Pair, other: Pair) -> bool:
    """Say whether the measured ranges leave a gap, so that there is an order to predict."""
    return max(one.measured) < min(other.measured) or max(other.measured) < min(one.measured)


def _print(pairs: list[Pair], cluster: Cluster) -> None:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("skew", justify="right")
    table.add_column("balancer", no_wrap=True)
    for title in ("measured", "from", "to", "simulated", "error"):
        table.add_column(title, justify="right", no_wrap=True)
    for pair in pairs:
        seconds = (pair.median, min(pair.measured), max(pair.measured), pair.simulated)
        cells = [*(f"{value:.3f}" for value in seconds), f"{pair.error:+.1%}"]
        table.add_row(f"{pair.skew:g}", pair.balancer, *cells)
    Console().print(table)
    predicted = [pair for pair in pairs if pair.balancer in BALANCERS]
    errors = [abs(pair.error) for pair in predicted]
    print(f"median error {np.median(errors):.1%}, largest {max(errors):.1%} (goal: median at most {GOAL:.0%})")
    rest = float(np.median([pair.parts["rest"] / pair.median for pair in predicted]))
    alone = float(np.median([abs(error_without_rest(pair)) for pair in predicted]))
    guess = float(np.median(np.abs(errors_of_guess(predicted))))
    print(
        f"without the measured rest ({rest:.0%} of a step) the median error is {alone:.1%}; whoever says that every "
        f"run takes the mean of all is off by {guess:.1%}"
    )
    wrong = disagreements(predicted)
    for one, other in wrong:
        print(f"order differs at skew {one.skew:g}: {one.balancer} and {other.balancer}")
    all_pairs = same_case(predicted)
    ordered = sum(apart(*both) for both in all_pairs)
    print(
        f"{ordered} of {len(all_pairs)} pairs of runs have a measured order (their ranges do not overlap); the "
        f"simulator has {ordered - len(wrong)} of them right"
    )
    print(f"balanced routes are no prediction: what the simulator leaves out was taken from them; {cluster.source}")
