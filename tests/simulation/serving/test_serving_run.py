from dataclasses import replace

import numpy as np
import pytest

from relibra import ConfigError, PlanError
from relibra.planning.deployment.accelerator import accelerator
from relibra.planning.deployment.colocated import search_colocated
from relibra.planning.deployment.measured_seconds import MeasuredSeconds
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import PAPER_SPACE, search_pair
from relibra.planning.deployment.served_model import PAPER_MODELS
from relibra.planning.deployment.service_level import ServiceLevel
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.simulation.rollout import LengthDistribution
from relibra.simulation.serving.requests import Places, RequestStream, poisson_stream
from relibra.simulation.serving.routes import drawn_routes, recorded_routes
from relibra.simulation.serving.serving_run import Scenario, simulate_serving
from relibra.simulation.serving.transport import NCCL_LIKE, Transport

LEVEL = ServiceLevel(seconds_per_token=0.15, context=650)
DBRX = replace(PAPER_MODELS["dbrx"], layers=8)


@pytest.fixture(scope="module")
def plan():
    pair = accelerator("a800"), accelerator("a800")
    return search_pair(DBRX, LEVEL, pair, PAPER_SPACE, Efficiency())


def rng():
    return np.random.default_rng(0)


def test_even_routes_give_what_the_search_predicts(plan):
    result = simulate_serving(plan, Scenario(steps=6, warm_up=2))
    assert result.iteration_seconds == pytest.approx(plan.iteration_seconds, rel=0.02)
    assert result.tokens_per_second == pytest.approx(plan.steady_tokens_per_second, rel=0.02)
    drained = simulate_serving(plan, Scenario(steps=6, warm_up=2, drain=True))
    assert drained.iteration_seconds == pytest.approx(plan.drained_seconds, rel=0.03)
    assert result.tokens_per_second_per_gpu == pytest.approx(result.tokens_per_second / plan.gpus)


@pytest.mark.parametrize("kind", ["tensor", "expert"])
def test_colocated_plans_run_in_the_same_simulator(kind):
    plan = search_colocated(DBRX, LEVEL, [accelerator("h800")], "gpus", Efficiency(), (kind,))
    result = simulate_serving(plan, Scenario(steps=6, warm_up=2))
    assert result.iteration_seconds == pytest.approx(plan.iteration_seconds, rel=0.03)
    assert result.tokens_per_second == pytest.approx(plan.steady_tokens_per_second, rel=0.03)
    assert result.bubble == pytest.approx(max(0.0, 1 - result.attention_busy - result.experts_busy))
    assert (result.network_bytes > 0) == (kind == "expert")


def test_the_busiest_expert_sets_the_pace(plan):
    paces = [
        simulate_serving(
            plan, Scenario(steps=6, warm_up=2, routes=drawn_routes(np.arange(1.0, 17.0) ** -z, 8, 4, rng()))
        )
        for z in (0.0, 0.6, 1.2)
    ]
    assert paces[0].tokens_per_second > paces[1].tokens_per_second > paces[2].tokens_per_second
    assert paces[2].experts_busy < paces[0].experts_busy


def test_copies_of_hot_experts_help(plan):
    routes = drawn_routes(1 / np.arange(1.0, 17.0), 1, 4, rng())  # one layer: the same experts are hot in all
    one_layer = replace(plan, model=replace(DBRX, layers=1))
    counts_E = routes.before_TLE[-1, 0]
    alone = np.arange(16)[:, None]
    hot = np.full((16, 1), counts_E.argmax())
    hot[counts_E.argmax(), 0] = -1
    before = simulate_serving(one_layer, Scenario(routes=routes, expert_LYP=alone[None]))
    after = simulate_serving(one_layer, Scenario(routes=routes, expert_LYP=np.concatenate([alone, hot], axis=1)[None]))
    assert after.tokens_per_second > before.tokens_per_second


def test_recorded_routes_are_used_in_turn_for_more_layers(plan):
    shape = TraceShape(rows_per_sample=[64] * 8, num_layers=3, num_experts=16, top_k=4)
    routes = recorded_routes(domain_trace(shape, rng()), 8)
    counts_LMXE = routes.draw(np.array([[10, 700]]), rng())
    assert counts_LMXE.shape == (8, 1, 2, 16)
    assert counts_LMXE.sum(axis=-1).tolist() == [[[40, 2800]]] * 8
    assert simulate_serving(plan, Scenario(routes=routes)).tokens_per_second > 0


def test_slow_messages_cost_more_than_their_mean(plan):
    tails = Transport(name="tails", tail=0.01, tail_factor=10)
    even = simulate_serving(plan, Scenario())
    late = simulate_serving(plan, Scenario(transport=tails))
    assert late.tokens_per_second < even.tokens_per_second
    assert simulate_serving(plan, Scenario(transport=NCCL_LIKE)).tokens_per_second < even.tokens_per_second


def test_measured_seconds_take_the_place_of_formulas(plan):
    """Three nodes with 100 requests of a micro-batch each, 75 rows per expert; the busier side sets the pace."""
    used = Efficiency(half_rate_bytes=0, hop_seconds=0, launch_seconds=0)
    tables = (((0, 2e-4), (200, 6e-4)), ((0, 1e-4), (100, 2e-4))), (((0, 1e-4), (200, 3e-4)), ((0, 1e-4), (75, 4e-4)))
    for attention, expert in tables:
        measured = replace(used, measured=MeasuredSeconds(attention=attention, expert=expert))
        fast = replace(plan, rows=100, efficiency=measured, attention=replace(plan.attention, nodes=3))
        result = simulate_serving(fast, Scenario())
        assert result.iteration_seconds == pytest.approx(8 * 4 * 4e-4, rel=0.02)
        assert result.iteration_seconds == pytest.approx(fast.iteration_seconds, rel=0.02)


def test_every_request_of_a_stream_ends(plan):
    lengths = (
        LengthDistribution(median=40.0, sigma=0.5, longest=80),
        LengthDistribution(median=8.0, sigma=0.5, longest=20),
    )
    stream = poisson_stream(2000.0, 300, *lengths, rng())
    result = simulate_serving(plan, Scenario(steps=5000, warm_up=0, stream=stream))
    assert result.finished == 300
    assert result.queue_seconds < 0.1
    crowded = replace(stream, arrival_S=np.zeros(300))
    few = replace(plan, rows=2)
    assert simulate_serving(few, Scenario(steps=5000, warm_up=0, stream=crowded)).queue_seconds > result.queue_seconds


def test_the_same_seed_gives_the_same_figures(plan):
    late = Scenario(transport=Transport(name="late", tail=0.1, tail_factor=10), seed=3)
    seconds = [simulate_serving(plan, replace(late, seed=seed)).iteration_seconds for seed in (3, 3, 4)]
    assert seconds[0] == seconds[1] != seconds[2]


def test_a_timeline_shows_both_sides(plan):
    timeline = simulate_serving(plan, Scenario(steps=6)).timeline(2)
    assert timeline.num_ranks == plan.attention.nodes + plan.experts.nodes
    assert {event.stage for event in timeline.events} == {"attention", "experts", "combine"}


def test_what_cannot_be_simulated_is_refused(plan):
    with pytest.raises(ConfigError, match="at least one step has to count"):
        Scenario(steps=2, warm_up=2)
    with pytest.raises(PlanError, match="every expert needs one"):
        simulate_serving(plan, Scenario(expert_LYP=np.zeros((8, 16, 1), dtype=np.int64)))
    with pytest.raises(ConfigError, match="transport 'x': factor is 0"):
        Transport(name="x", factor=0)


def test_few_requests_are_spread_over_micro_batches(plan):
    stream = RequestStream(arrival_S=np.zeros(40), prompt_S=np.full(40, 100), response_S=np.full(40, 5))
    places = Places(stream, plan.micro_batches, plan.attention.nodes, plan.rows)
    for m in range(plan.micro_batches):
        places.admit(m, 0.0)
    rows_MX, tokens_MX = places.loads()
    assert rows_MX.sum(axis=1).tolist() == [10] * 4
    assert tokens_MX.sum() == 4000
