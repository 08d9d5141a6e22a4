"""The slow and obvious simulator: every rank is a little program, and a heap says whose turn it is.

It shares the costs with the fast one and nothing else: meetings, waits and copies are what happens, not arrays.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class OnePass:
    """One forward or backward pass of one micro-batch through one stage.

    meetings   how many ranks have come, and when the last one did
    begun      copies (kind, layer) under way: when they began, and their costs
    gathered   when each rank had the dense weights of a layer
    copies     when the copies (kind, layer) were done; missing: not done yet
    rows       from when to when rows were on their way between ranks, or between nodes where these have their stage
    """

    def __init__(self, costs, m, *, backward, overlap, recompute=False):
        self.costs, self.m, self.overlap, self.backward, self.recompute = costs, m, overlap, backward, recompute
        self.L, self.R = len(costs.layer_ids), costs.attention_MR.shape[1]
        self.arrived, self.copies, self.sleepers, self.blocked = {}, {}, {}, {}
        self.begun, self.rows, self.heap, self.gathered = {}, [], [], {}
        self.replicas_done = {layer: [] for layer in range(self.L)}
        self.trace = []  # (rank, stage, layer, start, end)
        self.waited, self.end = [0.0] * self.R, [0.0] * self.R

    def run(self):
        self.programs = [(self.backward_program if self.backward else self.forward_program)(r) for r in range(self.R)]
        if self.overlap and not (self.backward and self.slots_are_full()) and (self.backward or not self.costs.live):
            self.begin_next_push(self.L if self.backward else -1, 0.0)
        for r in range(self.R):
            self.resume(r, 0.0)
        while self.heap:
            time, r, *copy = heapq.heappop(self.heap)
            if copy:
                self.look_at_copy(*copy, time)
            else:
                self.resume(r, time)
        return max(self.end)

    def resume(self, r, time):
        """Let a rank go on to its next step that takes time."""
        self.now = time
        try:
            step = next(self.programs[r]) if time == 0.0 and r not in self.sleepers else self.programs[r].send(time)
        except StopIteration:
            self.end[r] = time
            return
        self.sleepers[r] = time
        kind, *rest = step
        if kind == "until":
            heapq.heappush(self.heap, (rest[0], r))
        elif kind == "meet":
            key, seconds = rest
            self.arrived.setdefault(key, []).append((r, time))
            if len(self.arrived[key]) == self.R:
                last = max(t for _, t in self.arrived[key])
                if "together" not in key[0] and "inside nodes" not in key[0]:
                    self.rows.append((last, last + seconds))
                for other, t in self.arrived[key]:
                    self.waited[other] += last - t
                    heapq.heappush(self.heap, (last + seconds, other))
        else:
            assert kind == "copy"
            key = rest[0]
            if key in self.copies:
                heapq.heappush(self.heap, (max(time, self.copies[key]), r))
            else:
                self.blocked.setdefault(key, []).append((r, time))

    def begin_copy(self, kind, layer, copies, time):
        self.begun[kind, layer] = (time, copies)
        heapq.heappush(self.heap, (time + float(copies.seconds_ML[self.m, layer]), -1, kind, layer))

    def look_at_copy(self, kind, layer, time):
        """See whether copies are through: those between nodes have rested for as long as rows were on their way."""
        begun, copies = self.begun[kind, layer]
        network = float(copies.network_ML[self.m, layer])
        rested = sum(end - max(start, begun) for start, end in self.rows if end > begun and start < time * (1 - 1e-12))
        through = begun + network + rested
        if network and through > time * (1 + 1e-12):
            heapq.heappush(self.heap, (through, -1, kind, layer))
            return
        self.copies[kind, layer] = time
        for r, since in self.blocked.pop((kind, layer), []):
            heapq.heappush(self.heap, (max(since, time), r))
        if kind == "push" and self.costs.resident and (self.backward or not self.costs.live):
            self.begin_next_push(layer, time)
        if kind == "return" and not self.costs.resident and copies.takes_part_MLR[self.m, layer].any():
            self.begin_next_push(layer, time)

    def slots_are_full(self):
        """The replicas that came last in the forward pass are still there, until their gradients are home."""
        costs, m = self.costs, self.m
        used = [layer for layer in range(self.L) if costs.gradients.takes_part_MLR[m, layer].any()]
        return bool(used) and not costs.resident and not costs.push_again.takes_part_MLR[m, used[-1]].any()

    def begin_next_push(self, after, time):
        """Begin the push of the next layer with copies, in the direction of the pass."""
        copies = self.costs.push_again if self.backward else self.costs.push
        layers = range(after - 1, -1, -1) if self.backward else range(after + 1, self.L)
        for layer in layers:
            if copies.takes_part_MLR[self.m, layer].any():
                self.begin_copy("push", layer, copies, time)
                return

    def work(self, r, stage, layer, seconds) -> Iterator:
        start = self.now
        time = yield ("until", start + float(seconds))
        self.trace.append((r, stage, layer, start, time))

    def meet(self, r, key, seconds, stage) -> Iterator:
        start = self.now
        time = yield ("meet", key, float(seconds))
        self.trace.append((r, stage, key[1], start, time))

    def wait(self, r, kind, layer, copies) -> Iterator:
        if copies.takes_part_MLR[self.m, layer, r]:
            start = self.now
            time = yield ("copy", (kind, layer))
            self.trace.append((r, f"wait {kind}", layer, start, time))

    def wait_together(self, r, kind, layer, copies) -> Iterator:
        seconds = float(copies.seconds_ML[self.m, layer])
        if seconds:
            yield from self.meet(r, (f"{kind} together", layer), seconds, f"wait {kind}")

    def gather(self, r, layer) -> Iterator:
        """Wait for dense weights: under way since the last rank had those before, or from when all ranks ask."""
        seconds = self.costs.gather(layer, root=not self.backward)
        if not self.overlap:
            if seconds:
                yield from self.meet(r, ("gather together", layer), seconds, "gather")
            return
        before, begun = layer + 1 if self.backward else layer - 1, 0.0
        if 0 <= before < self.L:
            assert len(self.gathered[before]) == self.R
            begun = max(self.gathered[before])
        if begun + seconds > self.now:
            yield ("until", begun + seconds)
        self.gathered.setdefault(layer, []).append(self.now)

    def host(self, r, layer, seconds, name="") -> Iterator:
        yield from self.meet(r, (f"host together {name}", layer), seconds, "host")

    def dispatch(self, r, layer, name="") -> Iterator:
        for stage in self.costs.exchange.stages:
            key = (f"dispatch {stage.links} {name}", layer)
            yield from self.meet(r, key, stage.seconds_ML[self.m, layer], "dispatch")

    def combine(self, r, layer, name="") -> Iterator:
        for stage in self.costs.exchange.stages[::-1]:
            yield from self.meet(r, (f"combine {stage.links} {name}", layer), stage.back_ML[self.m, layer], "combine")

    def experts_forward(self, r, layer, push, name, *, decides=False) -> Iterator:
        costs, exchange, m = self.costs, self.costs.exchange, self.m
        yield from self.host(r, layer, costs.host_seconds + (costs.decision_seconds if decides else 0.0), name)
        if decides and self.overlap and ("push", layer) not in self.begun and push.takes_part_MLR[m, layer].any():
            self.begin_copy("push", layer, push, self.now)
        if not self.overlap:
            yield from self.wait_together(r, f"push {name}", layer, push)
        yield from self.dispatch(r, layer, name)
        yield from self.meet(r, (f"gates {name}", layer), exchange.gates_ML[m, layer], "dispatch")
        yield from self.work(r, "experts", layer, costs.home_MLR[m, layer, r])
        if self.overlap:
            yield from self.wait(r, "push", layer, push)
        yield from self.work(r, "experts", layer, costs.replica_MLR[m, layer, r])
        yield from self.combine(r, layer, name)

    def forward_program(self, r) -> Iterator:
        costs, m = self.costs, self.m
        for layer in range(self.L):
            yield from self.gather(r, layer)
            yield from self.work(r, "attention", layer, costs.before_MR(layer)[m, r])
            yield from self.experts_forward(r, layer, costs.push, "", decides=costs.live)
            if (
                r == 0
                and self.overlap
                and not costs.resident
                and not costs.live
                and costs.push.takes_part_MLR[m, layer].any()
            ):
                self.begin_next_push(layer, self.now)
        yield from self.work(r, "attention", -1, costs.last_MR[m, r])

    def backward_program(self, r) -> Iterator:
        costs, exchange, m = self.costs, self.costs.exchange, self.m
        yield from self.work(r, "attention", -1, 2 * costs.last_MR[m, r])
        for layer in reversed(range(self.L)):
            yield from self.gather(r, layer)
            if self.recompute:
                yield from self.work(r, "attention", layer, costs.before_MR(layer)[m, r])
                yield from self.experts_forward(r, layer, costs.push_again, "again")
            yield from self.host(r, layer, 2 * costs.host_seconds)
            if not self.recompute and not self.overlap:
                yield from self.wait_together(r, "push", layer, costs.push_again)
            yield from self.dispatch(r, layer)
            if not self.recompute and self.overlap:
                yield from self.wait(r, "push", layer, costs.push_again)
            yield from self.work(r, "experts", layer, 2 * costs.replica_MLR[m, layer, r])
            self.replicas_done[layer].append(self.now)
            if self.overlap and len(self.replicas_done[layer]) == self.R:
                self.begin_copy("return", layer, costs.gradients, max(self.replicas_done[layer]))
            yield from self.work(r, "experts", layer, 2 * costs.home_MLR[m, layer, r])
            if self.overlap:
                yield from self.wait(r, "return", layer, costs.gradients)
            else:
                yield from self.wait_together(r, "return", layer, costs.gradients)
            yield from self.meet(r, ("gates", layer), exchange.gates_back_ML[m, layer], "combine")
            yield from self.combine(r, layer)
            yield from self.work(r, "attention", layer, 2 * costs.before_MR(layer)[m, r])


def gradients_after_the_end(start_D, end_D, whole_D, layers_D):
    """Sum gradients stage by stage, layer by layer, and return how long after the last pass the last sum is done.

    start_D, end_D   of each stage's last backward pass
    whole_D          seconds of all sums of a stage; the first layer's can begin when its gradients are complete
    """
    done = []
    for start, end, whole, layers in zip(start_D, end_D, whole_D, layers_D, strict=True):
        clock = start
        for _ in range(layers - 1):
            clock += whole / layers
        clock = max(clock, end)  # the first layer's gradients come last, when the pass is over
        done.append(clock + whole / layers)
    return max(0.0, max(done) - max(end_D))


def pass_seconds(costs, *, backward, overlap, recompute=False):
    """Return seconds of the pass in each micro-batch, and what each rank waited before exchanges in all."""
    found, waited = [], [0.0] * costs.attention_MR.shape[1]
    for m in range(len(costs.attention_MR)):
        one = OnePass(costs, m, backward=backward, overlap=overlap, recompute=recompute)
        found.append(one.run())
        waited = [a + b for a, b in zip(waited, one.waited, strict=True)]
    return found, waited
