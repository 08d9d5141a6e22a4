"""Decode steps of a deployment, simulated: requests, routes, computing, messages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Shaped
from numpy import ndarray

from relibra.errors import ConfigError
from relibra.planning.deployment.colocated import ColocatedPlan
from relibra.simulation.serving.ping_pong import Clocks, new_clocks, run_layers
from relibra.simulation.serving.requests import Places, RequestStream
from relibra.simulation.serving.routes import EvenRoutes, Routes
from relibra.simulation.serving.serving_result import ServingResult, Tally
from relibra.simulation.serving.site import Plan, site_of
from relibra.simulation.serving.transport import M2N, Transport


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a deployment is put through.

    steps, warm_up      decode steps, and how many of them, the first, do not count
    transport           of messages between nodes
    routes              of tokens; None: even
    expert_LYP          experts of each expert node, with copies; None: each once, in order
    stream              requests; None: every place is always taken, by a request of the plan's context
    drain               a step begins when all micro-batches have ended the one before
    raises              ConfigError for fewer than one step that counts
    """

    steps: int = 20
    warm_up: int = 4
    transport: Transport = M2N
    routes: Routes | None = None
    expert_LYP: Int[ndarray, "L Y P"] | None = None
    stream: RequestStream | None = None
    drain: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < self.steps:
            raise ConfigError(f"{self.steps} steps with {self.warm_up} to warm up: at least one step has to count")


def simulate_serving(plan: Plan, scenario: Scenario) -> ServingResult:
    """Run decode steps of a plan; with a stream of requests until all have ended, or the steps are done.

    The same plan, scenario and seed give the same figures.
    """
    site, rng = site_of(plan, scenario.expert_LYP), np.random.default_rng(scenario.seed)
    micro_batches = 1 if isinstance(plan, ColocatedPlan) and plan.kind == "tensor" else plan.micro_batches
    routes = scenario.routes or EvenRoutes(layers=site.model.layers, experts=site.model.experts, top_k=site.model.top_k)
    clocks = new_clocks(micro_batches, site.senders, site.receivers, shared=site.shared)
    places = None if scenario.stream is None else Places(scenario.stream, micro_batches, site.senders, plan.rows)
    tally = Tally(plan, site, micro_batches, places)
    for step in range(scenario.steps):
        loads = _loads(plan, places, clocks)
        if loads is None:
            break
        rows_MX, tokens_MX = loads
        work, bytes_LMXY = site.work(rows_MX, tokens_MX, routes.draw(rows_MX, rng), scenario.transport, rng)
        events = run_layers(work, clocks, site.order_XY, site.back_YX)
        if scenario.drain:
            clocks.ready_MX[:] = clocks.ready_MX.max()
        end_M = clocks.ready_MX.max(axis=1)
        if places is not None:
            places.decode(end_M)
        tally.add(rows_MX, work, events, bytes_LMXY, end_M, counts=step >= scenario.warm_up)
    return tally.result()


def _loads(
    plan: Plan, places: Places | None, clocks: Clocks
) -> tuple[Shaped[ndarray, "M X"], Shaped[ndarray, "M X"]] | None:
    """Return requests and attended tokens of each micro-batch and node; None: all requests have ended."""
    if places is None:
        rows_MX = np.full(clocks.ready_MX.shape, plan.rows, dtype=np.int64)
        return rows_MX, rows_MX * float(plan.level.context)
    while True:
        for m, now in enumerate(clocks.ready_MX.max(axis=1).tolist()):
            places.admit(m, now)
        rows_MX, tokens_MX = places.loads()
        if rows_MX.any():
            return rows_MX, tokens_MX
        if np.isinf(places.next_arrival):
            return None
        clocks.ready_MX[:] = np.maximum(clocks.ready_MX, places.next_arrival)
