"""Tables of other papers for `papers.py`: UltraEP, FEPLB, ForeMoE, T-PPO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.papers import steps
from benchmarks.papers.iteration_gain import end_to_end_speedup, needed_stage_speedup, rl_iteration, speedup
from benchmarks.papers.steps import BALANCED, DEFAULT, MODELS, RATIO, RELIBRA, Case, Made, configuration, row
from benchmarks.planner.steps import skewed_load
from benchmarks.simulation import rollout_windows
from relibra.cluster import cluster_preset
from relibra.planning.levers.replication import replicate
from relibra.routing.demand import Demand, ScheduledDemand
from relibra.simulation import (
    Engines,
    Execution,
    LengthDistribution,
    SimulatedRollout,
    SimulatedStep,
    model_shape,
    simulate_rollout,
)

ULTRAEP = {
    "glm4.5-106b-a12b": (2.23, {"static": 545, "lplb": 618, "eplb": 695, "ultraep": 757, BALANCED: 785.4}),
    "qwen3-235b-a22b": (2.86, {"static": 315, "lplb": 385, "eplb": 474, "ultraep": 524, BALANCED: 574.7}),
    "deepseek-v3": (1.30, {"static": 509, "lplb": 516, "eplb": 553, "ultraep": 613, BALANCED: 637.6}),
}
"""Start skew of a training run on 64 ranks, and TFLOPS per GPU; `eplb` is its EPLB+, with exact loads."""


HOMES_STAY = "relibra, homes stay"


def ultraep(quick: bool) -> Iterator[dict]:
    """UltraEP's planner table, and its training table, by its own generator of loads."""
    paper = "UltraEP, arXiv 2606.04101"
    for start, copies in ((1.51, 38), (2.01, 46), (3.03, 51)):
        load_ME, home_E = skewed_load(
            ranks=64, experts=256, top_k=8, tokens=8192, rank_skew=start, seed=0, draws=8 if quick else 64
        )
        replica_MRB, quota_MRB = replicate(load_ME.astype(np.int64), home_E, 64, 64, slots=2, tolerance=0.01)
        load_MR = np.stack([np.bincount(home_E, load, 64) for load in load_ME])
        for m, r, b in zip(*np.nonzero(replica_MRB >= 0), strict=True):
            load_MR[m, r] += quota_MRB[m, r, b]
            load_MR[m, home_E[replica_MRB[m, r, b]]] -= quota_MRB[m, r, b]
        yield row(
            paper, "planner", f"planner, start skew {start:g}", label="model", ranks=64, balancer=RELIBRA,
            load="UltraEP's generator",
            skew=float((load_MR.max(axis=1) / load_MR.mean(axis=1)).mean()),
            value=float((replica_MRB >= 0).sum() / len(load_ME)),
            cited=f"skew 1.01, {copies} copies, 67 to 78 us on a GPU",
            unit="copies; skew of the loads after planning", configuration="256 experts, 64 ranks, one domain, 2 slots",
            why="the search may take more copies for a lower ceiling; its time (one CPU core) is in planner.json",
            repetitions=len(load_ME),
        )  # fmt: skip
    for name, (start, tflops) in ULTRAEP.items() if not quick else ():
        case = _ultraep_case(name, start)
        found = steps.all_made(case, ("eplb", "lplb", "ultraep", RELIBRA))
        found[HOMES_STAY] = steps.made(case, RELIBRA, move_homes=False)
        for balancer, one in found.items():
            cited = tflops.get(balancer)
            ratio = (
                f"{cited / tflops['static']:.2f} of static, {cited / tflops[BALANCED]:.2f} of ideal" if cited else ""
            )
            yield row(
                paper, "training", f"{name}, EP 64, {balancer}", model=name, ranks=64, balancer=balancer,
                load=case.load,
                ratio_to_static=found["static"].step.seconds / one.step.seconds, skew=one.skew,
                ratio_to_balanced=found[BALANCED].step.seconds / one.step.seconds, cited=ratio, unit=RATIO,
                configuration=configuration(case), why=_why_ultraep(balancer, found),
            )  # fmt: skip


def _ultraep_case(name: str, start: float) -> Case:
    """Every micro-batch of a layer has hot experts of its own, one rank skew: what planning for a step cannot even."""
    model, layers, M, R = model_shape(name), 2, 8, 64
    tokens_MLRE = np.zeros((2 * M, layers, R, model.experts), dtype=np.int32)
    rng = np.random.default_rng(0)
    for m in range(2 * M):
        for layer in range(layers):
            load_ME, home_E = skewed_load(
                ranks=R, experts=model.experts, top_k=model.top_k, tokens=4096, rank_skew=start,
                seed=m // 4 * layers + layer, draws=1,
            )  # fmt: skip
            at_home = np.argsort(home_E, kind="stable")
            tokens_MLRE[m, layer] = rng.multinomial(4096 * model.top_k, load_ME[0][at_home] / load_ME.sum(), size=R)
    halves = []
    for part in (tokens_MLRE[:M], tokens_MLRE[M:]):
        counts_SLE = part.transpose(0, 2, 1, 3).reshape(M * R, layers, model.experts)
        place = np.arange(M * R)
        demand = Demand(
            counts_SLE=counts_SLE, layer_ids=np.arange(layers, dtype=np.int32), sample_ids=place, top_k=model.top_k
        )
        halves.append(steps.with_pairs(demand.with_schedule(place // R, place % R, R)))
    load = f"UltraEP's generator, skew {start:g}, hot experts change every fourth micro-batch"
    return steps.case_of(steps.Routes(load, *halves), name, cluster=cluster_preset("nvl72", R, R))


def _why_ultraep(balancer: str, found: dict[str, Made]) -> str:
    static = found["static"].step
    share = (static.terms["exchange"] + static.terms["compute"]) / static.seconds
    if balancer == "static":
        return f"experts and exchange are {share:.0%} of this step; 72 ranks per NVLink domain are assumed"
    if balancer == RELIBRA:
        exposed = found[RELIBRA].step.terms["copies"] / found[RELIBRA].step.seconds
        return (
            f"{exposed:.1%} of its step are copies in the open: homes laid for the hot experts of the step before "
            "send more copies from fewer ranks; see the row in which homes stay, as UltraEP's do"
        )
    if balancer in ("eplb", "lplb"):
        return "from the totals of the step; their copies are pushed for every pass, as the buffer is shared by layers"
    return ""


def feplb(quick: bool) -> Iterator[dict]:
    """FEPLB's cut of the straggler, (max - mean) token-slots of a layer, on one node."""
    cited = {2: (2278, 1107), 4: (4649, 1697), 8: (6666, 2021)}
    for ranks, (before_cut, after_cut) in cited.items():
        case = steps.case_of(steps.domains(ranks, 1 if quick else 4), MODELS[1], count_rows=False)
        static = steps.made(case, "static")
        for name in ("feplb", RELIBRA):
            one = steps.made(case, name, slots=4 if name == "feplb" else 2)
            cut = 1 - _straggler(one, case.demand) / _straggler(static, case.demand)
            yield row(
                "FEPLB, arXiv 2604.19654", "straggler", f"EP {ranks}, {name}", label="model", model=MODELS[1],
                ranks=ranks, balancer=name, load=case.load, value=-100 * cut, skew=one.skew,
                cited=f"{-100 * (1 - after_cut / before_cut):.0f}" if name == "feplb" else "",
                unit="% change of (max - mean) token-slots, mean of micro-batches and layers",
                configuration=configuration(case) + (", 4 dynamic experts" if name == "feplb" else ""),
                why="its loads, least tokens of a move and choice of movable experts are not public: ours may move any"
                if name == "feplb" else "",
            )  # fmt: skip


def _straggler(one: Made, demand: ScheduledDemand) -> float:
    load_MLR = one.plan.rank_load(one.plan.scheduled(demand))
    return float((load_MLR.max(axis=2) - load_MLR.mean(axis=2)).mean())


def foremoe(quick: bool) -> Iterator[dict]:
    """ForeMoE's stages and its end to end, apart, with the share of the rollout; and ablations of what is planned.

    Homes send the weights of replicas in both stages, as in `relibra train`; ForeMoE recomputes from pools in host
    memory.
    """
    paper, name, ranks = "ForeMoE, arXiv 2606.11867", MODELS[0], 16 if quick else 64
    lengths = LengthDistribution(median=1000.0, sigma=0.6, longest=16_384)
    length_S = lengths.draw(16 * 4 * ranks, np.random.default_rng(0))
    routes = steps.sequences(ranks, 1 if quick else 3, per_micro_step=4 * ranks, length_S=length_S)
    case = steps.case_of(routes, name)
    engines = Engines(num_engines=ranks // 8, ranks=8, slots=128)
    rollout = simulate_rollout(length_S, 300.0, engines, model_shape(name), case.cluster)
    scale = model_shape(name).layers / case.model.moe_layers
    update, recompute = Execution(mini_batches=4), Execution(forward_only=True)

    def stages(balancer: str, **changes: object) -> list[Made]:
        return [steps.made(case, balancer, how=how, **changes) for how in (update, recompute)]

    static = stages("static")
    variants = {
        "foremoe": stages("foremoe"),
        RELIBRA: stages(RELIBRA),
        DEFAULT: stages(DEFAULT),
        "relibra, homes only": stages(RELIBRA, slots=0),
        "relibra, replicas only": stages(RELIBRA, move_homes=False),
    }
    ideal = [steps.balanced(case, how) for how in (update, recompute)]
    for balancer, pair in {"static": static, **variants, BALANCED: ideal}.items():
        yield _iteration_row(paper, case, balancer, pair, static, ideal, rollout=rollout, engines=engines, scale=scale)
    for share in (0.2, 0.3, 0.4, 0.5):
        yield row(
            paper, "needed", f"needed for 1.45 at a rollout share of {share:.0%}", label="model",
            value=needed_stage_speedup(1.45, share), end_to_end=end_to_end_speedup(1.8, share),
            cited="up to 1.45 end to end, share not said",
            unit="stage speed-up needed; end to end of a 1.8-fold training stage", configuration="Amdahl",
        )  # fmt: skip


def _iteration_row(
    paper: str, case: Case, balancer: str, pair: list[Made], static: list[Made], ideal: list[Made], *,
    rollout: SimulatedRollout, engines: Engines,
    scale: float,
) -> dict:  # fmt: skip
    """One iteration: the layers that were simulated stand for all, so stages are that many times as long."""
    whole = model_shape(case.model.name)

    def iteration(made: list[Made]):
        steps_of = [_times(one.step, scale) for one in made]
        return rl_iteration(rollout, steps_of[0], whole, case.cluster, engines, recompute=steps_of[1])

    gain, of_ideal = speedup(iteration(static), iteration(pair)), speedup(iteration(ideal), iteration(pair))
    cited = {"foremoe": "up to 1.45 end to end; unconfirmed: 1.45 and 1.38", RELIBRA: ""}
    cited |= {
        "relibra, homes only": "unconfirmed: base only 1.21",
        "relibra, replicas only": "unconfirmed: micro-step only 1.18",
    }
    return row(
        paper, "iteration", f"{case.model.name}, EP {case.ranks}, {balancer}", model=case.model.name, ranks=case.ranks,
        balancer=balancer, load=case.load, skew=pair[0].skew, ratio_to_static=gain.training,
        ratio_to_balanced=of_ideal.training, end_to_end=gain.end_to_end,
        rollout_share=gain.rollout_share, recompute=gain.stages["recompute"], update=gain.stages["update"],
        cited=cited.get(balancer, ""),
        unit="speed-up over static of recompute, update, training stages and end to end; / Balanced: training stages",
        configuration=f"{case.ranks} GPUs as one group, 16 micro-steps, lengths log-normal (median 1,000, sigma 0.6), "
        f"{engines.num_engines} engines of {engines.ranks} with {engines.slots} slots",
        why="" if balancer != "foremoe" else "end to end follows from the rollout share, which the paper does not say",
    )  # fmt: skip


def _times(step: SimulatedStep, scale: float) -> SimulatedStep:
    """Stretch a step of a few layers to the whole model."""
    terms = {name: seconds * scale for name, seconds in step.terms.items()}
    return replace(step, seconds=step.seconds * scale, terms=terms)


def tppo(quick: bool) -> Iterator[dict]:
    """The scheduler ratios behind T-PPO's claim, by `rollout_windows.py`."""
    for one in rollout_windows.modelled(rollout_windows.CASES, 1 if quick else rollout_windows.REPETITIONS):
        yield row(
            "T-PPO, arXiv 2506.15050", "windows", one["case"], label="model", value=one["rate, b = 0"],
            slow_decoder=one["rate, b = 1/512"],
            fed_again=one["fed again"], idle_sync=one["idle sync"], idle_window=one["idle window"],
            cited="about 2.5 end to end", unit="tokens per time, windows / synchronous",
            configuration=one["configuration"], seed=one["seed"], repetitions=one["repetitions"],
            why="the paper's figure is wall time of training; here decoding alone, without feeding cut responses again",
        )  # fmt: skip
