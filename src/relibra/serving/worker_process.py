"""A worker as a process of its own: `python -m relibra.serving.worker_process FD`, started by `launch.py`.

The front sends what to load over the inherited socket FD; the worker ends when that socket closes.
"""

from __future__ import annotations

import base64
import io
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relibra.environment import keep_hub_offline
from relibra.errors import RelibraError, in_a_line
from relibra.serving.control import ControlSocket
from relibra.serving.engine.request import GenerateRequest, Progress, SamplingParameters
from relibra.serving.exchange.addresses import listen
from relibra.serving.exchange.counters import ExchangeCounters
from relibra.serving.exchange.expert_side import ExpertInbox, ExpertShape
from relibra.serving.expert_placement import place_experts
from relibra.serving.layout import WorkerLayout
from relibra.serving.roles.attention_worker import AttentionWorker
from relibra.serving.roles.checkpoint import load_experts, open_checkpoint, read_structure
from relibra.serving.roles.expert_worker import ExpertWorker


def main(arguments: Sequence[str]) -> None:
    """Read what to do, load, report readiness or the error, and work until the front is gone."""
    control = ControlSocket(socket.socket(fileno=int(arguments[0])))
    spec = control.receive()
    if spec is None:
        return
    keep_hub_offline()
    torch.set_num_threads(spec["threads"])
    try:
        run_expert_worker(control, spec) if spec["role"] == "experts" else run_attention_worker(control, spec)
    except Exception as error:  # noqa: BLE001 - the boundary of the process: the front prints the sentence
        sentence = str(error) if isinstance(error, RelibraError) else in_a_line(error)
        control.send({"failed": sentence})


def run_expert_worker(control: ControlSocket, spec: dict[str, Any]) -> None:
    """Load the experts of this worker and answer until the front is gone."""
    layout = WorkerLayout(**spec["layout"])
    structure = read_structure(Path(spec["folder"]), spec["dtype"])
    own = place_experts(structure.num_experts, layout.experts, layout.spare_experts)[spec["number"]]
    layers = load_experts(structure, open_checkpoint(Path(spec["folder"])), own)
    listener, address = listen(spec["address"])
    shape = ExpertShape(
        worker=spec["number"],
        num_experts=len(own),
        num_layers=len(layers),
        hidden=structure.hidden,
        dtype=structure.dtype,
        max_rows=layout.max_tokens * structure.top_k,
    )
    inbox = ExpertInbox(listener, shape, bytes.fromhex(spec["secret"]), ExchangeCounters())
    worker = ExpertWorker(layers, inbox)
    control.send({"ready": address})

    def obey() -> None:
        while (frame := control.receive()) is not None:
            if "counters" in frame:
                control.send({"counters": {**inbox.counters.as_dict(), "busy_seconds": worker.busy_seconds}})
        inbox.close()

    threading.Thread(target=obey, name="control", daemon=True).start()
    worker.run()
    inbox.release()


def run_attention_worker(control: ControlSocket, spec: dict[str, Any]) -> None:
    """Load the model without experts, connect when the front says where they are, and generate until it is gone."""
    layout = WorkerLayout(**spec["layout"])
    worker = AttentionWorker(Path(spec["folder"]), layout, spec["number"], spec["dtype"])
    control.send({"ready": ""})
    frame = control.receive()
    if frame is None:
        return

    def tell(progress: list[Progress]) -> None:
        engine = worker.engine
        for one in progress:
            if one.finish is not None and engine is not None:
                engine.forget(one.number)
        control.send({"progress": [_as_json(one) for one in progress]})

    worker.connect(frame["connect"], bytes.fromhex(spec["secret"]), tell)
    control.send({"connected": True})
    while (frame := control.receive()) is not None:
        if "generate" in frame:
            worker.submit(_request(frame["generate"]))
        elif "cancel" in frame:
            worker.cancel(frame["cancel"])
        elif "rejoin" in frame:
            worker.rejoin(*frame["rejoin"])
        elif "counters" in frame:
            control.send({"counters": worker.counters()})
    worker.close()


def _request(body: dict[str, Any]) -> GenerateRequest:
    sampling = {**body["sampling"], "stop_ids": tuple(body["sampling"]["stop_ids"])}
    return GenerateRequest(number=body["number"], tokens=tuple(body["tokens"]), sampling=SamplingParameters(**sampling))


def _as_json(progress: Progress) -> dict[str, Any]:
    """Return a frame's part for one step of a request; fields without news are left out."""
    body: dict[str, Any] = {"number": progress.number}
    if progress.token is not None:
        body |= {"token": progress.token, "log_prob": progress.log_prob}
    if progress.top:
        body["top"] = progress.top
    if progress.finish is not None:
        body["finish"] = progress.finish
    if progress.error:
        body["error"] = progress.error
    if progress.routes is not None:
        array = io.BytesIO()
        np.save(array, progress.routes, allow_pickle=False)
        body["routes"] = base64.b64encode(array.getvalue()).decode()
    return body


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads that wait for the other end of a channel do not keep the process
