"""Ping-pong pipeline in the simulator: against formulas, micro-batches, transports, attention nodes, slow messages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from benchmarks.deployment.rows import GPUS, LEVEL, MODELS, SEED, row
from relibra.planning.deployment.deployment_plan import DeploymentPlan, Pool
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.pipeline_time import Amount, StageSeconds, drained_seconds
from relibra.simulation.serving.ping_pong import Work, new_clocks, run_layers, sending_order
from relibra.simulation.serving.serving_run import Scenario, simulate_serving
from relibra.simulation.serving.transport import NCCL_LIKE, Transport

LAYERS = 40
SIMULATED = "acceptance"


def paper_seconds(stage: StageSeconds, micro_batches: Amount, layers: int) -> Amount:
    """Return Eq. 5 of the paper, exact where `hop` <= computing and the micro-batches fill the round trip."""
    computing = np.maximum(stage.attention, stage.experts)
    return stage.round_trip + computing * (micro_batches * layers - 1)


def constant_work(stage: StageSeconds, layers: int, micro_batches: int, nodes: int = 1) -> Work:
    """Return layers in which every node and every hop takes what `stage` says."""
    shape = (layers, micro_batches, nodes, nodes)
    hop = np.full(shape, stage.hop / nodes)
    none = np.zeros(shape)
    return Work(
        attention_LMX=np.full(shape[:3], stage.attention), experts_LMXY=np.full((*shape[:2], 1, nodes), stage.experts),
        send_LMXY=hop, receive_LMXY=hop, give_LMXY=hop, take_LMXY=hop, late_LMXY=none, back_late_LMXY=none,
    )  # fmt: skip


def simulated_seconds(work: Work, *, steps: int = 1, window: int = 0, priority: bool = True) -> tuple[float, float]:
    """Return the seconds of the last step that began in a full pipeline, or of the first; and stalls of a sender."""
    _, M, X = work.attention_LMX.shape
    clocks, order = new_clocks(M, X, X, window=window), sending_order(X, X)
    before = stalled = 0.0
    for _ in range(steps):
        before = float(clocks.ready_MX.max())
        events = run_layers(work, clocks, order, order, ack_priority=priority)
        stalled += float(events.stalled_X.mean())
    return float(clocks.ready_MX.max()) - before, stalled


def formulas(quick: bool) -> Iterator[dict]:
    """Compare events with Eq. 5 of the paper where it holds, and with the general formula elsewhere."""
    rng = np.random.default_rng(SEED)
    inside, outside, number = 0.0, 0.0, 20 if quick else 200
    for layers in (1, 2, 40, 56):
        for _ in range(number):
            attention, experts = rng.uniform(0.2, 1.5, 2)
            computing = max(attention, experts)
            stage = StageSeconds(attention, experts, rng.uniform(0, 1) * computing)
            m = next(m for m in range(1, 9) if m * computing >= stage.round_trip)
            found, _ = simulated_seconds(constant_work(stage, layers, m))
            inside = max(inside, float(np.abs(found / paper_seconds(stage, m, layers) - 1)))
            stage = StageSeconds(attention, experts, rng.uniform(0, 1.8) * computing)
            m = int(rng.integers(1, 3))
            found, _ = simulated_seconds(constant_work(stage, layers, m))
            outside = max(outside, float(np.abs(found / drained_seconds(stage, m, layers) - 1)))
    unit = "largest relative difference of the time of a step"
    cases = f"{4 * number} random cases, 1 to 56 layers"
    yield row(
        SIMULATED, "events against Eq. 5, where it holds", inside, test=3, label="simulated", unit=unit, most=1e-9,
        cited="exact", configuration=cases,
    )  # fmt: skip
    yield row(
        SIMULATED, "events against the general formula, 1 or 2 micro-batches", outside, test=4, label="simulated",
        unit=unit, most=1e-9, configuration=f"{cases}, hop up to 1.8 of computing",
    )  # fmt: skip


def micro_batches() -> Iterator[dict]:
    """Throughput with one more micro-batch of the same size."""
    unit = "throughput with one more micro-batch of the same size"
    for model, share, goal in (("mixtral-8x22b", 0.10, 1.10), ("dbrx", 0.28, 1.28), ("scaled-moe", 0.38, 1.38)):
        stage = StageSeconds(1.0, 1.0, share)
        pace = [m / simulated_seconds(constant_work(stage, LAYERS, m), steps=3)[0] for m in (1, 2, 3, 4)]
        gains = [after / before for before, after in pairwise(pace)]
        limits = ((1.98, 2.02, "about 1.9"), (goal - 0.02, goal + 0.02, f"{goal:.2f}"), (0.999, 1.01, "marginal"))
        for m, (gain, (least, most, cited)) in enumerate(zip(gains, limits, strict=True), start=1):
            yield row(
                SIMULATED, f"{m} to {m + 1} micro-batches, {model}", gain, test=5, label="simulated", unit=unit,
                least=round(least, 4), most=most, cited=cited,
                configuration=f"hop / computing {share:g}, which the paper's gain implies; both sides equal",
            )  # fmt: skip


def transports() -> Iterator[dict]:
    """Throughput with M2N messages over that with messages 3.14 times as long."""
    unit = "throughput with M2N messages / with messages 3.14 times as long"
    for share in (0.38, 0.41):
        paces = [
            simulated_seconds(constant_work(StageSeconds(1.0, 1.0, share * factor), LAYERS, 3), steps=3)[0]
            for factor in (1.0, NCCL_LIKE.factor)
        ]
        yield row(
            SIMULATED, f"M2N, 3 micro-batches, hop / computing {share:g}", paces[1] / paces[0], test=6,
            label="simulated", unit=unit, least=1.45, most=1.55, cited="up to 1.53",
            configuration="3.14: what a median latency lower by 68.2 % means; slower for the whole hop",
        )  # fmt: skip


def attention_nodes() -> Iterator[dict]:
    """Attention nodes of DBRX on A800 with micro-batches of 64 requests."""
    model, gpu = MODELS["dbrx"], GPUS["a800"]
    for ways in (1, 2):
        found, modelled = {}, {}
        for nodes in (1, 2, 4, 8, 16):
            plan = DeploymentPlan(
                model=model, level=LEVEL, efficiency=Efficiency(), attention=Pool(gpu, ways, nodes),
                experts=Pool(gpu, ways, model.experts), experts_per_node=1, micro_batches=3, rows=64,
            )  # fmt: skip
            found[nodes] = simulate_serving(plan, Scenario(steps=6, warm_up=2))
            modelled[nodes] = plan
        for table, label, seconds, per_gpu in (
            (
                "searched", "model", {nodes: one.iteration_seconds for nodes, one in modelled.items()},
                {nodes: one.steady_tokens_per_second / one.gpus for nodes, one in modelled.items()},
            ),
            (
                SIMULATED, "simulated", {nodes: one.iteration_seconds for nodes, one in found.items()},
                {nodes: one.tokens_per_second_per_gpu for nodes, one in found.items()},
            ),
        ):  # fmt: skip
            yield from _sweep_rows(table, label, ways, seconds, per_gpu)


def _sweep_rows(
    table: str, label: str, ways: int, seconds: dict[int, float], per_gpu: dict[int, float]
) -> Iterator[dict]:
    """Return what a sweep over attention nodes shows.

    seconds, per_gpu    time per token, and tokens per second and GPU, by attention nodes
    """
    ms = {nodes: 1e3 * one for nodes, one in seconds.items()}
    words = f"{ways} GPU(s) per node, 3 micro-batches of 64 requests, 16 expert nodes, even routes"
    listed = ", ".join(f"{nodes}: {one:.1f} ms, {per_gpu[nodes]:,.0f}/s/GPU" for nodes, one in ms.items())
    common = {"test": 7, "label": label, "configuration": f"{words}; {listed}"}
    name = f"DBRX on A800, {ways} GPU(s) per node"
    yield row(
        table, f"{name}: time per token, 8 / 1 attention nodes", ms[8] / ms[1], unit="ratio of times", most=1.03,
        cited="flat", **common,
    )  # fmt: skip
    yield row(
        table, f"{name}: attention nodes with most per GPU", float(max(per_gpu, key=lambda nodes: per_gpu[nodes])),
        unit="nodes", least=8, most=8, cited="8", **common,
    )  # fmt: skip
    yield row(
        table, f"{name}: time per token, 16 / 8 attention nodes", ms[16] / ms[8], unit="ratio of times", least=1.5,
        most=1.7, cited="higher", **common,
    )  # fmt: skip


def slow_messages(quick: bool) -> Iterator[dict]:
    """One message in a hundred takes ten times as long, 8 attention and 8 expert nodes."""
    layers, nodes, m = 40, 8, 1
    stage = StageSeconds(1.0, 1.0, 0.3)
    rng = np.random.default_rng(SEED)
    steps = 5 if quick else 40
    clocks, order = new_clocks(m, nodes, nodes), sending_order(nodes, nodes)
    slow = Transport(name="slow", tail=0.01, tail_factor=10)
    total, slowest, mean = 0.0, 0.0, 0.0
    for _ in range(steps):
        work = constant_work(stage, layers, m, nodes)
        hop = np.full(work.send_LMXY.shape, stage.hop)
        late, back = slow.delays(hop, rng), slow.delays(hop, rng)
        before = float(clocks.ready_MX.max())
        run_layers(work._replace(late_LMXY=late, back_late_LMXY=back), clocks, order, order)
        total += float(clocks.ready_MX.max()) - before
        per_expert = late.max(axis=2) + back.max(axis=2)
        slowest += float(layers * stage.round_trip + per_expert.max(axis=2).sum())
        mean += float(layers * (stage.round_trip + late.mean() + back.mean()))
    words = "1 % of messages 10 times as long, 8 attention and 8 expert nodes, 1 micro-batch, hop / computing 0.3"
    yield row(
        SIMULATED, "slow messages: time / time of the slowest pair of each layer", total / slowest, test=19,
        label="simulated", unit="ratio of times", least=0.9, most=1.02, configuration=words,
    )  # fmt: skip
    yield row(
        SIMULATED, "slow messages: time / time with the mean message", total / mean, test=19, label="simulated",
        unit="ratio of times", least=1.1, configuration=words,
    )  # fmt: skip
    stage = StageSeconds(0.3, 0.3, 1.0)
    work = constant_work(stage, layers, 4, nodes)
    work = work._replace(late_LMXY=np.full(work.late_LMXY.shape, 0.05))
    stalls = [simulated_seconds(work, steps=3, window=1, priority=priority)[1] for priority in (True, False)]
    yield row(
        SIMULATED, "acknowledgements that overtake rows: stall of a sender / without", stalls[0] / stalls[1], test=19,
        label="simulated", unit="ratio of times", most=0.999, cited="lower",
        configuration="8 and 8 nodes, 4 micro-batches, hop / computing 3.3, one dispatch under way per sender",
    )  # fmt: skip
