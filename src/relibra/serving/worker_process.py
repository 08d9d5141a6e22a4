"""A worker as a process of its own, with the arguments FD ROLE NUMBER, started by `launch.py`.

The API server sends what to load over the inherited connection FD; the worker ends when that closes. ROLE and NUMBER
only show in lists of processes.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from relibra.engine.sequence import Sequence
from relibra.environment import keep_hub_offline
from relibra.errors import ConfigError, EngineError, RelibraError, in_a_line
from relibra.serving.channel import Channel, listen, progress_frames
from relibra.serving.exchange.expert_side import ExpertInbox, ExpertShape
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.attention_worker import AttentionWorker
from relibra.serving.roles.checkpoint import load_attention, load_experts, open_checkpoint, read_structure
from relibra.serving.roles.expert_worker import ExpertWorker
from relibra.serving.worker_timeline import timeline_frame, worker_recorder


def main() -> None:
    """Work until the API server is gone, and end the process whatever its threads wait for."""
    serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    sys.stdout.flush()
    os._exit(0)


def serve(control: Channel) -> None:
    """Read what to do, load, report readiness or the error, and work until the API server is gone."""
    try:
        spec = control.receive()
    except ConnectionError:  # the API server has gone
        return
    keep_hub_offline()
    torch.set_num_threads(spec["threads"])
    try:
        run_expert_worker(control, spec) if spec["role"] == "experts" else run_attention_worker(control, spec)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the API server prints the sentence
        sentence = str(error) if isinstance(error, RelibraError) else in_a_line(error)
        with suppress(ConnectionError):
            control.send({"failed": sentence})


class ExpertProcess:
    """Expert workers of one process: the latest and, after a change of experts, the one before it.

    The latest has an address of its own. Attention workers change over between two of their steps, and the one before
    ends when the last of them has left.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        """Load nothing yet."""
        self._spec = spec
        self._layout = WorkerLayout(**spec["layout"])
        self._workers: list[tuple[ExpertWorker, threading.Thread]] = []
        self.recorder = worker_recorder(self._layout, "experts", spec["number"]) if spec["timeline"] else None

    def hold(self, experts: Several[Several[int]], address: str) -> str:
        """Load experts of each layer and answer for them from now on; return the address; raises as `load_experts`."""
        layout, dtype, folder = self._layout, self._spec["dtype"], Path(self._spec["folder"])
        structure = read_structure(folder, dtype)
        layers = load_experts(structure, open_checkpoint(folder), experts)
        listener, address = listen(address)
        shape = ExpertShape(
            worker=self._spec["number"],
            experts=tuple(map(tuple, experts)),
            hidden=structure.hidden,
            dtype=structure.dtype,
            max_rows=layout.max_tokens * structure.top_k,
            timeout=layout.timeout,
        )
        inbox = ExpertInbox(listener, shape, bytes.fromhex(self._spec["secret"]))
        worker = ExpertWorker(layers, inbox, self.recorder)
        self._weights = NewWeights(
            layers, lambda path: load_experts(read_structure(path, dtype), open_checkpoint(path), experts)
        )

        def work() -> None:
            try:
                worker.run()
            except BaseException:  # noqa: BLE001 - the boundary of the thread: the API server starts the process again
                traceback.print_exc()
                os._exit(1)  # a worker that answers health checks only would be taken for a sound one
            inbox.release()
            worker.layers = ()  # their memory

        thread = threading.Thread(target=work, name=address, daemon=True)
        thread.start()
        for former, _ in self._workers:
            former.inbox.close_when_left()
        self._workers = [one for one in self._workers if one[1].is_alive()]
        self._workers.append((worker, thread))
        return address

    def change_weights(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Read or use other weights; experts that `hold` takes later come from the folder in use."""
        answer = self._weights.change(frame)
        if frame.get("use"):
            self._spec["folder"] = frame["use"]
        return answer

    def counters(self) -> dict[str, int | float]:
        """Return the counts of the worker that answers now."""
        worker, _ = self._workers[-1]
        return {**vars(worker.inbox.counters), "busy_seconds": worker.busy_seconds}


def run_expert_worker(control: Channel, spec: dict[str, Any]) -> None:
    """Load the experts of this worker and answer until the API server is gone."""
    process = ExpertProcess(spec)
    control.send({"ready": process.hold(spec["experts"], spec["address"])})
    _answer_frames(
        control,
        {
            "hold": lambda place: process.hold(*place),
            "weights": process.change_weights,
            "counters": lambda _: process.counters(),
            "timeline": lambda _: timeline_frame(process.recorder),
        },
    )


def run_attention_worker(control: Channel, spec: dict[str, Any]) -> None:
    """Load the model without experts, connect to them where the API server says, and generate until it is gone."""
    layout = WorkerLayout(**spec["layout"])
    recorder = worker_recorder(layout, "attention", spec["number"]) if spec["timeline"] else None
    dtype = spec["dtype"]
    worker = AttentionWorker(Path(spec["folder"]), layout, spec["number"], dtype, recorder)
    weights = NewWeights(
        [worker.model], lambda path: [load_attention(read_structure(path, dtype), open_checkpoint(path))]
    )
    control.send({"ready": ""})

    def report(sequences: list[Sequence]) -> None:
        with suppress(ConnectionError):  # the API server has gone, and with it this process in a moment
            for progress in progress_frames(sequences):
                control.send({"progress": progress})

    def connect(experts: Several[Any]) -> dict[str, Any]:
        worker.connect(experts, bytes.fromhex(spec["secret"]), report)
        return {"dtype": str(worker.shape.dtype), "most_cache_bytes": worker.most_cache_bytes}

    _answer_frames(
        control,
        {
            "connect": connect,
            "generate": lambda request: worker.submit(msgspec.convert(request, Sequence)),
            "cancel": worker.cancel,
            "rejoin": lambda place: worker.rejoin(*place),
            "load": lambda _: worker.load(),
            "weights": weights.change,
            "counters": lambda _: worker.counters(),
            "timeline": lambda _: timeline_frame(recorder),
        },
    )
    worker.close()


def _answer_frames(control: Channel, actions: dict[str, Callable[[Any], Any]]) -> None:
    """Call the action of each frame's key, and send its answer under the same key, until the other end is gone."""
    actions = {"health": lambda _: True, **actions}
    with suppress(ConnectionError):
        while True:
            for key, value in control.receive().items():
                answer = actions[key](value)
                if answer is not None:
                    control.send({key: answer})


class NewWeights:
    """Weights that a worker has read and does not use yet: it has room for both."""

    def __init__(self, present: Several[nn.Module], load: Callable[[Path], Several[nn.Module]]) -> None:
        """Begin with none.

        present   modules of the worker
        load      reads the same modules from another folder
        """
        self._present, self._load = present, load
        self._read: Several[nn.Module] = ()

    def change(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Read the folder of `read`, or use what was read; an empty `use` drops it. Return the answer."""
        if "use" in frame:
            if frame["use"]:
                self._use()
            self._read = ()
            return {"used": frame["use"]}
        try:
            read = self._load(Path(frame["read"]))
            check_same_shapes(read, self._present, frame["read"])
        except Exception as error:  # noqa: BLE001 - a file of others: its error is the answer
            return {"failed": str(error) if isinstance(error, RelibraError) else in_a_line(error)}
        self._read = read
        return {"read": frame["read"]}

    def _use(self) -> None:
        if len(self._read) != len(self._present):
            raise EngineError("no weights have been read that could be used")
        with torch.inference_mode(False):
            for new, old in zip(self._read, self._present, strict=True):
                old.load_state_dict(new.state_dict(), assign=True)


def check_same_shapes(new: Several[nn.Module], old: Several[nn.Module], folder: str) -> None:
    """Raise ConfigError where the modules differ in number, or their parameters in names, shapes or types."""
    if len(new) != len(old):
        raise ConfigError(f"{folder} holds {len(new)} layers of experts: this server has {len(old)}")
    for modules in zip(new, old, strict=True):
        shapes = [{key: (tuple(t.shape), t.dtype) for key, t in module.state_dict().items()} for module in modules]
        for name in sorted(shapes[0].keys() | shapes[1].keys()):
            found, known = (shape_of.get(name) for shape_of in shapes)
            if found != known:
                raise ConfigError(f"{folder} is of another model: {name} is {found}, here {known}")
