"""A queue of events: the slow reference of `run_layers` without windows and partial inputs."""

import heapq
from itertools import count

import numpy as np


class Network:
    """Nodes with one worker, one NIC outwards and one inwards each."""

    def __init__(self, number):
        self.free, self.out, self.into = [0.0] * number, [0.0] * number, [0.0] * number


def simulate(work, order_XY, back_YX):
    """Return when the rows of the last layer are back, [M, X], event by event in order of time."""
    L, M, X = work.attention_LMX.shape
    Y = work.send_LMXY.shape[3]
    left, right = Network(X), Network(Y)
    jobs = [(layer, m) for layer in range(L) for m in range(M)]
    at_left, at_right = [0] * X, [0] * Y
    ready_left = [{(0, m) for m in range(M)} for _ in range(X)]
    ready_right = [set() for _ in range(Y)]
    arrived, returned = {}, {}
    end_MX = np.zeros((M, X))
    heap, serial = [], count()

    def later(time, call, *arguments):
        heapq.heappush(heap, (time, next(serial), call, arguments))

    def try_left(now, x):
        if at_left[x] < len(jobs) and jobs[at_left[x]] in ready_left[x] and left.free[x] <= now:
            layer, m = jobs[at_left[x]]
            at_left[x] += 1
            left.free[x] = now + work.attention_LMX[layer, m, x]
            later(left.free[x], left_done, x, layer, m)

    def left_done(now, x, layer, m):
        for y in order_XY[x]:
            start = max(now, left.out[x])
            left.out[x] = start + work.send_LMXY[layer, m, x, y]
            later(start, take_right, x, y, layer, m, left.out[x])
        try_left(now, x)

    def take_right(now, x, y, layer, m, sent):
        right.into[y] = max(max(now, right.into[y]) + work.receive_LMXY[layer, m, x, y], sent)
        later(right.into[y] + work.late_LMXY[layer, m, x, y], arrive, y, layer, m)

    def arrive(now, y, layer, m):
        arrived[y, layer, m] = arrived.get((y, layer, m), 0) + 1
        if arrived[y, layer, m] == X:
            ready_right[y].add((layer, m))
            try_right(now, y)

    def try_right(now, y):
        if at_right[y] < len(jobs) and jobs[at_right[y]] in ready_right[y] and right.free[y] <= now:
            layer, m = jobs[at_right[y]]
            at_right[y] += 1
            right.free[y] = now + work.experts_LMXY[layer, m, 0, y]
            later(right.free[y], right_done, y, layer, m)

    def right_done(now, y, layer, m):
        for x in back_YX[y]:
            start = max(now, right.out[y])
            right.out[y] = start + work.give_LMXY[layer, m, x, y]
            later(start, take_left, x, y, layer, m, right.out[y])
        try_right(now, y)

    def take_left(now, x, y, layer, m, sent):
        left.into[x] = max(max(now, left.into[x]) + work.take_LMXY[layer, m, x, y], sent)
        later(left.into[x] + work.back_late_LMXY[layer, m, x, y], come_back, x, layer, m)

    def come_back(now, x, layer, m):
        returned[x, layer, m] = returned.get((x, layer, m), 0) + 1
        if returned[x, layer, m] == Y:
            end_MX[m, x] = now
            ready_left[x].add((layer + 1, m))
            try_left(now, x)

    for x in range(X):
        later(0.0, try_left, x)
    while heap:
        now, _, call, arguments = heapq.heappop(heap)
        call(now, *arguments)
    return end_MX
