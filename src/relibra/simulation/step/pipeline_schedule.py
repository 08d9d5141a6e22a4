"""Pipeline schedule: start of each micro-batch in each stage under one forward one backward (1F1B), on an event heap.

Each stage runs its tasks in a fixed order and one at a time; a task starts when its input has arrived from the
neighbouring stage. One stage is the simple case: forward, backward, forward, backward, ...
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

FORWARD, BACKWARD = 0, 1


class PipelineTask(NamedTuple):
    """One pass of one micro-batch through one stage."""

    direction: int
    micro_batch: int


def stage_tasks(
    stage: int, num_stages: int, num_micro_batches: int, *, forward_only: bool = False
) -> list[PipelineTask]:
    """Return the tasks of a stage in the order of 1F1B (PipeDream-Flush, arXiv 2006.09503).

    A stage runs as many forward passes ahead as there are stages behind it, then one backward and one forward in turn.

    >>> [("FB"[task.direction], task.micro_batch) for task in stage_tasks(0, 2, 3)]
    [('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2)]
    """
    if forward_only:
        return [PipelineTask(FORWARD, m) for m in range(num_micro_batches)]
    ahead = min(num_stages - 1 - stage, num_micro_batches)
    tasks = [PipelineTask(FORWARD, m) for m in range(ahead)]
    for m in range(ahead, num_micro_batches):
        tasks += [PipelineTask(FORWARD, m), PipelineTask(BACKWARD, m - ahead)]
    return tasks + [PipelineTask(BACKWARD, m) for m in range(num_micro_batches - ahead, num_micro_batches)]


def run_schedule(
    seconds_2DM: Float64[ndarray, "2 D M"], handover_M: Float64[ndarray, " M"], *, forward_only: bool = False
) -> tuple[Float64[ndarray, "2 D M"], float]:
    """Return when each task starts, and when the last one ends.

    seconds_2DM   [forward or backward, stage, micro-batch]
    handover_M    from the end of a task to the arrival of its output at the next stage; no rank is busy with it

    Events on the heap are ends of tasks, (time, stage, micro-batch, direction): ties have one order.
    """
    _, D, M = seconds_2DM.shape
    tasks_D = [stage_tasks(s, D, M, forward_only=forward_only) for s in range(D)]
    start_2DM, end_2DM = np.full(seconds_2DM.shape, np.nan), np.full(seconds_2DM.shape, np.nan)
    next_D, free_D = [0] * D, [0.0] * D
    heap: list[tuple[float, int, int, int]] = []

    def arrival(stage: int, task: PipelineTask) -> float:
        """Return when the input of a task arrives; NaN: not known yet."""
        direction, m = task
        before = stage - 1 if direction == FORWARD else stage + 1
        if direction == FORWARD and stage == 0:
            return 0.0
        if direction == BACKWARD and stage == D - 1:
            return float(end_2DM[FORWARD, stage, m])
        return float(end_2DM[direction, before, m] + handover_M[m])

    def start_next(stage: int) -> None:
        if next_D[stage] == len(tasks_D[stage]):
            return
        task = tasks_D[stage][next_D[stage]]
        ready = arrival(stage, task)
        if np.isnan(ready):
            return
        next_D[stage] += 1
        begin = max(ready, free_D[stage])
        start_2DM[task.direction, stage, task.micro_batch] = begin
        free_D[stage] = float(begin + seconds_2DM[task.direction, stage, task.micro_batch])
        heapq.heappush(heap, (free_D[stage], stage, task.micro_batch, task.direction))

    running = [False] * D
    end = 0.0
    for stage in range(D):
        start_next(stage)
        running[stage] = next_D[stage] > 0
    while heap:
        end, stage, m, direction = heapq.heappop(heap)
        end_2DM[direction, stage, m] = end
        running[stage] = False
        for other in (stage - 1, stage, stage + 1):
            if 0 <= other < D and not running[other]:
                before = next_D[other]
                start_next(other)
                running[other] = next_D[other] > before
    assert all(done == len(tasks) for done, tasks in zip(next_D, tasks_D, strict=True)), "the schedule has no deadlock"
    return start_2DM, end
