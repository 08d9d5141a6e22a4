"""The planner's benchmark cases: each yields rows with what is reached and what should be.

A row is `ok` when `reached` is at most `target`; a row without a target is there to compare with.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness.provenance import quartiles
from benchmarks.harness.recorded_cuts import cut_recorded
from benchmarks.planner.replication_milp import replicate_milp
from benchmarks.planner.steps import domain_step, skewed_load
from benchmarks.programs import command
from relibra.cluster import cluster_preset
from relibra.planning.baselines.ultraep import solve as ultraep_solve
from relibra.planning.budget import Budget
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.levers.replication import replicate
from relibra.planning.planner import plan_step
from relibra.planning.validation import validate_plan
from relibra.routing.micro_batches import select_micro_batches
from relibra.routing.readers import open_trace

SKEW = "skew: sum of busiest / mean ranks, token-slots"
EXPERT = expert_shape("qwen3-30b-a3b")

RECORDED = {
    "gpt-oss-20b": ("gpt_oss_20b_decode_topk.npz", 32, 2048),
    "DeepSeek-V2-Lite": ("deepseek_v2_lite_esft_topk.npz", 64, 1024),
}
TOKENS, ANYWHERE = "relibra_paper_tokens", "relibra_paper_anywhere"
RECORDED_TARGETS = {
    ("gpt-oss-20b", 1, TOKENS): (1.01, 1.03, 1.08),
    ("gpt-oss-20b", 1, ANYWHERE): (1.005, 1.01, 1.02),
    ("DeepSeek-V2-Lite", 1, TOKENS): (1.02, 1.03, 1.05),
    ("DeepSeek-V2-Lite", 2, TOKENS): (1.005, 1.012, 1.03),
}
PUBLISHED_COPIES = {1.5: 38, 2.0: 46, 3.0: 51}
"""UltraEP's copies at each start skew; its plans take 67-78 us on a GPU."""


def row(case: str, reached: float, target: float | None, unit: str, **more: object) -> dict:
    facts = {"ranks": "", "bound": "", "copies": "", "configuration": "", "repetitions": 1, "seed": 0, **more}
    ok = "" if target is None else "yes" if reached <= target else "NO"
    shown = "" if target is None else target
    return {"case": case, "label": "measured", "unit": unit, "reached": reached, "target": shown, "ok": ok, **facts}


def timing(case: str, amounts: list[float], target: float | None, unit: str, **more: object) -> dict:
    """Make a row of the median over repetitions, with the quartiles."""
    facts = {**more, **quartiles(amounts, "reached"), "repetitions": len(amounts)}
    return row(case, statistics.median(amounts), target, unit, **facts)


def planned(demand, ranks: int, slots: int, balancer: str = TOKENS):
    """Plan for even token-slots, under the given schedule."""
    cluster, budget = cluster_preset("h100x8", ranks), Budget(slots=slots, pack_samples=False, tolerance=0.0)
    plan = plan_step(demand, cluster, budget, balancer, expert=EXPERT, never_worse=False)
    validate_plan(plan, cluster_preset("h100x8", ranks).topology, demand)
    return plan, plan.scheduled(demand)


def recorded(data: Path, quick: bool) -> Iterator[dict]:
    """Recorded routes, the later half of the micro-batches, against the targets and the plan's own bound."""
    for model, (file, experts, tokens) in RECORDED.items():
        if not (data / file).exists():
            print(f"skipped: {model}, because {data / file} is not there; name its folder with --data", file=sys.stderr)
            continue
        trace = open_trace(data / file, experts)
        for place, ranks in enumerate((8, 16, 32)):
            if quick and ranks == 32:
                continue
            whole = cut_recorded(trace, tokens, ranks)
            demand = select_micro_batches(whole, len(whole.load_MLE) // 2)
            yield from _recorded_rows(model, demand, ranks, place, f"{tokens} tokens per micro-batch, second half")


def _recorded_rows(model: str, demand, ranks: int, place: int, configuration: str) -> Iterator[dict]:
    for slots in (1, 2):
        for balancer in (TOKENS, ANYWHERE):
            targets = RECORDED_TARGETS.get((model, slots, balancer))
            if targets is None and slots == 1:
                continue
            plan, scheduled = planned(demand, ranks, slots, balancer)
            skew, bound = plan.skew(scheduled), plan.bound(scheduled)
            facts = {"ranks": ranks, "bound": bound, "copies": plan.num_copies, "configuration": configuration}
            words = f"{model}, {balancer}, {slots} slot{'s' * (slots > 1)}"
            if targets is not None:
                yield row(words, skew, targets[place], SKEW, **facts)
            if slots == 2:
                yield row(f"gap, {words}", 100 * (skew / bound - 1), 1.0, "% above the plan's own bound", **facts)


def synthetic(quick: bool) -> Iterator[dict]:
    """ReLibra's setting: 128 experts, top-8, 32 micro-batches of 4096 tokens per rank, three domains."""
    seeds, layers = (0,) if quick else (0, 1, 2), 2 if quick else 6
    sizes = {"layers": layers, "experts": 128, "micro_batches": 32, "tokens": 4096}
    configuration = f"128 experts, top-8, 32 micro-batches of 4096 tokens per rank, {layers} layers, {len(seeds)} draws"
    means = []
    for ranks in (8, 16, 32, 64):
        found = []
        for seed in seeds:
            demand = domain_step(ranks=ranks, samples=32 * ranks, seed=seed, **sizes)
            plan, scheduled = planned(demand, ranks, 2)
            static, _ = planned(demand, ranks, 2, "static")
            found.append((plan.skew(scheduled), plan.bound(scheduled), plan.num_copies, static.skew(demand)))
        skew, bound, copies, start = np.mean(found, axis=0)
        means.append(float(skew))
        facts = {"ranks": ranks, "bound": float(bound), "copies": round(copies), "repetitions": len(seeds)}
        words = f"{configuration}; static skew {start:.2f}"
        yield row("synthetic domains, 2 slots", float(skew), 1.04, SKEW, configuration=words, **facts)
    facts = {"ranks": "8 to 64", "configuration": configuration, "repetitions": len(seeds)}
    yield row("synthetic domains, 2 slots, mean over EP", statistics.mean(means), 1.02, SKEW, **facts)


def solves(quick: bool) -> Iterator[dict]:
    """One replication solve: 256 experts on 64 ranks of one domain, 2 slots, tolerance 1 %, one core."""
    draws, repetitions = 64, 15 if quick else 31  # other load on the machine must hit half of them to be seen
    for start, published in PUBLISHED_COPIES.items():
        load_ME, home_E = skewed_load(ranks=64, experts=256, top_k=8, tokens=8192, rank_skew=start, seed=0, draws=draws)
        load_ME = load_ME.astype(np.int64)

        def solve(load=load_ME, home_E=home_E):
            return replicate(load, home_E, 64, 64, slots=2, tolerance=0.01)

        replica_MRB, quota_MRB = solve()
        loop = [seconds / draws for seconds in timed(solve, repetitions)]
        first = load_ME[:1].copy()
        calls = timed(lambda solve=solve, first=first: solve(first), 20 * repetitions)
        load_MR = np.stack([np.bincount(home_E, load, 64) for load in load_ME])
        for m, r, b in zip(*np.nonzero(replica_MRB >= 0), strict=True):
            load_MR[m, r] += quota_MRB[m, r, b]
            load_MR[m, home_E[replica_MRB[m, r, b]]] -= quota_MRB[m, r, b]
        facts = {"ranks": 64, "configuration": f"256 experts, one domain, {draws} draws at start skew {start:g}"}
        case = f"replication solve, start skew {start:g}"
        micro = "microseconds per solve, one core, median"
        yield timing(case, [1e6 * one for one in loop], 60.0, micro, **facts)
        yield timing(f"{case}, called from Python", [1e6 * one for one in calls], None, micro, **facts)
        skew = float((load_MR.max(axis=1) / load_MR.mean(axis=1)).mean())
        copies = float((replica_MRB >= 0).sum() / draws)
        yield row(f"{case}, skew", skew, 1.01, "busiest / mean rank, mean of draws", repetitions=draws, **facts)
        facts["configuration"] += f"; published {published}, 8 more allowed"
        yield row(f"{case}, copies", copies, float(published + 8), "copies, mean of draws", repetitions=draws, **facts)


def timed(work, repetitions: int) -> list[float]:
    seconds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


WHOLE_STEP = {"ranks": 32, "layers": 94, "experts": 128, "micro_batches": 32, "samples": 1024, "tokens": 1024}


def whole_step(quick: bool, modelled: list[dict]) -> Iterator[dict]:
    """Plan a whole step, cold and from the step before, in a process of its own, so that its memory is its own.

    modelled   gets rows with what the model says that the static layout and the plans cost
    """
    sizes = WHOLE_STEP | ({"layers": 24} if quick else {})
    words = command("planner", "--whole-step", json.dumps(sizes))
    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout)
    configuration = "{layers} layers x {experts} experts x {micro_batches} micro-batches x {samples} samples, ".format(
        **sizes
    )
    configuration += "2 slots, objective in seconds"
    facts = {"ranks": sizes["ranks"], "configuration": f"{configuration}, 2 threads, kernels compiled before"}
    yield timing("whole step, cold", found["cold"], 5.0, "seconds, median", **facts, bound=found["cold_bound"])
    yield timing("whole step, warm start", found["warm"], 1.5, "seconds, median", **facts, bound=found["warm_bound"])
    memory = "MiB resident at the peak"
    yield row("whole step, memory", found["mib"], 1024.0, memory, **facts)
    yield row("whole step, memory that planning added", found["added_mib"], None, memory, **facts)
    yield row("whole step, cold, skew", found["cold_skew"], None, SKEW, **facts, bound=found["cold_bound"])
    yield row("whole step, warm start, skew", found["warm_skew"], None, SKEW, **facts, bound=found["warm_bound"])
    for case, name in (("whole step, cold", "cold"), ("whole step, warm start", "warm")):
        static, plan = found[f"{name}_static_seconds"], found[f"{name}_plan_seconds"]
        modelled.append({
            "case": case, "label": "model", "unit": "seconds of the MoE layers of a step; ratio: plan / static",
            "ranks": sizes["ranks"], "static": static, "plan": plan, "ratio": plan / static,
            "configuration": f"{configuration}, h100x8, experts of qwen3-30b-a3b; moves of homes counted in full",
            "seed": 0, "repetitions": 1,
        })  # fmt: skip


def plan_whole_step(sizes: dict, repetitions: int = 3) -> dict:
    """Measure seconds and memory of a cold and of a warm plan; called in the process of `whole_step`.

    The static layout is where a cold start begins; a warm one would have to move the experts back to it, which a step
    in the static layout never paid: so both plans stand beside the static layout of a cold start.
    """
    cluster = cluster_preset("h100x8", sizes["ranks"])
    budget = Budget(slots=2)
    small = domain_step(seed=1, **{**sizes, "layers": 1, "samples": 64, "tokens": 64})
    plan_step(small, cluster, budget, expert=EXPERT, previous=plan_step(small, cluster, budget, expert=EXPERT))
    before, demand = (domain_step(seed=0, step=step, **sizes) for step in (0, 1))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    resident = status_mib("VmRSS")
    previous = plan_step(before, cluster, budget, expert=EXPERT)
    starts = {"cold": None, "warm": previous}
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(repetitions):  # in turn
        for name, start in starts.items():
            seconds[name] += timed(
                lambda start=start: plan_step(demand, cluster, budget, expert=EXPERT, previous=start), 1
            )
    found = {
        **seconds,
        "mib": status_mib("VmHWM"),
        "added_mib": status_mib("VmHWM") - resident,
    }
    static = plan_step(demand, cluster, budget, "static", expert=EXPERT)
    for name, start in starts.items():
        plan = plan_step(demand, cluster, budget, expert=EXPERT, previous=start)
        scheduled = plan.scheduled(demand)
        found |= {f"{name}_skew": plan.skew(scheduled), f"{name}_bound": plan.bound(scheduled)}
        for what, one in (("plan", plan), ("static", static)):
            found |= {
                f"{name}_{what}_seconds": one.predicted["total"] - one.predicted["attention"] - one.predicted["host"]
            }
    return found


def status_mib(key: str) -> float:
    """Return a size of this process, in MiB, as Linux counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {key}")


def against_milp(quick: bool) -> Iterator[dict]:
    """Ratio to the exact optimum on random nodes: 32 experts on 8 ranks."""
    rng = np.random.default_rng(0)
    instances = []
    for _ in range(4 if quick else 24):
        weight_E = rng.lognormal(0, 0.8, 32)
        instances.append(rng.multinomial(8 * 4096, weight_E / weight_E.sum()).astype(np.int64))
    home_E = np.repeat(np.arange(8), 4)
    for slots, target in ((1, 1.01), (2, 1.003)):
        best = [replicate_milp(load_E, home_E, 8, slots) for load_E in instances]
        for name, goal in (("solver", target), ("threshold oracle after UltraEP", None)):
            ratios = []
            for load_E, optimum in zip(instances, best, strict=True):
                if goal is None:
                    replica_MRB, quota_MRB = ultraep_solve(load_E[None], home_E, 8, slots)
                else:
                    replica_MRB, quota_MRB = replicate(load_E[None], home_E, 8, 8, slots=slots)
                load_R = np.bincount(home_E, load_E, 8)
                for r, b in zip(*np.nonzero(replica_MRB[0] >= 0), strict=True):
                    load_R[r] += quota_MRB[0, r, b]
                    load_R[home_E[replica_MRB[0, r, b]]] -= quota_MRB[0, r, b]
                ratios.append(load_R.max() / optimum)
            facts = {"ranks": 8, "repetitions": len(ratios), "configuration": "32 experts on 8 ranks, one node"}
            words = f"{name} against MILP, {slots} slot{'s' * (slots > 1)}"
            yield row(words, float(np.mean(ratios)), goal, "busiest rank / optimum, mean", **facts)


GROWTH = (  # (layers, micro-batches, ranks, experts)
    *((layers, 8, 32, 128) for layers in (16, 32, 64, 128, 256)),
    *((64, micro_batches, 32, 128) for micro_batches in (16, 32)),
    *((16, 4, ranks, 512) for ranks in (32, 64, 128, 256, 512)),
)


def growth(quick: bool) -> list[dict]:
    """Time of a cold plan as layers, micro-batches and ranks grow.

    Sizes take turns, so that other load on the machine does not fall on one of them alone.
    """
    works, cases, repetitions = [], [], 5 if quick else 3
    for layers, micro_batches, ranks, experts in GROWTH[:3] if quick else GROWTH:
        sizes = {"layers": layers, "micro_batches": micro_batches, "ranks": ranks, "experts": experts}
        demand = domain_step(samples=max(128, ranks * micro_batches // 2), tokens=1024, seed=0, **sizes)
        planned(demand, ranks, 2)  # checks the plan, touches the memory it needs
        cluster, budget = cluster_preset("h100x8", ranks), Budget(slots=2)
        works.append(functools.partial(plan_step, demand, cluster, budget, expert=EXPERT))
        cases.append(sizes)
    rounds = [[timed(work, 1)[0] for work in works] for _ in range(repetitions)]
    rows = []
    for sizes, found in zip(cases, zip(*rounds, strict=True), strict=True):
        seconds = statistics.median(found)
        cells = sizes["layers"] * sizes["micro_batches"]
        rows.append({
            "case": "cold plan", "label": "measured", "unit": "seconds, median; milliseconds per (layer, micro-batch)",
            **sizes, "seconds": round(seconds, 3), **quartiles(found, "seconds"),
            "ms_each": round(1e3 * seconds / cells, 3),
            "seed": 0, "repetitions": repetitions, "configuration": "2 slots, token objective, 2 threads",
        })  # fmt: skip
    return rows


def growth_exponent(rows: list[dict]) -> dict:
    """Fit time ~ (layers x micro-batches)^x over the rows with 32 ranks and 128 experts; 1 is linear."""
    same = [one for one in rows if (one["ranks"], one["experts"]) == (32, 128)]
    size = np.log([one["layers"] * one["micro_batches"] for one in same])
    slope = float(np.polyfit(size, np.log([one["seconds"] for one in same]), 1)[0])
    words = f"{same[0]['layers']} to {max(one['layers'] for one in same)} layers, 32 ranks, 128 experts"
    return row("growth of time over layers x micro-batches", slope, 1.1, "exponent; 1 is linear", configuration=words,
               ranks=32, repetitions=same[0]["repetitions"])  # fmt: skip
