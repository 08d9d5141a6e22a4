"""Decode steps over relibra's channels between processes, with sleeps in place of attention, experts and the network.

Sleeping processes need no cores, so the order of events can be compared with the simulator on any machine.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from benchmarks.serving.m2n import all_to_all
from relibra.planning.deployment.pipeline_time import StageSeconds
from relibra.serving.channel import listen, worker_address
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange
from relibra.serving.exchange.expert_side import ExpertInbox, ExpertShape
from relibra.serving.roles.remote_experts import ComputeToken
from relibra.simulation.serving.ping_pong import Work, new_clocks, run_layers, sending_order

HIDDEN, ROWS, WAIT_SECONDS = 64, 4, 60.0
SECRET = b"sleeping"
WARM_UP = 2
"""Steps of each micro-batch that do not count."""


@dataclass(frozen=True, kw_only=True)
class SleepingDeployment:
    """Nodes, and the seconds that each sleeps.

    stage   of a micro-batch in one layer; experts sleep for every message, as they begin with what has arrived
    """

    attention: int
    experts: int
    micro_batches: int
    stage: StageSeconds
    layers: int = 8
    steps: int = 12

    def measured(self) -> tuple[float, int]:
        """Return the seconds of a step of all micro-batches, and the groups that all processes made for a call."""
        with tempfile.TemporaryDirectory() as folder:
            spawn(_work, (self, Path(folder)), nprocs=self.attention + self.experts)
            files = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
        groups = sum(one["counters"]["group_creations"] for one in files)
        return max(one["seconds"] for one in files if "seconds" in one), groups

    def simulated(self) -> float:
        """Return the same by the events of the simulator."""
        L, M, X, Y = self.layers, self.micro_batches, self.attention, self.experts
        zero_LMXY = np.zeros((L, M, X, Y))
        late_LMXY = np.full((L, M, X, Y), self.stage.hop)
        work = Work(
            attention_LMX=np.full((L, M, X), self.stage.attention),
            experts_LMXY=np.full((L, M, X, Y), self.stage.experts),
            send_LMXY=zero_LMXY, receive_LMXY=zero_LMXY, give_LMXY=zero_LMXY, take_LMXY=zero_LMXY,
            late_LMXY=late_LMXY, back_late_LMXY=late_LMXY,
        )  # fmt: skip
        clocks, began = new_clocks(M, X, Y), 0.0
        for step in range(self.steps):
            if step == WARM_UP:
                began = float(clocks.ready_MX.max())
            run_layers(work, clocks, sending_order(X, Y), sending_order(Y, X), partial=True)
        return (float(clocks.ready_MX.max()) - began) / (self.steps - WARM_UP)


def _work(rank: int, one: SleepingDeployment, folder: Path) -> None:
    torch.set_num_threads(1)
    side = _attend if rank < one.attention else _serve
    (folder / f"rank-{rank}.json").write_text(json.dumps(side(one, rank, folder)))


def _attend(one: SleepingDeployment, rank: int, folder: Path) -> dict:
    shape = ExchangeShape(
        experts_of=tuple(((number,),) * one.layers for number in range(one.experts)),
        max_tokens=ROWS, top_k=one.experts, hidden=HIDDEN, dtype=torch.float32,
    )  # fmt: skip
    addresses = [_address(folder / f"address-{number}") for number in range(one.experts)]
    exchanges = [
        SlotExchange(addresses, shape, attention=rank, slot=m, secret=SECRET, timeout=WAIT_SECONDS)
        for m in range(one.micro_batches)
    ]
    (folder / f"open-{rank}").touch()
    while len(list(folder.glob("open-*"))) < one.attention:
        time.sleep(0.001)
    token, ends = ComputeToken(), np.zeros((one.micro_batches, one.steps))
    threads = [threading.Thread(target=_decode, args=(one, token, ends[m], exchanges[m])) for m in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters: dict[str, int] = {}
    for exchange in exchanges:
        exchange.close()
        counters = {name: value + counters.get(name, 0) for name, value in vars(exchange.counters).items()}
    step_ends = ends.max(axis=0)
    seconds = (step_ends[-1] - step_ends[WARM_UP - 1]) / (one.steps - WARM_UP)
    return {"seconds": float(seconds), "counters": counters}


def _decode(one: SleepingDeployment, token: ComputeToken, end_S: np.ndarray, exchange: SlotExchange) -> None:
    """Run the steps of a micro-batch; the network takes its time outside of the token."""
    everywhere, gates = all_to_all(ROWS, one.experts), np.ones(ROWS * one.experts, dtype=np.float32)
    for step in range(one.steps):
        for layer in range(one.layers):
            token.acquire()
            time.sleep(one.stage.attention)
            token.release()
            time.sleep(one.stage.hop)
            exchange.dispatch(layer, everywhere, gates)
            exchange.collect(layer)
            time.sleep(one.stage.hop)
        end_S[step] = time.perf_counter()


def _serve(one: SleepingDeployment, rank: int, folder: Path) -> dict:
    number = rank - one.attention
    listener, address = listen(worker_address("shared", folder, str(number)))
    shape = ExpertShape(
        worker=number, experts=((number,),) * one.layers, hidden=HIDDEN, dtype=torch.float32,
        max_rows=ROWS * one.experts,
    )  # fmt: skip
    inbox = ExpertInbox(listener, shape, SECRET)
    (folder / f"new-{number}").write_text(address)
    (folder / f"new-{number}").rename(folder / f"address-{number}")
    for _ in range(one.attention * one.micro_batches * one.layers * one.steps):
        message = inbox.next(WAIT_SECONDS)
        assert message is not None, "every attention process sends"
        time.sleep(one.stage.experts)
        message.answer(inbox.counters)
    counters = dict(vars(inbox.counters))
    inbox.release()
    return {"counters": counters}


def _address(path: Path) -> str:
    end = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} was not written"
        time.sleep(0.001)
    return path.read_text()
