"""Steps for `papers.py`: loads with published profiles or recorded routes, and balancers simulated on them.

What holds for every step: a few layers stand for the whole model, with the output matrix cut in the same proportion,
so that shares of the step are those of the whole model; a token is sent once to a rank, counted from single tokens
(`paper_tokens`) where seconds are reported, while balancers plan from co-routing pairs; copies live in a buffer shared
by all layers, as in all systems that the papers compare, so EPLB and its like push their copies for each pass instead
of keeping slots in every layer; only relibra's default has slots of layers, in the memory that the model leaves; every
step follows one of the same model, which its homes and history come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.recorded_cuts import cut_recorded
from benchmarks.papers.tokens import Tokens, draw_tokens, repeated
from benchmarks.planner.steps import at_most, domain_step
from relibra import simulation
from relibra.cluster import Cluster, cluster_preset
from relibra.planning.budget import Budget
from relibra.planning.plan import StepPlan
from relibra.planning.planner import plan_step
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.micro_batches import select_micro_batches
from relibra.routing.readers import open_trace
from relibra.routing.statistics import co_activation
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.simulation import Execution, ModelShape, SimulatedStep, memory_for_slots, model_shape, simulate_step

TOKENS = 4096
"""Per rank and micro-batch."""

MODELS = ("qwen3-30b-a3b", "glm4.5-106b-a12b", "qwen3-235b-a22b")
BALANCED = "Balanced (random routes)"
RATIO = "throughput / static and / Balanced; skew: token-slots of busiest / mean ranks"

RELIBRA, EVEN, DEFAULT = "relibra_paper", "relibra_paper_tokens", "relibra"
"""With the paper's levers, for seconds and for even token-slots; and what training plans by default."""

OTHERS = ("eplb", "lplb", "popfetcher", "ultraep", "foremoe", "flashlb")
STAYS = ("static", "ultraep", "feplb", "llep", "popfetcher")
"""Whose homes never move: they need no step before."""


class Routes(NamedTuple):
    """Where routes come from, two steps of one model under their schedule, and tokens of the second (None: draw)."""

    load: str
    before: ScheduledDemand
    demand: ScheduledDemand
    tokens: Tokens | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step on one machine, and the step before it.

    load     says where the routes come from
    tokens   of `demand`: rows between ranks are then counted; None: bounded from pairs
    """

    load: str
    cluster: Cluster
    model: ModelShape
    before: ScheduledDemand
    demand: ScheduledDemand
    slots: int = 2
    tokens: Tokens | None = None

    @property
    def ranks(self) -> int:
        """Of the expert-parallel group."""
        return self.cluster.num_ranks


@dataclass(frozen=True, kw_only=True)
class Made:
    """What one balancer made of a case."""

    plan: StepPlan
    step: SimulatedStep
    skew: float


def cut_model(name: str, demand: Demand) -> ModelShape:
    """Return a model with the layers of a demand, and as much of its output matrix."""
    return simulation.cut_model(model_shape(name), demand)


def domains(ranks: int, layers: int, *, micro_batches: int = 32, seed: int = 0) -> Routes:
    """Three domains, log-normal factors of layer, domain and sample (relibra's own profile); two steps."""
    sizes = {"ranks": ranks, "layers": layers, "experts": 128, "micro_batches": micro_batches, "tokens": TOKENS}
    steps = (domain_step(samples=micro_batches * ranks, seed=seed, step=step, **sizes) for step in (0, 1))
    before, demand = (with_pairs(step) for step in steps)
    return Routes("domains", before, demand)


def drifting(ranks: int, layers: int, *, micro_batches: int = 32, seed: int = 0) -> Routes:
    """`relibra.routing.synthetic.domain_trace` as it comes: 4 domains, sigma 0.8, drift 0.5; first and second half.

    One token is drawn for sixteen.
    """
    rows, samples = TOKENS // 16, micro_batches * ranks
    shape = TraceShape(rows_per_sample=[rows] * (2 * samples), num_layers=layers, num_experts=128, top_k=8)
    whole = Demand.from_trace(domain_trace(shape, np.random.default_rng(seed)))
    place = np.arange(samples)
    halves = []
    for first in (0, samples):
        counts_SLE = whole.counts_SLE[first : first + samples] * np.int32(16)
        half = replace(whole, counts_SLE=counts_SLE, sample_ids=place)
        halves.append(with_pairs(half.with_schedule(place % micro_batches, place // micro_batches % ranks, ranks)))
    return Routes("domain_trace", *halves)


def sequences(ranks: int, layers: int, *, per_micro_step: int, length_S: np.ndarray) -> Routes:
    """ForeMoE's profile: per-layer popularity softmax(N(0, 0.8)), a shift N(0, 1) per sequence, 16 micro-steps."""
    model = np.random.default_rng(0)
    popular_LE = model.normal(scale=0.8, size=(layers, 128))
    steps = []
    for step in (0, 1):
        rng = np.random.default_rng([0, step])
        counts_SLE = np.empty((len(length_S), layers, 128), dtype=np.int32)
        for s, length in enumerate(length_S):
            weight_LE = np.exp(popular_LE + rng.normal(size=(layers, 128)))
            counts_SLE[s] = rng.multinomial(int(length) * 8, at_most(weight_LE, 1 / 8))
        place = np.arange(len(length_S))
        demand = Demand(counts_SLE=counts_SLE, layer_ids=np.arange(layers, dtype=np.int32), sample_ids=place, top_k=8)
        micro_step_S = (place // per_micro_step).astype(np.int32)
        steps.append(
            with_pairs(demand.with_schedule(micro_step_S, deal_sequences(micro_step_S, length_S, ranks), ranks))
        )
    return Routes(f"sequences, {per_micro_step} per micro-step", *steps)


def deal_sequences(micro_step_S: np.ndarray, length_S: np.ndarray, ranks: int) -> np.ndarray:
    """Return a rank for each sequence: in each micro-step the longest first, to the rank with the fewest tokens."""
    rank_S, tokens_MR = np.empty(len(length_S), dtype=np.int32), np.zeros((micro_step_S.max() + 1, ranks))
    for s in np.argsort(-length_S, kind="stable"):
        m = micro_step_S[s]
        rank_S[s] = np.argmin(tokens_MR[m])
        tokens_MR[m, rank_S[s]] += length_S[s]
    return rank_S


def recorded(path: Path, experts: int, ranks: int, tokens: int) -> Routes:
    """Return the first and the second half of a recording; a recorded token stands for as many as fill the ranks."""
    trace = open_trace(path, experts)
    whole = cut_recorded(trace, tokens, ranks)
    half = len(whole.load_MLE) // 2
    scale = round(ranks * TOKENS / tokens)
    pairs_LEE = co_activation(trace)
    micro_batch_S, rank_S = whole.micro_batch_S, whole.rank_S
    kept = np.flatnonzero(micro_batch_S < half)
    bare = Demand(
        counts_SLE=whole.counts_SLE[kept],
        layer_ids=whole.layer_ids,
        sample_ids=whole.sample_ids[kept],
        pairs_LEE=whole.pairs_LEE,
        top_k=whole.top_k,
    )
    parts = (bare.with_schedule(micro_batch_S[kept], rank_S[kept], ranks), select_micro_batches(whole, half))
    before, demand = (_scaled(part, scale, pairs_LEE) for part in parts)
    # Recorded samples are cut into runs of rows, so the places of the second half are looked up in its own demand.
    tokens_of = repeated(np.asarray(trace.experts_TLK), sample_of_rows(trace, parts[1]), scale)
    return Routes(f"recorded, {scale} tokens for one", before, demand, tokens_of)


def _scaled(demand: ScheduledDemand, scale: int, pairs_LEE: np.ndarray) -> ScheduledDemand:
    return replace(
        demand,
        counts_SLE=demand.counts_SLE * np.int32(scale),
        tokens_MLRE=demand.tokens_MLRE * np.int32(scale),
        pairs_LEE=pairs_LEE * scale,
    )


def with_pairs(demand: ScheduledDemand) -> ScheduledDemand:
    """Add the co-routing pairs that follow if a sample's tokens pick independently: n_e n_f (K - 1) / (K T)."""
    K = demand.top_k or 1
    counts_SLE = demand.counts_SLE.astype(np.float64)
    tokens_SL1 = np.maximum(1, counts_SLE.sum(axis=2, keepdims=True)) / K
    pairs_LEE = np.einsum("sle,slf->lef", counts_SLE / tokens_SL1, counts_SLE, optimize=True) * (K - 1) / K
    total_LE, e = counts_SLE.sum(axis=0), np.arange(counts_SLE.shape[2])
    pairs_LEE[:, e, e] = total_LE
    most_LEE = np.minimum(total_LE[:, :, None], total_LE[:, None, :])
    return replace(demand, pairs_LEE=np.minimum(pairs_LEE, most_LEE).astype(np.int64))


def forced_balance(demand: ScheduledDemand) -> ScheduledDemand:
    """Return the same samples, schedule and lengths with as many token-slots for every expert: "Balanced"."""
    tokens_SL = demand.counts_SLE.sum(axis=2, dtype=np.int64)
    E = demand.num_experts
    base_SL, rest_SL = np.divmod(tokens_SL, E)
    first_SL = (np.cumsum(rest_SL, axis=0) - rest_SL)[..., None]
    gets_one = (np.arange(E) - first_SL) % E < rest_SL[..., None]
    counts_SLE = (base_SL[..., None] + gets_one).astype(np.int32)
    bare = replace(demand, counts_SLE=counts_SLE, pairs_LEE=None)
    return with_pairs(bare.with_schedule(demand.micro_batch_S, demand.rank_S, demand.tokens_MLRE.shape[2]))


@lru_cache(maxsize=3)  # the seeds of a case: models follow one another on the same demands
def _even(demand: ScheduledDemand) -> tuple[ScheduledDemand, Tokens]:
    even = forced_balance(demand)
    return even, draw_tokens(even)


def balanced(case: Case, how: Execution | None = None) -> Made:
    """Simulate forced balance: the upper bound that papers call Balanced or ideal."""
    demand, tokens = _even(case.demand)
    even = replace(case, demand=demand, tokens=tokens if case.tokens else None)
    return made(even, "static", how=how)


def made(case: Case, name: str, *, how: Execution | None = None, **changes: object) -> Made:
    """Plan the step before and this one with a balancer, and simulate this one.

    changes   of the budget
    """
    budget = Budget(slots=case.slots, steps_served=1)
    if name == DEFAULT:
        budget = Budget(memory_gib=memory_for_slots(case.demand, case.cluster, model_shape(case.model.name)))
    budget = replace(budget, **changes)
    question = {"expert": case.model.expert, "never_worse": False}
    previous = None
    if name not in STAYS:
        previous = plan_step(case.before, case.cluster, budget, name, **question)
    plan = plan_step(
        case.demand, case.cluster, budget, name, previous=previous, history_MLE=case.before.load_MLE, **question
    )
    plan = plan if name == DEFAULT else replace(plan, resident=False)
    scheduled = plan.scheduled(case.demand)
    distinct = case.tokens.rows(plan, scheduled) if case.tokens else None
    step = simulate_step(plan, scheduled, case.cluster, case.model, how, distinct=distinct)
    return Made(plan=plan, step=step, skew=plan.skew(scheduled))


def case_of(routes: Routes, model: str, *, count_rows: bool = True, **facts: object) -> Case:
    """Make a case of routes; rows between ranks are counted from tokens, which are drawn where there are none.

    facts   of the case
    """
    tokens = (routes.tokens or draw_tokens(routes.demand)) if count_rows else None
    found = {"cluster": machine(routes.demand.tokens_MLRE.shape[2])} | facts
    return Case(
        load=routes.load,
        before=routes.before,
        demand=routes.demand,
        tokens=tokens,
        model=cut_model(model, routes.demand),
        **found,
    )


def machine(ranks: int, name: str = "h100x8") -> Cluster:
    """Return nodes of eight ranks, or one smaller node."""
    return cluster_preset(name, ranks)


def all_made(case: Case, names: Sequence[str]) -> dict[str, Made]:
    """Return what each balancer made, the static layout and forced balance with them."""
    found = {"static": made(case, "static"), BALANCED: balanced(case)}
    return found | {name: made(case, name) for name in names}


def row(paper: str, table: str, case: str, *, label: str = "simulated", **figures: object) -> dict:
    """Fill in what every row has.

    label   "model" for formulas and for token-slots of plans: nothing is simulated in them
    """
    empty = {
        "model": "", "ranks": "", "balancer": "", "load": "", "ratio_to_static": "", "ratio_to_balanced": "",
        "skew": "", "cited": "", "why": "", "unit": "", "configuration": "", "seed": 0, "repetitions": 1, "ok": "",
    }  # fmt: skip
    return {"case": case, "paper": paper, "table": table, "label": label, **empty, **figures}


def configuration(case: Case) -> str:
    M, L, E = case.demand.load_MLE.shape
    return (
        f"{L} layers for all, {case.model.top_k} of {E} experts, {M} micro-batches of about "
        f"{TOKENS} tokens per rank, {case.slots} slots in a buffer shared by layers, {case.cluster.name}"
    )
