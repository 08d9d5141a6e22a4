"""A deployment inside this process: workers as threads, over the same channels as between processes."""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from relibra.engine.sequence import Sequence
from relibra.planning.deployment.expert_placement import ExpertPlacement
from relibra.planning.deployment.expert_workers import place_by_number
from relibra.serving.channel import listen, worker_address
from relibra.serving.exchange.expert_side import ExpertInbox, ExpertShape
from relibra.serving.launch import Worker
from relibra.serving.layout import WorkerLayout, experts_of, place_copies
from relibra.serving.roles.attention_worker import AttentionWorker
from relibra.serving.roles.checkpoint import load_experts, open_checkpoint, read_structure
from relibra.serving.roles.expert_worker import ExpertWorker

WAIT_SECONDS = 60.0


class StoppedWorker(Worker):
    """A worker without a connection, whose process is of somebody else."""

    def __init__(self, role: str, pid: int) -> None:
        vars(self).update(role=role, number=0, process=SimpleNamespace(pid=pid))


@dataclass
class Served:
    """Workers of both roles."""

    attention: list[AttentionWorker]
    experts: list[ExpertWorker]
    changed: threading.Condition = field(default_factory=threading.Condition)

    def notify(self, _sequences: list[Sequence]) -> None:
        with self.changed:
            self.changed.notify_all()

    def generate(self, sequences: list[Sequence]) -> list[Sequence]:
        """Submit requests to the attention workers in turn, and wait for all answers."""
        for n, sequence in enumerate(sequences):
            self.attention[n % len(self.attention)].submit(sequence)
        self.wait_for(lambda: all(sequence.finish for sequence in sequences))
        return sequences

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_SECONDS), "no answer in time"


@contextmanager
def expert_threads(
    folder: Path, layout: WorkerLayout, secret: bytes, placement: ExpertPlacement | None = None
) -> Iterator[tuple[list[ExpertWorker], list]]:
    """Run expert workers as threads; yield them, and the address and the experts of each."""
    workers, places = [], []
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tensors, structure = open_checkpoint(folder), read_structure(folder)
        homes = np.stack([place_by_number(structure.num_experts, layout.experts)] * len(structure.experts))
        held = experts_of(place_copies(homes, layout.spare_experts) if placement is None else placement.held_LNE)
        for number in range(layout.experts):
            structure = read_structure(folder)
            own = held[number]
            layers = load_experts(structure, tensors, own)
            listener, address = listen(worker_address(layout.transport, sockets, str(number)))
            shape = ExpertShape(
                worker=number,
                experts=own,
                hidden=structure.hidden,
                dtype=structure.dtype,
                max_rows=layout.max_tokens * structure.top_k,
                timeout=layout.timeout,
            )
            inbox = ExpertInbox(listener, shape, secret)
            workers.append(ExpertWorker(layers, inbox))
            places.append((address, own))
            thread = threading.Thread(target=workers[-1].run, name=f"experts {number}")
            thread.start()
            stack.callback(inbox.release)
            stack.callback(thread.join)
            stack.callback(inbox.close)
        yield workers, places


@contextmanager
def served_in_process(folder: Path, layout: WorkerLayout, placement: ExpertPlacement | None = None) -> Iterator[Served]:
    """Run a whole deployment as threads of this process."""
    secret = secrets.token_bytes(16)
    with ExitStack() as stack:
        experts, places = stack.enter_context(expert_threads(folder, layout, secret, placement))
        attention = [AttentionWorker(folder, layout, number) for number in range(layout.attention)]
        served = Served(attention, experts)
        for worker in attention:
            stack.callback(worker.close)
            worker.connect(places, secret, served.notify)
        yield served
