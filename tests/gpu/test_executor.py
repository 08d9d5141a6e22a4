"""The executor on two ranks that are threads with one GPU, or, to prove these tests, with a CPU.

Without a GPU the GPU's half is skipped, with the reason; on a machine with one, `pytest tests/gpu` runs all of it.
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.gpu.steps_in_threads import live_step, on_threads, step_without_reading_back, train
from tests.parallel import ranks_at_work
from tests.parallel.against_dense import assert_equals_dense, assert_same_bits, relative_error, rounded
from tests.parallel.ranks_at_work import dense_step
from tests.parallel.steps import on_nodes, resident_step, step
from tests.parallel.test_dispatch_modes import OF_FOUR
from tests.parallel.trainings import moved, plans_of, train_dense
from tests.spawned_ranks import run_spawned

HAS_GPU = torch.cuda.is_available()
ON_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA device"))
DEVICES = ("cpu", ON_GPU)
SLOWLY = (pytest.param("cpu", marks=pytest.mark.slow), ON_GPU)
"""On a CPU the processes of tests/parallel run these cases too, in every change."""

FEW_LASTS = (90, 81, 88, 79)
"""Lengths for which the last tokens of samples are so few that they travel with the planned rows."""


def of_two_nodes(**settings):
    """Return a case of four ranks whose tokens cross between two nodes once."""
    return on_nodes(step(4, lengths=range(5, 13), schedule=OF_FOUR, slots=2, **settings), 2, "hierarchical")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def residents(**settings):
    return resident_step(1, 2, slots=2, **settings)


@pytest.mark.parametrize("device", DEVICES)
def test_every_kind_of_step_equals_the_dense_model(device):
    cases = {
        "shared slots": step(unrouted_last=True, ahead=True, device=device),
        "resident slots": residents(device=device),
        "canonical": step(sums="canonical", device=device),
    }
    for case in cases.values():
        assert (case.plan.quota_MLRB > 0).any()
        assert_equals_dense(case, on_threads(case))
    live = on_threads(step(device=device), live_step)
    assert_equals_dense(step(device=device), live)
    assert live[0]["copies"] > 0
    assert live[0]["skew"] == live[1]["skew"]


@pytest.mark.slow
@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (step, {"checkpointing": True}),
        (step, {"in_flight": True}),
        (step, {"in_flight": True, "checkpointing": True, "ahead": True}),
        (step, {"lengths": FEW_LASTS, "unrouted_last": True, "slots": 2}),
        (step, {"family": "gpt_oss", "unrouted_last": True}),
        (step, {"family": "deepseek_v3", "layer_ids": (1, 2), "top_k": 3, "checkpointing": True}),
        (step, {"sums": "canonical", "checkpointing": True, "unrouted_last": True}),
        (residents, {"checkpointing": True}),
        (residents, {"in_flight": True}),
        (residents, {"sums": "canonical"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else ", ".join(value),
)
def test_planned_steps_equal_the_dense_model(device, make, settings):
    case = make(device=device, **settings)
    assert_equals_dense(case, on_threads(case))


@pytest.mark.slow
@pytest.mark.parametrize("device", SLOWLY)
def test_steps_with_relays_equal_the_dense_model(device):
    """On a CPU bit by bit as with flat dispatch; a GPU adds rows of one sum in no fixed order."""
    for case in (of_two_nodes(device=device), of_two_nodes(device=device, checkpointing=True)):
        found = on_threads(case)
        assert_equals_dense(case, found)
        if device == "cpu":
            flat = replace(case, plan=replace(case.plan, dispatch="flat"))
            assert_same_bits(found, on_threads(flat), "relays")


@pytest.mark.slow
@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("settings", [{"checkpointing": True}, {"in_flight": True}, {"sums": "canonical"}], ids=str)
def test_live_steps_equal_the_dense_model(device, settings):
    case = step(unrouted_last=True, slots=2, device=device, **settings)
    assert_equals_dense(case, on_threads(case, live_step))


def _compiled_step(_rank, device):
    torch.set_num_threads(1)
    case = step(unrouted_last=True, wrap="compiled", device=device)
    assert_equals_dense(case, on_threads(case))


@pytest.mark.slow
@pytest.mark.parametrize("device", SLOWLY)
def test_a_compiled_model_follows_its_plan(device):
    """In a process of its own: the compiler cannot look into the shape checks that pytest puts around functions."""
    run_spawned(_compiled_step, (device,), 1, 200)


@pytest.mark.slow
@pytest.mark.parametrize("device", SLOWLY)
def test_narrow_types_are_as_exact_as_all_to_all(device):
    for settings in ({"dtype": "bfloat16"}, {"autocast": True}):
        case = step(slots=2, device=device, **settings)
        theirs = replace(case, follow_plan=False, implementation="all_to_all")
        with mock.patch.object(ranks_at_work, "tiny_model", rounded):
            exact = dense_step(replace(case, autocast=False))["gradients"]
        error = {
            "planned": relative_error(on_threads(case), exact),
            "live": relative_error(on_threads(case, live_step), exact),
            "canonical": relative_error(on_threads(replace(case, sums="canonical")), exact),
        }
        allowed = 1.5 * relative_error(on_threads(theirs), exact)
        assert max(error.values()) <= allowed < 0.15, (settings, error, allowed)


@pytest.mark.slow
@pytest.mark.parametrize("device", SLOWLY)
def test_experts_move_between_steps(device):
    case = step(slots=2)
    cases = [moved(case, seed) for seed in (1, 2)]
    trained = replace(case, device=device, num_steps=3, plans=plans_of(*cases))
    expected = train_dense(replace(trained, device="cpu"))
    results_R = on_threads(trained, train)
    np.testing.assert_allclose(
        np.sum([result["losses"] for result in results_R], axis=0), expected["losses"], rtol=1e-5
    )
    for result in results_R:
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("device", SLOWLY)
@pytest.mark.parametrize("sums", ["fast", "canonical"])
def test_deterministic_algorithms_repeat_a_step_bit_by_bit(device, sums, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    case = step(unrouted_last=True, sums=sums, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = on_threads(case), on_threads(case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equals_dense(case, first)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one["logits"], other["logits"], rtol=0, atol=0)
        torch.testing.assert_close(one["gradients"], other["gradients"], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_no_layer_of_a_planned_micro_batch_reads_back(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("before Hopper torch's own grouped product reads sizes back (docs/execution.md)")
    narrow = {"ahead": True, "dtype": "bfloat16", "device": device}
    # Two slots: called with one expert, transformers' grouped forward reads back (docs/execution.md).
    cases = [step(slots=2, **narrow), resident_step(1, 2, slots=2, **narrow)]
    cases.append(of_two_nodes(**narrow))
    if device == "cuda":  # a CPU leaves out the choices of live rows that are computed elsewhere, which it has to read
        cases.append(step(lengths=FEW_LASTS, unrouted_last=True, slots=2, **narrow))
    for case in cases:
        assert not any(found["ran_at_home"] for found in on_threads(case, step_without_reading_back))
