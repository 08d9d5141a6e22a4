"""Plans of the search: against figures computed apart, all pairs of accelerators, brute force, colocated plans."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from benchmarks.deployment.brute_force import brute_force
from benchmarks.deployment.node_costs import node_costs
from benchmarks.deployment.rows import BASIS, GPUS, LEVEL, MODELS, PAIRS, SEED, row
from relibra.planning.deployment.colocated import search_colocated
from relibra.planning.deployment.deployment_plan import DeploymentPlan, cache_rows
from relibra.planning.deployment.expert_redundancy import place_copies
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import PAPER_SPACE, SearchSpace, search_pair, search_pairs, value
from relibra.planning.deployment.served_model import ServedModel
from relibra.simulation.serving.routes import drawn_routes
from relibra.simulation.serving.serving_result import ServingResult
from relibra.simulation.serving.serving_run import Scenario, simulate_serving
from relibra.simulation.serving.transport import NCCL_LIKE

ANCHORS = {
    ("mixtral-8x22b", "a800"): 899,
    ("mixtral-8x22b", "h20"): 1227,
    ("dbrx", "a800"): 1043,
    ("dbrx", "h20"): 1900,
    ("scaled-moe", "a800"): 816,
    ("scaled-moe", "h20"): 1400,
}
"""Tokens per second and price by model and accelerator of attention, computed once by two other programs with the same
assumptions; not the paper's."""
PER_GPU_CITED = {
    "mixtral-8x22b": ("2.56", "1.28"),
    "dbrx": ("2.56", "1.28"),
    "scaled-moe": ("7.11", "1.90"),
}
"""Decode tokens per second and GPU over vLLM and over TensorRT-LLM on A800, "up to"."""


def pairs() -> Iterator[dict]:
    """Search every pair of five accelerators for three models, as the paper does."""
    start = time.process_time()
    found = {
        name: search_pairs(model, LEVEL, list(GPUS.values()), PAPER_SPACE, Efficiency())
        for name, model in MODELS.items()
    }
    seconds = time.process_time() - start
    checked = 0
    for name, plans in found.items():
        for rank, plan in enumerate(plans, start=1):
            plan.validate()
            checked += 1
            names = plan.attention.accelerator.name, plan.experts.accelerator.name
            if rank <= 4 or names in PAIRS:
                yield _plan_row(name, rank, plan)
        first = plans[0].attention.accelerator.name, plans[0].experts.accelerator.name
        yield row(
            "searched", f"H20 + L40S is the best of {len(plans)} pairs, {name}", float(first == ("h20", "l40s")),
            test=8, label="model", unit="1: yes", least=1, cited="attention on H20, experts on L40S",
            configuration=f"{BASIS}; per price; no pair means that experts fit no node",
        )  # fmt: skip
    differences = [abs(value(_of(found[name], gpu), "price") / anchor - 1) for (name, gpu), anchor in ANCHORS.items()]
    yield row(
        "searched", "tokens/s per price against figures computed apart", max(differences), test=8, label="model",
        unit="largest relative difference", most=0.005, configuration=f"6 plans, {BASIS}",
    )  # fmt: skip
    yield row(
        "searched", "plans that keep latency and memory (Eq. 7 and 8)", float(checked), test=10, label="model",
        unit=f"of {checked} plans", least=checked,
    )  # fmt: skip
    yield row(
        "measured", "search of 25 pairs for 3 models", seconds, test=10, label="measured",
        unit="seconds of the processor, one core", most=5.0,
    )  # fmt: skip


def _of(plans: list[DeploymentPlan], gpu: str) -> DeploymentPlan:
    expert = dict(PAIRS)[gpu]
    return next(
        plan for plan in plans if (plan.attention.accelerator.name, plan.experts.accelerator.name) == (gpu, expert)
    )


def _plan_row(name: str, rank: int, plan: DeploymentPlan) -> dict:
    one, other = plan.attention, plan.experts
    return row(
        "pairs", f"{name}, {one.accelerator.name} + {other.accelerator.name}", value(plan, "price"), label="model",
        unit="tokens/s per price, L20 = 1", rank=rank, nodes=f"{one.nodes}x{one.ways} + {other.nodes}x{other.ways}",
        micro_batches=plan.micro_batches, rows=plan.rows, expert_rows=plan.expert_rows,
        attention_us=1e6 * plan.stage[0], expert_us=1e6 * plan.stage[1], hop_us=1e6 * plan.stage[2],
        ms=1e3 * plan.iteration_seconds, gpus=plan.gpus,
        per_gpu=plan.tokens_per_second / plan.gpus, limit=plan.limit, configuration=BASIS,
    )  # fmt: skip


def against_brute_force(quick: bool) -> Iterator[dict]:
    """Compare the search with all plans of small spaces."""
    space = SearchSpace(micro_batches=(1, 2, 3), ways=(1, 2), node_counts=(1, 2, 3), experts_per_node=(1, 2))
    worst = 0.0
    cases = 0
    for name, model in MODELS.items():
        small = replace(model, layers=4, width=model.width // 4)
        level = replace(LEVEL, context=60_000.0, seconds_per_token=0.004)
        for gpu, expert_gpu in PAIRS[: 1 if quick else 2]:
            pair = GPUS[gpu], GPUS[expert_gpu]
            found = search_pair(small, level, pair, space, Efficiency())
            best = brute_force(small, level, pair, space, Efficiency())
            assert found is not None, name
            assert best is not None, name
            worst = max(worst, abs(value(found, "price") / value(best, "price") - 1))
            cases += 1
    yield row(
        "searched", "search against every plan of a small space", worst, test=10, label="model",
        unit="largest relative difference of tokens/s per price", most=1e-12,
        configuration=f"{cases} spaces: models of 4 layers, all numbers of requests",
    )  # fmt: skip


def simulated_nodes(quick: bool) -> Iterator[dict]:
    """Compare the searched number of attention nodes with the best one in the simulator, uniform routes."""
    for name, model in list(MODELS.items())[: 1 if quick else 3]:
        routes = _uniform(model)
        for gpu, expert_gpu in PAIRS:
            plan = search_pair(model, LEVEL, (GPUS[gpu], GPUS[expert_gpu]), PAPER_SPACE, Efficiency())
            assert plan is not None, name
            found = {}
            most = 2 * plan.attention.nodes + 1
            for nodes in range(max(1, plan.attention.nodes // 2), most + 1):
                tried = _filled(replace(plan, attention=replace(plan.attention, nodes=nodes)))
                if tried is not None:
                    found[nodes] = simulate_serving(
                        tried, Scenario(steps=6, warm_up=2, routes=routes)
                    ).tokens_per_second_per_price
            best = max(found, key=lambda nodes: found[nodes])
            yield row(
                "acceptance", f"searched attention nodes / best, {name}, {gpu} + {expert_gpu}",
                found[plan.attention.nodes] / found[best], test=11, label="simulated",
                unit="ratio of tokens/s per price", least=0.9, most=1.0,
                configuration=f"searched {plan.attention.nodes}, best {best} of {min(found)} to {max(found)}; {BASIS}, "
                "uniform routes",
            )  # fmt: skip


def _filled(plan: DeploymentPlan) -> DeploymentPlan | None:
    """Return a plan with the most requests that memory and latency allow."""
    room = cache_rows(plan.model, plan.level, plan.attention, plan.micro_batches, plan.efficiency)
    fitting = [rows for rows in range(room, 0, -1) if _in_time(replace(plan, rows=rows))][:1]
    return replace(plan, rows=fitting[0]) if fitting else None


def _in_time(plan: DeploymentPlan) -> bool:
    return plan.iteration_seconds <= plan.level.seconds_per_token


def against_colocated(quick: bool) -> Iterator[dict]:
    """Simulate the best plan apart and the best colocated ones on the same or on one of the GPUs, uniform routes."""
    cases = (("a800",), "gpus"), (("h20", "l40s"), "price"), (("h20", "l40s"), "watts")
    for name, model in list(MODELS.items())[: 1 if quick else 3]:
        scenario = Scenario(steps=6 if quick else 10, warm_up=2, routes=_uniform(model))
        for gpus, objective in cases:
            plan = _best_apart(model, gpus, objective)
            apart = _figure(simulate_serving(plan, scenario), objective)
            best = 0.0
            for at, kind in product(gpus, ("tensor", "expert")):
                other = search_colocated(model, LEVEL, [GPUS[at]], objective, Efficiency(), (kind,))
                if other is None:
                    continue
                together = _figure(simulate_serving(other, scenario), objective)
                best = max(best, together)
                yield row(
                    "colocated", f"{name}, {' + '.join(gpus)} / {at} {kind} parallel, {_UNITS[objective]}",
                    apart / together, test=9, label="simulated", unit="ratio of tokens/s per GPU, price or watt",
                    apart=apart, colocated=together, cited=_cited(name, objective, kind, at),
                    apart_gpus=plan.gpus, colocated_gpus=other.gpus,
                    configuration=f"{_apart(plan)}; colocated {other.pool.nodes}x{other.pool.ways}, "
                    f"{other.micro_batches} micro-batch(es) of {other.rows}; {BASIS}, uniform routes",
                )  # fmt: skip
            yield row(
                "gain", f"{name}, {' + '.join(gpus)}", apart / best, test=9, label="simulated", per=objective,
                unit="tokens/s per GPU, price or watt, apart / best colocated on one of them", gpus=" + ".join(gpus),
                advice="disaggregate" if apart > best else "do not", configuration=f"{BASIS}, uniform routes",
            )  # fmt: skip


def transports(quick: bool) -> Iterator[dict]:
    """Simulate the best plan for M2N messages and the best one for messages 3.14 times as long, on A800."""
    for name, model in list(MODELS.items())[: 1 if quick else 3]:
        scenario = Scenario(steps=6 if quick else 10, warm_up=2, routes=_uniform(model))
        plan = _best_apart(model, ("a800",), "gpus")
        slower = _best_apart(model, ("a800",), "gpus", NCCL_LIKE.factor)
        found = [simulate_serving(one, scenario).tokens_per_second_per_gpu for one in (plan, slower)]
        yield row(
            "colocated", f"{name}, a800, M2N / NCCL-like messages, per GPU", found[0] / found[1], test=6,
            label="simulated", unit="ratio of tokens/s per GPU, price or watt", apart=found[0], colocated=found[1],
            cited="up to 1.53", apart_gpus=plan.gpus, colocated_gpus=slower.gpus,
            configuration=f"{_apart(plan)}; NCCL-like {_apart(slower)}; {BASIS}, uniform routes",
        )  # fmt: skip


_UNITS = {"gpus": "per GPU", "price": "per price", "watts": "per watt"}


def _best_apart(model: ServedModel, gpus: tuple[str, ...], objective: str, factor: float = 1.0) -> DeploymentPlan:
    space, efficiency = SearchSpace(objective=objective), Efficiency(hop_factor=factor)
    return search_pairs(model, LEVEL, [GPUS[gpu] for gpu in gpus], space, efficiency)[0]


def _apart(plan: DeploymentPlan) -> str:
    return (
        f"apart {plan.attention.nodes}x{plan.attention.ways} {plan.attention.accelerator.name} + {plan.experts.nodes}x"
        f"{plan.experts.ways} {plan.experts.accelerator.name}, {plan.micro_batches} micro-batches of {plan.rows}"
    )


def _cited(name: str, objective: str, kind: str, other: str) -> str:
    """Return what the paper says of decoding, against systems that are not the colocated plan of the row."""
    if objective == "gpus":
        vllm, tensorrt = PER_GPU_CITED[name]
        return f"up to {vllm} of vLLM, {tensorrt} of TensorRT-LLM" if kind == "tensor" else "up to 4.66, NCCL"
    if other != "h20" or kind == "expert":
        return ""
    return "up to 3.24 of vLLM, 1.86 of TensorRT-LLM" if objective == "price" else "1.80"


def _figure(result: ServingResult, objective: str) -> float:
    return {
        "gpus": result.tokens_per_second_per_gpu,
        "price": result.tokens_per_second_per_price,
        "watts": result.tokens_per_second_per_watt,
    }[objective]


def copies() -> Iterator[dict]:
    """Copies of hot experts: Zipf popularity, 32 experts on 32 nodes; and from one period to the next."""
    load_E = 1 / np.arange(1.0, 33.0)
    for slots, most in ((1, None), (2, 1.10), (3, 1.05)):
        costs_N = node_costs(load_E, place_copies(load_E, 32, slots))
        yield row(
            "searched", f"busiest / mean expert node, {slots} slot(s) per node", float(costs_N.max() / costs_N.mean()),
            test=17, label="model", unit="skew of costs", most=most,
            configuration="32 experts on 32 nodes, popularity Zipf 1.0, costs in proportion to rows",
        )  # fmt: skip
    rng = np.random.default_rng(SEED)
    load_TE = rng.multinomial(100_000, load_E / load_E.sum(), size=9)
    skews = []
    for before, after in pairwise(load_TE):
        costs_N = node_costs(after, place_copies(before, 32, 2))
        skews.append(float(costs_N.max() / costs_N.mean()))
    yield row(
        "searched", "busiest / mean expert node, placed by the period before", max(skews), test=18, label="model",
        unit="skew of costs", most=1.15,
        configuration="the same, 2 slots, 9 periods of 100,000 rows drawn from one popularity; the worst period",
    )  # fmt: skip


def _uniform(model: ServedModel) -> object:
    return drawn_routes(np.ones(model.experts), model.layers, model.top_k, np.random.default_rng(SEED))
