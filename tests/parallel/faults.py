"""Ranks that die or hang at a chosen moment of a step, and what the others say about it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from relibra.errors import EngineError
from relibra.parallel import PlanExecution, execute_plan, register
from relibra.parallel.group_state import GroupState
from relibra.parallel.replicas.replica_gradients import LayerReplicas
from relibra.parallel.replicas.transfer import Transfer
from relibra.parallel.rows.exchange import AllToAll
from relibra.planning.traffic.rank_tables import Place, from_homes_on
from relibra.replay.routers import is_recompute
from tests.parallel.ranks_at_work import Case, load, num_targets, run_batch
from tests.replay.tiny_models import tiny_model

GROUP_TIMEOUT_S, START_S = 15, 60


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank.

    moment   just before "exchange": rows go to the experts; "forwarding": they go on inside nodes; "exchange of
             gradients": they come back; "push": homes of this rank send weights; "return": gradients of replicas leave,
             as "canonical return" with canonical sums; "model": a micro-batch begins
    hangs    it sleeps instead of being killed
    layer    -1: in any
    """

    moment: str
    rank: int
    layer: int = -1
    micro_batch: int = 1
    hangs: bool = False

    def strike(self, place: Place) -> None:
        """End or stop this process if this is the moment."""
        if (
            dist.get_rank() == self.rank
            and (self.layer in (-1, place.layer_id))
            and self.micro_batch == place.micro_batch
        ):
            Path(f"struck-{self.rank}").write_text(str(time.time()))
            if self.hangs:
                time.sleep(600)
            os.kill(os.getpid(), signal.SIGKILL)


def before(owner: type, name: str, action: Callable[..., None]) -> Any:
    """Do something before each call of a method."""
    own = getattr(owner, name)

    def replaced(self, *args, **kwargs):
        action(self, *args)
        return own(self, *args, **kwargs)

    return mock.patch.object(owner, name, replaced)


def armed(fault: Fault) -> Any:
    """Make the fault happen when its moment comes."""

    def in_exchange(sizes: AllToAll, *_: object) -> None:
        if is_recompute() == (fault.moment == "exchange of gradients"):
            fault.strike(sizes.place)

    def in_forwarding(sizes: AllToAll, *_: object) -> None:
        if sizes.stage == "dispatch in node":
            fault.strike(sizes.place)

    def in_push(_: GroupState, place: Place, pushes: list, *__: object) -> None:
        if from_homes_on(place.rank, pushes):
            fault.strike(place)

    def in_return(replicas: LayerReplicas, *_: object) -> None:
        fault.strike(replicas.tables.place)

    def in_canonical_return(transfer: Transfer, *_: object) -> None:
        if is_recompute():
            fault.strike(transfer.place)

    if fault.moment == "canonical return":
        return before(Transfer, "start", in_canonical_return)
    if fault.moment == "forwarding":
        return before(AllToAll, "move", in_forwarding)
    if fault.moment == "push":
        return before(GroupState, "start_push", in_push)
    if fault.moment == "return":
        return before(LayerReplicas, "send_gradients", in_return)
    if fault.moment == "model":
        return in_model(fault)
    return before(AllToAll, "move", in_exchange)


@contextmanager
def in_model(fault: Fault) -> Iterator[None]:
    """Strike in the forward pass of a micro-batch, before its first layer."""
    entered: list[int] = []
    with (
        before(PlanExecution, "micro_batch", lambda _, number, *__: entered.append(number)),
        before(torch.nn.Embedding, "forward", lambda *_: fault.strike(Place(-1, -1, entered[-1]))),
    ):
        yield


def train_until_it_fails(rank: int, num_ranks: int, case: Case, fault: Fault, folder: Path) -> None:
    """Run a step, write down what it ended with, and exit as a program does that has caught an error."""
    os.chdir(folder)
    torch.set_num_threads(1)
    register()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    model = load(case, folder)
    message = "no error"
    try:
        with execute_plan(model, case.plan, case.demand, sums=case.sums) as step, armed(fault):
            backwards = [
                run_batch(model, case, m, rank, case.num_ranks / num_targets(case), step)[2]
                for m in range(case.plan.replica_MLRB.shape[0])
            ]
            for backward in backwards:
                backward()
    except EngineError as error:
        message = str(error)
    found = {"message": message, "time": time.time()}
    dist.destroy_process_group()
    Path(f"found-{rank}").write_text(json.dumps(found))


def start(num_ranks: int, case: Case, fault: Fault, folder: Path) -> list[BaseProcess]:
    """Start the ranks; forked from a server that has imported everything, so that it takes no ten seconds each."""
    folder.mkdir()
    tiny_model(case.family).save_pretrained(folder / case.model_name)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    processes = [
        context.Process(target=train_until_it_fails, args=(rank, num_ranks, case, fault, folder))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return processes


def survivors_of(num_ranks: int, case: Case, fault: Fault, folder: Path) -> dict[int, dict]:
    """Run a step with a fault; return what each survivor said, and how many seconds after the fault."""
    processes = start(num_ranks, case, fault, folder)
    others = [process for rank, process in enumerate(processes) if rank != fault.rank]
    try:
        deadline = time.monotonic() + START_S + 2 * GROUP_TIMEOUT_S
        for process in others:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in others] == [0] * len(others), fault
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    struck = float((folder / f"struck-{fault.rank}").read_text())
    found = {
        rank: json.loads((folder / f"found-{rank}").read_text()) for rank in range(num_ranks) if rank != fault.rank
    }
    return {rank: {**one, "seconds": one["time"] - struck} for rank, one in found.items()}
