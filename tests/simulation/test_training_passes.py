"""What levers change: choices of activations against all choices, passes that are left out, rollouts ahead."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from relibra.simulation import Execution, SimulatedRollout, memory_use, simulate_step
from relibra.simulation.step.step_result import SimulatedStep
from relibra.simulation.step.training_step import with_mini_batches
from relibra.simulation.training_passes import Iteration, Kept, Levers, TrainingPasses, simulate_passes
from tests.simulation.steps import random_step


def made_step(seconds, terms):
    """A step of which only seconds and terms are read."""
    step = object.__new__(SimulatedStep)
    for name, value in (("seconds", seconds), ("terms", terms)):
        object.__setattr__(step, name, value)
    return step


def passes_of(seconds=(100.0, 60.0), attention=10.0, room=1000.0, layers=4, layer_bytes=(50.0, 200.0), moments=7.0):
    update, kept = (
        made_step(value, {"attention": share, "relocation": 0.0})
        for value, share in zip(seconds, (attention, 0.0), strict=True)
    )
    return TrainingPasses(
        update=update, all_kept=kept, forward=20.0, later=15.0, moment_seconds=moments,
        parts={"weights": 300.0, "optimizer": 400.0}, layer_bytes=layer_bytes, layers=layers, room=room,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_the_fastest_choice_that_fits_is_found(seed):
    rng = np.random.default_rng(seed)
    passes = passes_of(
        seconds=(100.0, float(rng.uniform(40, 99))), attention=float(rng.uniform(0, 30)),
        room=float(rng.uniform(200, 1700)), layer_bytes=(float(rng.uniform(1, 100)), float(rng.uniform(100, 400))),
        moments=float(rng.uniform(0, 40)),
    )  # fmt: skip
    every = [Kept(a, e, host) for a, e, host in product(range(5), range(5), (False, True)) if a + e <= 4]
    fitting = [kept for kept in every if passes.bytes(kept) <= passes.room]
    chosen = passes.choose("chosen")
    if fitting:
        assert chosen in fitting
        assert passes.seconds(chosen) == pytest.approx(min(map(passes.seconds, fitting)))
    else:
        assert passes.bytes(chosen) > passes.room
    whole = [kept for kept in fitting if not kept.attention and not kept.host_moments]
    if whole:
        assert passes.choose("kept").everything == max(kept.everything for kept in whole)
    assert passes.choose("recomputed") == Kept()


def test_passes_are_those_of_the_simulator():
    plan, demand, cluster, model = random_step(
        3, nodes=1, per_node=2, layers=3, slots=1, experts_per_rank=2, micro_batches=4
    )
    M = len(plan.replica_MLRB)
    demand = replace(demand, group_M=(np.arange(M) * 2 // M).astype(np.int32))
    passes = simulate_passes(plan, demand, cluster, model)
    one, how = with_mini_batches(demand)
    kept, again = (
        simulate_step(plan, one, cluster, model, replace(how, recompute_activations=it)) for it in (False, True)
    )
    assert passes.seconds(Kept()) == again.seconds
    assert passes.seconds(Kept(everything=model.layers)) == pytest.approx(kept.seconds)
    assert (
        passes.forward
        == simulate_step(plan, one, cluster, model, Execution(forward_only=True)).seconds - (again.terms["relocation"])
    )
    assert 0 < passes.later < passes.forward
    use = memory_use(plan, one, cluster, model, how)
    whole = passes.bytes(Kept(everything=model.layers))
    largest = memory_use(plan, one, cluster, model, replace(how, recompute_activations=True))
    inputs = passes.layer_bytes[1] * model.layers
    assert whole == pytest.approx(largest.total + inputs)
    assert whole >= use.total
    whole = replace(demand, group_M=None)
    assert simulate_passes(plan, whole, cluster, model).later == 0
    assert simulate_passes(plan, whole, cluster, model, Execution(mini_batches=2)).later == passes.later


def test_levers_leave_out_passes_and_rollouts_run_beside():
    rollout = SimulatedRollout(decode=80.0, prefill=5.0, fed_again=0.0, tokens=1, idle=0.25)
    ahead = replace(rollout, decode=60.0, fed_again=1.0, idle=0.0)
    iteration = Iteration(rollout=rollout, rollout_beside=ahead, reward=2.0, sync=3.0)
    found = {
        old: iteration.predict(passes_of(), Levers(old_log_probs=old)).stages["recompute"]
        for old in ("all", "later", "none")
    }
    assert found == {"all": 20.0, "later": 15.0, "none": 0.0}
    waiting = iteration.predict(passes_of(), Levers())
    assert waiting.stages["tail"] == 20.0
    assert (waiting.training, waiting.seconds) == (120.0, 85.0 + 2.0 + 120.0 + 3.0)
    assert iteration.predict(passes_of(), Levers(ahead=1)).seconds == 2.0 + 120.0 + 3.0, "it trains longer"
    slow = replace(iteration, rollout_beside=replace(ahead, decode=200.0))
    beside = slow.predict(passes_of(), Levers(ahead=1))
    assert beside.seconds == 206.0 + 3.0
    assert (beside.stages["waits"], beside.beside) == (206.0 - 122.0, {"rollout": 206.0})
    values = iteration.predict(passes_of(), Levers(reference=True, values=True))
    assert values.training == 120.0 + 20.0 + 20.0 + 100.0


def test_reference_and_value_model_take_memory_of_the_same_ranks():
    rollout = SimulatedRollout(decode=80.0, prefill=5.0, fed_again=0.0, tokens=1, idle=0.25)
    iteration = Iteration(rollout=rollout, rollout_beside=rollout, reward=2.0, sync=3.0)

    def predict(room, **levers):
        return iteration.predict(passes_of(room=room), Levers(**levers))

    assert predict(700.0).bytes == 300.0 + 400.0
    assert predict(1000.0, reference=True).bytes == 2 * 300.0 + 400.0
    assert predict(1400.0, values=True).bytes == 2 * (300.0 + 400.0)
    assert [predict(room, values=True).fits for room in (1399.0, 1400.0)] == [False, True]
    assert predict(1000.0, values=True, activations="chosen").kept.host_moments, "those of both models"
