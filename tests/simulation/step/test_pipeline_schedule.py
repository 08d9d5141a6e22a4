import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.simulation.step.pipeline_schedule import BACKWARD, FORWARD, PipelineTask, run_schedule, stage_tasks


@given(st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_every_stage_runs_every_pass_once_and_forward_first(stages, micro_batches, forward_only):
    for stage in range(stages):
        tasks = stage_tasks(stage, stages, micro_batches, forward_only=forward_only)
        directions = (FORWARD,) if forward_only else (FORWARD, BACKWARD)
        assert sorted(tasks) == sorted(PipelineTask(d, m) for d in directions for m in range(micro_batches))
        in_flight = 0
        for direction, m in tasks:
            in_flight += 1 if direction == FORWARD else -1
            assert forward_only or in_flight <= stages - stage
            assert direction == FORWARD or tasks.index(PipelineTask(FORWARD, m)) < tasks.index(
                PipelineTask(BACKWARD, m)
            )


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_no_task_overlaps_another_or_comes_before_its_input(seed):
    rng = np.random.default_rng(seed)
    D, M = int(rng.integers(1, 5)), int(rng.integers(1, 6))
    seconds_2DM, handover_M = rng.integers(0, 5, (2, D, M)).astype(float), rng.integers(0, 3, M).astype(float)
    start_2DM, end = run_schedule(seconds_2DM, handover_M)
    end_2DM = start_2DM + seconds_2DM
    assert end == end_2DM.max()
    for stage in range(D):
        clock = 0.0
        for direction, m in stage_tasks(stage, D, M):
            needs = [clock]
            if direction == FORWARD and stage:
                needs.append(end_2DM[FORWARD, stage - 1, m] + handover_M[m])
            if direction == BACKWARD:
                needs.append(end_2DM[FORWARD, stage, m])
                if stage < D - 1:
                    needs.append(end_2DM[BACKWARD, stage + 1, m] + handover_M[m])
            assert start_2DM[direction, stage, m] == max(needs)  # and not a moment later
            clock = end_2DM[direction, stage, m]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (4, 4), (4, 8), (8, 32)])
def test_even_stages_have_the_bubble_of_the_books(stages, micro_batches):
    seconds_2DM = np.ones((2, stages, micro_batches)) * np.array([1.0, 2.0])[:, None, None]
    _, end = run_schedule(seconds_2DM, np.zeros(micro_batches))
    assert end == 3 * (micro_batches + stages - 1)


def test_forward_passes_alone_flow_through():
    _, end = run_schedule(np.ones((2, 3, 4)), np.zeros(4), forward_only=True)
    assert end == 3 + 4 - 1
