"""Events of layers: attention, dispatch, experts, combine, for several micro-batches on serial nodes and NICs.

Every node works on (layer, micro-batch) in the same order, so each event depends on earlier ones of that order only,
and one pass over it gives all times; a test holds it against a queue of events.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from relibra.routing.compiled import compiled


class Work(NamedTuple):
    """Seconds of the layers of a step; X: attention nodes, Y: expert nodes.

    attention_LMX                    computing attention
    experts_LMXY                     computing the rows of each sender, or [L, M, 1, Y] where all are computed at once
    send_LMXY, receive_LMXY          a NIC's time for the message of a pair, on the side of attention and of experts
    give_LMXY, take_LMXY             the same on the way back: sent by experts, received by attention
    late_LMXY, back_late_LMXY        from the NIC until the rows can be used: latency, jitter, tails
    """

    attention_LMX: Float64[ndarray, "L M X"]
    experts_LMXY: Float64[ndarray, "L M Z Y"]
    send_LMXY: Float64[ndarray, "L M X Y"]
    receive_LMXY: Float64[ndarray, "L M X Y"]
    give_LMXY: Float64[ndarray, "L M X Y"]
    take_LMXY: Float64[ndarray, "L M X Y"]
    late_LMXY: Float64[ndarray, "L M X Y"]
    back_late_LMXY: Float64[ndarray, "L M X Y"]


class Clocks(NamedTuple):
    """Times in seconds until which nodes and NICs are busy, or work waits; `run_layers` changes them in place.

    attention_X, send_X, take_X      computing of an attention node, its NIC outwards and inwards
    experts_Y, give_Y, receive_Y     likewise of an expert node; the arrays of attention where the same GPUs do both
    ready_MX                         when a micro-batch may begin its next layer
    acked_ZX                         when all have acknowledged each of the last Z dispatches, a ring; Z = 0: no limit
    """

    attention_X: Float64[ndarray, " X"]
    send_X: Float64[ndarray, " X"]
    take_X: Float64[ndarray, " X"]
    experts_Y: Float64[ndarray, " Y"]
    give_Y: Float64[ndarray, " Y"]
    receive_Y: Float64[ndarray, " Y"]
    ready_MX: Float64[ndarray, "M X"]
    acked_ZX: Float64[ndarray, "Z X"]


class Events(NamedTuple):
    """What happened, in seconds since the simulation began.

    attention_LMX, experts_LMY    when computing began
    arrived_LMY                   when the rows of all senders had arrived
    returned_LMX                  when the rows of all experts were back
    stalled_X                     seconds that a sender waited for acknowledgements
    """

    attention_LMX: Float64[ndarray, "L M X"]
    experts_LMY: Float64[ndarray, "L M Y"]
    arrived_LMY: Float64[ndarray, "L M Y"]
    returned_LMX: Float64[ndarray, "L M X"]
    stalled_X: Float64[ndarray, " X"]


def new_clocks(micro_batches: int, senders: int, experts: int, *, window: int = 0, shared: bool = False) -> Clocks:
    """Return clocks at 0.

    window    dispatches of a sender that may wait for acknowledgement; 0: any number
    shared    the same GPUs and NICs do both, as in colocated expert parallelism
    """
    attention_X, send_X, take_X = np.zeros(senders), np.zeros(senders), np.zeros(senders)
    return Clocks(
        attention_X=attention_X,
        send_X=send_X,
        take_X=take_X,
        experts_Y=attention_X if shared else np.zeros(experts),
        give_Y=send_X if shared else np.zeros(experts),
        receive_Y=take_X if shared else np.zeros(experts),
        ready_MX=np.zeros((micro_batches, senders)),
        acked_ZX=np.zeros((window, senders)),
    )


def sending_order(senders: int, receivers: int, server: int = 1) -> Int64[ndarray, "X Y"]:
    """Return the order in which each sender sends to the receivers; senders begin with different ones if possible.

    server    nodes of a server, on both sides; a sender goes through the servers in turn, its own first
    """
    if server > 1:
        node = np.arange(senders)
        step, lane = np.divmod(np.arange(receivers), server)
        at_server = (node[:, None] // server + step) % (receivers // server)
        return at_server * server + (node[:, None] + lane) % server
    return (np.arange(senders)[:, None] * receivers // senders + np.arange(receivers)) % receivers


def run_layers(
    work: Work,
    clocks: Clocks,
    order_XY: Int64[ndarray, "X Y"],
    back_YX: Int64[ndarray, "Y X"],
    *,
    partial: bool = False,
    ack_priority: bool = True,
) -> Events:
    """Run the layers of one step from where the clocks stand, and advance them.

    order_XY, back_YX   the order in which a node sends to the others (`sending_order`), there and back
    partial             experts begin once the rows of one sender are there; `experts_LMXY` then has seconds by sender
    ack_priority        acknowledgements overtake rows in the NIC of an expert node
    """
    L, M, X = work.attention_LMX.shape
    Y = work.send_LMXY.shape[3]
    events = Events(
        np.zeros((L, M, X)), np.zeros((L, M, Y)), np.zeros((L, M, Y)), np.zeros((L, M, X)), np.zeros(X)
    )  # fmt: skip
    arrive_MXY = np.zeros((M, X, Y))
    shared = clocks.experts_Y is clocks.attention_X
    work = Work(*(np.ascontiguousarray(item) for item in work))  # one layout: the kernel is compiled once
    _run(work, clocks, events, arrive_MXY, order_XY, back_YX, partial, ack_priority, shared)
    return events


@compiled
@no_type_check
def _run(work, clocks, events, arrive_MXY, order_XY, back_YX, partial, ack_priority, shared) -> None:
    L, M, _ = work.attention_LMX.shape
    for layer in range(L):
        if shared:  # GPUs compute attention of all micro-batches before experts of the first
            for m in range(M):
                _attend(layer, m, work, clocks, events, arrive_MXY, order_XY, ack_priority)
            for m in range(M):
                _expert(layer, m, work, clocks, events, arrive_MXY, back_YX, partial)
        else:
            for m in range(M):
                _attend(layer, m, work, clocks, events, arrive_MXY, order_XY, ack_priority)
                _expert(layer, m, work, clocks, events, arrive_MXY, back_YX, partial)


@compiled
@no_type_check
def _order(times_X) -> ndarray:
    """Return positions in the order of their times, ties by position, by insertion: times are nearly in order."""
    order_X = np.arange(len(times_X))
    for end in range(1, len(times_X)):
        moved, at = order_X[end], end
        while at > 0 and times_X[order_X[at - 1]] > times_X[moved]:
            order_X[at] = order_X[at - 1]
            at -= 1
        order_X[at] = moved
    return order_X


@compiled
@no_type_check
def _attend(layer, m, work, clocks, events, arrive_MXY, order_XY, ack_priority) -> None:
    """Compute attention of a micro-batch on all nodes and send its rows; receivers take them in order of sending."""
    _, M, X = work.attention_LMX.shape
    Y = work.send_LMXY.shape[3]
    window = clocks.acked_ZX.shape[0]
    number = layer * M + m
    start_XY, end_XY = np.empty((X, Y)), np.empty((X, Y))
    for x in range(X):
        start = max(clocks.ready_MX[m, x], clocks.attention_X[x])
        events.attention_LMX[layer, m, x] = start
        done = start + work.attention_LMX[layer, m, x]
        clocks.attention_X[x] = done
        time = max(done, clocks.send_X[x])
        if window > 0:
            free = clocks.acked_ZX[number % window, x]
            if free > time:
                events.stalled_X[x] += free - time
                time = free
        for y in order_XY[x]:
            start_XY[x, y] = time
            time += work.send_LMXY[layer, m, x, y]
            end_XY[x, y] = time
        clocks.send_X[x] = time
        if window > 0:
            clocks.acked_ZX[number % window, x] = 0.0
    for y in range(Y):
        last = 0.0
        for x in _order(start_XY[:, y]):
            taken = max(start_XY[x, y], clocks.receive_Y[y]) + work.receive_LMXY[layer, m, x, y]
            taken = max(taken, end_XY[x, y])
            clocks.receive_Y[y] = taken
            arrived = taken + work.late_LMXY[layer, m, x, y]
            arrive_MXY[m, x, y] = arrived
            last = max(last, arrived)
            if window > 0:
                behind = 0.0 if ack_priority else max(0.0, clocks.give_Y[y] - arrived)
                acked = arrived + behind + work.late_LMXY[layer, m, x, y]
                clocks.acked_ZX[number % window, x] = max(clocks.acked_ZX[number % window, x], acked)
        events.arrived_LMY[layer, m, y] = last


@compiled
@no_type_check
def _expert(layer, m, work, clocks, events, arrive_MXY, back_YX, partial) -> None:
    """Compute the experts of a micro-batch on all nodes and send rows back, by `back_YX` or, if partial, by arrival."""
    _, _, X = work.attention_LMX.shape
    Y = work.send_LMXY.shape[3]
    start_XY, end_XY = np.empty((X, Y)), np.empty((X, Y))
    for y in range(Y):
        order_X = back_YX[y]
        if partial:
            order_X = _order(arrive_MXY[m, :, y])
        time = clocks.experts_Y[y]
        sending = clocks.give_Y[y]
        if not partial:
            time = max(time, events.arrived_LMY[layer, m, y])
            events.experts_LMY[layer, m, y] = time
            time += work.experts_LMXY[layer, m, 0, y]
        for number in range(X):
            x = order_X[number]
            if partial:
                time = max(time, arrive_MXY[m, x, y])
                if number == 0:
                    events.experts_LMY[layer, m, y] = time
                time += work.experts_LMXY[layer, m, x, y]
            start_XY[x, y] = max(time, sending)
            sending = start_XY[x, y] + work.give_LMXY[layer, m, x, y]
            end_XY[x, y] = sending
        clocks.experts_Y[y] = time
        clocks.give_Y[y] = sending
    for x in range(X):
        last = 0.0
        for y in _order(start_XY[x]):
            taken = max(start_XY[x, y], clocks.take_X[x]) + work.take_LMXY[layer, m, x, y]
            taken = max(taken, end_XY[x, y])
            clocks.take_X[x] = taken
            last = max(last, taken + work.back_late_LMXY[layer, m, x, y])
        events.returned_LMX[layer, m, x] = last
        clocks.ready_MX[m, x] = last
