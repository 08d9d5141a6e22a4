"""Pipeline schedules: when each micro-batch passes each part of the model, as events with known seconds.

A micro-batch passes parts 0 .. J - 1 in order. Under one forward one backward (1F1B) part s < D is the forward pass of
stage s and part 2 D - 1 - s its backward pass; with round-robin stages (RoundPipe, arXiv 2604.27085) devices are a
pool, and each part of a round goes to the next device. A device runs its tasks in a fixed order, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray


class PipelineTask(NamedTuple):
    """One micro-batch in one part of the model."""

    part: int
    micro_batch: int


def stage_tasks(
    stage: int, num_stages: int, num_micro_batches: int, *, forward_only: bool = False
) -> list[PipelineTask]:
    """Return the tasks of a stage in the order of 1F1B (PipeDream-Flush, arXiv 2006.09503).

    A stage runs as many forward passes ahead as there are stages behind it, then one forward and one backward in turn.

    >>> [tuple(task) for task in stage_tasks(0, 2, 3)]
    [(0, 0), (0, 1), (3, 0), (0, 2), (3, 1), (3, 2)]
    """
    back = 2 * num_stages - 1 - stage
    if forward_only:
        return [PipelineTask(stage, m) for m in range(num_micro_batches)]
    ahead = min(num_stages - 1 - stage, num_micro_batches)
    tasks = [PipelineTask(stage, m) for m in range(ahead)]
    for m in range(ahead, num_micro_batches):
        tasks += [PipelineTask(stage, m), PipelineTask(back, m - ahead)]
    return tasks + [PipelineTask(back, m) for m in range(num_micro_batches - ahead, num_micro_batches)]


def round_tasks(num_parts: int, num_devices: int, round_M: Int64[ndarray, " M"]) -> list[list[PipelineTask]]:
    """Return the tasks of each device with round-robin stages: a part takes all micro-batches of its round in turn.

    A round begins at the device behind the one at which the round before ended.

    round_M   round of each micro-batch, ascending from 0

    >>> [[tuple(task) for task in tasks] for tasks in round_tasks(3, 2, np.array([0, 0]))]
    [[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (1, 1)]]
    """
    tasks_D: list[list[PipelineTask]] = [[] for _ in range(num_devices)]
    for turn in range(num_parts * (1 + int(round_M.max(initial=-1)))):
        number, part = divmod(turn, num_parts)
        tasks_D[turn % num_devices] += [PipelineTask(part, m) for m in np.flatnonzero(round_M == number).tolist()]
    return tasks_D


def run_tasks(
    tasks_D: Sequence[Sequence[PipelineTask]],
    seconds_YXM: Float64[ndarray, "Y X M"],
    handover_XM: Float64[ndarray, "X M"],
    fetch_X: Float64[ndarray, " X"] | None = None,
) -> Float64[ndarray, "Y X M"]:
    """Return when each task starts: its device is free, its input has come, and its weights are fetched.

    seconds_YXM   of each part and micro-batch, for Y settings that share the order of tasks
    handover_XM   from the end of the part before to the arrival of its output; no device is busy with it
    fetch_X       seconds in which a device gets the weights of a part: from the start of the part that it runs before,
                  since the second buffer is free by then. None: weights stay
    """
    start_YXM, end_MY = np.zeros_like(seconds_YXM), np.zeros((seconds_YXM.shape[2], len(seconds_YXM)))
    free_DY = np.zeros((len(tasks_D), len(seconds_YXM)))
    begun_DY = np.zeros_like(free_DY)
    passed_M, next_D, held_D = [0] * len(end_MY), [0] * len(tasks_D), [-1] * len(tasks_D)
    advances = True
    while advances:
        advances = False
        for d, tasks in enumerate(tasks_D):
            while next_D[d] < len(tasks) and passed_M[tasks[next_D[d]].micro_batch] == tasks[next_D[d]].part:
                part, m = tasks[next_D[d]]
                start_Y = np.maximum(free_DY[d], end_MY[m] + handover_XM[part, m])
                if fetch_X is not None and held_D[d] != part:
                    start_Y = np.maximum(start_Y, begun_DY[d] + fetch_X[part])
                    held_D[d], begun_DY[d] = part, start_Y
                start_YXM[:, part, m] = start_Y
                free_DY[d] = end_MY[m] = start_Y + seconds_YXM[:, part, m]
                passed_M[m], next_D[d], advances = part + 1, next_D[d] + 1, True
    assert all(n == len(tasks) for n, tasks in zip(next_D, tasks_D, strict=True)), "the schedule has no deadlock"
    return start_YXM
