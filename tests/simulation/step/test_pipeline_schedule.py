import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.simulation.step.pipeline_schedule import PipelineTask, round_tasks, run_tasks, stage_tasks


def run_1f1b(seconds_XM, handover_M, *, forward_only=False):
    """Return starts and end of stages whose parts are forward 0 .. D - 1 and backward D - 1 .. 0."""
    D = len(seconds_XM) // (1 if forward_only else 2)
    tasks_D = [stage_tasks(s, D, len(handover_M), forward_only=forward_only) for s in range(D)]
    handover_XM = np.tile(handover_M, (len(seconds_XM), 1))
    handover_XM[[0, D % len(handover_XM)]] = 0
    (start_XM,) = run_tasks(tasks_D, seconds_XM[None], handover_XM)
    return start_XM, (start_XM + seconds_XM).max(initial=0.0)


@given(st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_every_stage_runs_every_pass_once_and_forward_first(stages, micro_batches, forward_only):
    for stage in range(stages):
        tasks = stage_tasks(stage, stages, micro_batches, forward_only=forward_only)
        parts = (stage,) if forward_only else (stage, 2 * stages - 1 - stage)
        assert sorted(tasks) == sorted(PipelineTask(part, m) for part in parts for m in range(micro_batches))
        in_flight = 0
        for part, m in tasks:
            in_flight += 1 if part < stages else -1
            assert forward_only or in_flight <= stages - stage
            assert part < stages or tasks.index(PipelineTask(stage, m)) < tasks.index(PipelineTask(part, m))


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_no_task_overlaps_another_or_comes_before_its_input(seed):
    rng = np.random.default_rng(seed)
    D, M = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    seconds_XM, handover_M = rng.integers(0, 5, (2 * D, M)).astype(float), rng.integers(0, 3, M).astype(float)
    start_XM, end = run_1f1b(seconds_XM, handover_M)
    end_XM = start_XM + seconds_XM
    assert end == end_XM.max()
    for stage in range(D):
        clock = 0.0
        for part, m in stage_tasks(stage, D, M):
            before = end_XM[part - 1, m] + (0 if part == D else handover_M[m]) if part else 0.0
            assert start_XM[part, m] == max(clock, before)  # and not a moment later
            clock = end_XM[part, m]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (4, 4), (4, 8), (8, 32)])
def test_even_stages_have_the_bubble_of_the_books(stages, micro_batches):
    seconds_XM = np.repeat([[1.0], [2.0]], stages, axis=0) * np.ones(micro_batches)
    _, end = run_1f1b(seconds_XM, np.zeros(micro_batches))
    assert end == 3 * (micro_batches + stages - 1)


def test_forward_passes_alone_flow_through():
    _, end = run_1f1b(np.ones((3, 4)), np.zeros(4), forward_only=True)
    assert end == 3 + 4 - 1


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_round_robin_parts_go_to_the_next_device(parts, devices, rounds, seed):
    rng = np.random.default_rng(seed)
    round_M = np.repeat(np.arange(rounds), rng.integers(1, 4, rounds))
    tasks_D = round_tasks(parts, devices, round_M)
    device_of = {task: d for d, tasks in enumerate(tasks_D) for task in tasks}
    assert sorted(task for tasks in tasks_D for task in tasks) == [
        (x, m) for x in range(parts) for m in range(len(round_M))
    ]
    turn = 0
    for number in range(rounds):
        for part in range(parts):
            assert {device_of[part, m] for m in np.flatnonzero(round_M == number)} == {turn % devices}
            turn += 1
    seconds_XM, handover_XM = rng.integers(0, 5, (2, parts, len(round_M))).astype(float)
    fetch_X = rng.integers(0, 9, parts).astype(float)
    (start_XM,) = run_tasks(tasks_D, seconds_XM[None], handover_XM, fetch_X)
    for tasks in tasks_D:
        clock = begun = 0.0
        held = -1
        for part, m in tasks:
            ready = (
                handover_XM[0, m]
                if part == 0
                else start_XM[part - 1, m] + seconds_XM[part - 1, m] + handover_XM[part, m]
            )
            fetched = 0.0 if part == held else begun + fetch_X[part]
            assert start_XM[part, m] == max(clock, ready, fetched)
            if part != held:
                held, begun = part, start_XM[part, m]
            clock = start_XM[part, m] + seconds_XM[part, m]


@pytest.mark.parametrize(("parts", "devices", "micro_batches"), [(9, 4, 16), (7, 3, 12), (1, 1, 5), (8, 4, 4)])
def test_equal_parts_have_the_bubble_of_round_pipe(parts, devices, micro_batches):
    round_M = np.arange(micro_batches) // devices
    seconds_XM = np.ones((parts, micro_batches))
    (start_XM,) = run_tasks(round_tasks(parts, devices, round_M), seconds_XM[None], 0 * seconds_XM)
    end = (micro_batches * parts + devices * (devices - 1)) / devices
    assert start_XM.max() + 1 == pytest.approx(end)
