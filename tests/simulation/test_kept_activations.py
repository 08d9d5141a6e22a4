"""What layers keep: counted independently, and compared with a search of all choices."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from relibra import cluster_preset, demo_demand
from relibra.errors import ConfigError
from relibra.integrations.megatron.recompute import recompute_flags
from relibra.planning.activation_choice import OPTIONS, ActivationChoice
from relibra.planning.plan import StepPlan
from relibra.simulation import Execution, memory_use, model_shape, simulate_step
from relibra.simulation.kept_activations import (
    choose_activations,
    choose_kept_activations,
    seconds_saved,
)


def random_step(seed, layers=None, micro_batches=None, ranks=None):
    """Return the arguments of a choice: layers that differ, a rank that may be idle, a response over the limit."""
    rng = np.random.default_rng(seed)
    L, M, R = layers or rng.integers(1, 9), micro_batches or rng.integers(1, 4), ranks or rng.integers(1, 5)
    tokens_MR = rng.integers(0, 100, (M, R)) * rng.integers(0, 2, (M, R))
    tokens_MR[rng.integers(M), rng.integers(R)] = 200
    token_slots_MLR = rng.integers(0, 800, (M, L, R))
    token_bytes_LX = np.sort(rng.integers(0, 50, (L, 3)), axis=1) * [0, 1, 1]
    token_slot_bytes_LX = rng.integers(1, 30, (L, 3)) * [0, 0, 1]
    seconds_LX = rng.random((L, 3)) * [0, 1, 2]
    of_tokens_LMR = token_bytes_LX[:, 2, None, None] * tokens_MR
    most = (of_tokens_LMR + token_slot_bytes_LX[:, 2, None, None] * token_slots_MLR.swapaxes(0, 1)).sum(0)
    free = rng.uniform(0.0, 1.2, (L + 1, 1, 1)) * most.max() if seed % 2 else rng.uniform(-0.1, 1.1) * most.max()
    return {
        "token_bytes_LX": token_bytes_LX, "token_slot_bytes_LX": token_slot_bytes_LX,
        "seconds_LX": seconds_LX, "tokens_MR": tokens_MR, "token_slots_MLR": token_slots_MLR, "free": free,
    }  # fmt: skip


def overflow(step, option_L):
    """Return the most bytes beyond what is free: counted place by place, layer by layer."""
    L, tokens_MR = len(option_L), step["tokens_MR"]
    free_LMR = np.broadcast_to(step["free"], (L + 1, *tokens_MR.shape))
    worst = 0.0
    for (m, r), tokens in np.ndenumerate(tokens_MR):
        for running in range(L + 1):
            kept = 0.0
            for layer in range(running):
                o = OPTIONS.index(option_L[layer])
                kept += step["token_bytes_LX"][layer, o] * tokens
                kept += step["token_slot_bytes_LX"][layer, o] * step["token_slots_MLR"][m, layer, r]
            worst = max(worst, kept - free_LMR[running, m, r] if kept else 0.0)
    return worst


def test_no_choice_takes_more_than_is_free():
    for seed in range(1000):
        step = random_step(seed)
        found = choose_activations(**step)
        for one in (found, found.runner_up):
            assert one is None or overflow(step, one.option_L) <= 1e-6
        assert found.seconds >= (found.runner_up.seconds if found.runner_up else 0.0)


def test_a_full_search_of_four_layers_saves_one_option_more():
    exact = 0
    for seed in range(40):
        step = random_step(seed, layers=4, micro_batches=1, ranks=1)
        step["free"] = float(np.max(step["free"]))
        seconds_LX = step["seconds_LX"]
        best = max(
            sum(seconds_LX[layer, OPTIONS.index(name)] for layer, name in enumerate(names))
            for names in product(OPTIONS, repeat=4)
            if overflow(step, names) <= 0
        )
        found = choose_activations(**step)
        assert found.seconds >= best - seconds_LX.max() - 1e-12
        exact += found.seconds == pytest.approx(best)
    assert exact >= 25


def test_equal_layers_are_kept_from_the_last_one_on():
    step = random_step(0, layers=4, micro_batches=1, ranks=1) | {
        "token_bytes_LX": np.array([[0, 1, 10]] * 4), "token_slot_bytes_LX": np.zeros((4, 3)),
        "seconds_LX": np.array([[0.0, 0.1, 3.0]] * 4),
    }  # fmt: skip
    found = choose_activations(**step | {"free": 10.0 * 2 * step["tokens_MR"].max()})
    assert found.option_L == ("recompute", "recompute", "all", "all")
    assert (found.nbytes, found.seconds) == (20.0 * step["tokens_MR"].max(), 6.0)
    assert found.layers == {"recompute": 2, "all": 2}
    assert found.runner_up.layers == {"attention": 4}
    nothing = choose_activations(**step | {"free": -1.0})
    assert (nothing.layers, nothing.nbytes, nothing.runner_up) == ({"recompute": 4}, 0.0, None)


def test_seconds_are_those_of_one_more_forward_pass():
    cluster, model = cluster_preset("h100x8"), replace(model_shape("qwen3-30b-a3b"), moe_layers=2, top_k=4)
    demand = demo_demand(8, num_experts=model.experts)
    plan = StepPlan.static(demand, cluster.topology)
    num_moe = len(demand.layer_ids)
    seconds_LX = seconds_saved(plan, demand, cluster, model, num_moe + 1)
    assert (seconds_LX[:num_moe, 2] > seconds_LX[:num_moe, 1]).all()
    assert (seconds_LX[:num_moe, 1] > 0).all()
    assert seconds_LX[num_moe, :2].tolist() == [0, 0]  # dense: without experts the two are one
    step = simulate_step(plan, demand, cluster, model)
    again = simulate_step(plan, demand, cluster, model, Execution(recompute_activations=True))
    whole = seconds_LX[:num_moe, 2].sum()
    assert whole == pytest.approx(again.seconds - step.seconds, rel=0.2)


def test_a_plan_and_sizes_say_what_layers_keep():
    model = replace(model_shape("qwen3-30b-a3b"), moe_layers=6, experts=16, top_k=4)
    cluster, demand = cluster_preset("h100x8", 4), demo_demand(num_ranks=4, num_layers=6, num_experts=16)
    plan = StepPlan.static(demand, cluster.topology)
    choices = [choose_kept_activations(plan, demand, cluster, model, free) for free in (0.0, 2.0**60)]
    assert [one.layers for one in choices] == [{"recompute": 6}, {"all": 6}]
    most = choices[1].nbytes
    half = choose_kept_activations(plan, demand, cluster, model, most / 2)
    assert 0.3 * most < half.nbytes <= most / 2
    tokens_MR = np.zeros((len(demand.tokens_MLRE), 4))
    np.add.at(tokens_MR, (demand.micro_batch_S, demand.rank_S), demand.counts_SLE[:, 0].sum(axis=1) / 4)
    whole, again = (
        memory_use(plan, demand, cluster, model, Execution(recompute_activations=of)).parts["activations"]
        for of in (False, True)
    )
    inputs = 6 * model.expert.row_bytes * tokens_MR.max()
    assert most == pytest.approx(whole - inputs, rel=1e-6)
    assert again < whole


@pytest.mark.parametrize(
    ("options", "stages", "flags"),
    [
        (["all"] * 4, 1, ""),
        (["attention", "attention", "all", "all"], 1, "--recompute-granularity selective --recompute-modules moe"),
        (["recompute"] * 3 + ["all"], 1, "full 3"),
        (["recompute", "attention", "all", "all"], 2, "full 2"),
        (["recompute", "all", "recompute", "all"], 2, "full 1"),
    ],
)
def test_flags_of_megatron_keep_no_more(options, stages, flags):
    choice = ActivationChoice(option_L=tuple(options), nbytes=0.0, seconds=0.0)
    found = " ".join(recompute_flags(choice, stages))
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers"
    assert found == flags.replace("full", block)


def test_stages_divide_the_layers():
    with pytest.raises(ConfigError, match="divides"):
        recompute_flags(ActivationChoice(option_L=("all",) * 3, nbytes=0.0, seconds=0.0), 2)
