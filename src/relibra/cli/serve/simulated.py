"""Simulated decode steps of the deployments that `relibra serve plan` decides on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relibra.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from relibra.planning.deployment.decision import Decision
    from relibra.planning.deployment.deployment_plan import DeploymentPlan
    from relibra.planning.deployment.served_model import ServedModel
    from relibra.simulation.serving.routes import RoutePool
    from relibra.simulation.serving.serving_result import ServingResult
    from relibra.simulation.serving.serving_run import Scenario

SEED = 0
MOST_REQUESTS = 1_000_000
SPREAD = 0.8
"""Standard deviation of the logarithm of lengths of prompts and responses; assumed."""
FIGURES = (
    *("iteration_seconds", "p99_seconds", "tokens_per_second", "tokens_per_second_per_gpu"),
    *("tokens_per_second_per_price", "tokens_per_second_per_watt", "attention_busy", "experts_busy", "network_busy"),
    *("network_bytes", "bubble", "limit", "queue_seconds", "queue_p99_seconds"),
)
"""Of a result, in JSON."""
RUN_COLUMNS = (
    *("case", "iteration_seconds", "p99_seconds", "attention_busy", "experts_busy", "network_busy", "bubble"),
    *("network_bytes", "limit", "tokens_per_second", "tokens_per_second_per_gpu", "tokens_per_second_per_price"),
    *("queue_seconds", "queue_p99_seconds"),
)
"""Figures of the table in a terminal."""


class Arrivals(NamedTuple):
    """Requests per second that arrive independently of each other, and median tokens of prompts and responses."""

    rate: float
    prompt: int
    response: int

    @staticmethod
    def read(rate: float, lengths: str) -> Arrivals:
        """Return arrivals with lengths as PROMPT,RESPONSE; raises ConfigError for anything else."""
        found = re.fullmatch(r"\s*([0-9]{1,7})\s*,\s*([0-9]{1,7})\s*", lengths)
        if found is None or not int(found[1]) or not int(found[2]):
            raise ConfigError(f"--lengths {lengths!r}: it must be two numbers of tokens above 0, such as 571,159")
        return Arrivals(rate, int(found[1]), int(found[2]))


def figures(name: str, result: ServingResult) -> dict[str, Any]:
    """Return the figures of a simulated plan as JSON."""
    return {"case": name, "label": "simulated"} | {figure: getattr(result, figure) for figure in FIGURES}


def simulate_decision(
    decision: Decision, trace: Path | None, copies: int, arrivals: Arrivals | None
) -> dict[str, ServingResult]:
    """Return results by name: those of the best plan with experts apart, one per option; that of the best colocated.

    trace      routes of the tokens; None: uniform
    copies     spare expert slots of a node; 0: no run with copies of hot experts
    arrivals   also run with requests that arrive; None: every request slot is always full
    raises     ConfigError when the trace is of another model
    """
    from relibra.simulation.serving.serving_run import Scenario, simulate_serving
    from relibra.simulation.serving.transport import NCCL_LIKE

    found = []
    model = decision.pairs[0].model if decision.pairs else decision.colocated[0].model
    routes = _routes(model, trace)
    if decision.best is not None:
        plain = Scenario(routes=routes)
        found = [("apart", plain), ("apart, NCCL-like messages", Scenario(routes=routes, transport=NCCL_LIKE))]
        if copies:
            placed = _placed(decision.best, routes, copies)
            found.append((f"apart, {copies} spare slot(s)", Scenario(routes=routes, expert_LYP=placed)))
        if arrivals is not None:
            found.append((f"apart, {arrivals.rate:g} requests/s", _arriving(decision.best, routes, arrivals)))
    runs = {name: simulate_serving(decision.pairs[0], scenario) for name, scenario in found}
    for plan in decision.colocated[:1]:
        runs[f"colocated, {plan.kind} parallel"] = simulate_serving(plan, Scenario(routes=routes))
    return runs


def _arriving(plan: DeploymentPlan, routes: RoutePool, arrivals: Arrivals) -> Scenario:
    """Return a scenario of 3 x the median response in steps; the first third is warm-up."""
    import numpy as np

    from relibra.simulation.rollout import LengthDistribution
    from relibra.simulation.serving.requests import poisson_stream
    from relibra.simulation.serving.serving_run import Scenario

    steps = 3 * arrivals.response
    number = int(np.ceil(arrivals.rate * steps * plan.level.seconds_per_token)) + 1
    if number > MOST_REQUESTS:
        raise ConfigError(
            f"--rate {arrivals.rate:g} makes {number:,} requests, at most {MOST_REQUESTS:,} are simulated: give fewer "
            "per second or shorter responses"
        )
    prompt, response = (
        LengthDistribution(median=float(median), sigma=SPREAD, longest=50 * median)
        for median in (arrivals.prompt, arrivals.response)
    )
    stream = poisson_stream(arrivals.rate, number, prompt, response, np.random.default_rng(SEED))
    return Scenario(steps=steps, warm_up=arrivals.response, routes=routes, stream=stream)


def _routes(model: ServedModel, trace: Path | None) -> RoutePool:
    import numpy as np

    from relibra.routing.readers import open_trace
    from relibra.simulation.serving.routes import drawn_routes, recorded_routes

    if trace is None:
        return drawn_routes(np.ones(model.experts), model.layers, model.top_k, np.random.default_rng(SEED))
    found = open_trace(trace, None if trace.is_dir() else model.experts)
    if (found.num_experts, found.top_k) != (model.experts, model.top_k):
        raise ConfigError(
            f"--trace {trace} has {found.top_k} of {found.num_experts} experts per token, {model.name} picks "
            f"{model.top_k} of {model.experts}: name a trace of this model"
        )
    return recorded_routes(found, model.layers)


def _placed(plan: DeploymentPlan, routes: RoutePool, copies: int) -> np.ndarray:
    """Return experts of each layer on the expert nodes, hot ones copied; loads are those of all tokens.

    An expert is copied while each copy has rows enough to compute for longer than its weights take to read.
    """
    import numpy as np

    from relibra.planning.deployment.deployment_plan import experts_fit
    from relibra.planning.deployment.expert_redundancy import place_copies

    gpu, used = plan.experts.accelerator, plan.efficiency
    rows = used.flops * gpu.flops_per_second / (used.memory * gpu.memory_bytes_per_second)
    least_load = rows * (len(routes.before_TLE) - 1) / (plan.rows * plan.attention.nodes)
    slots = plan.experts_per_node + copies
    if not experts_fit(plan.model, plan.experts, slots, used):
        raise ConfigError(
            f"--copies {copies}: {slots} experts do not fit a node of {plan.experts.ways} {gpu.name}: ask for fewer"
        )
    return np.stack([place_copies(load_E, plan.experts.nodes, slots, least_load) for load_E in routes.before_TLE[-1]])
