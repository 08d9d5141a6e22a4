"""Cases of the client of served engines: a small server that answers with damaged bytes."""

import base64
import io
import json
import socket
import threading
from functools import cache

import numpy as np

from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.served import requests
from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.engine import ServerEngine
from tests.fuzz.mutations import mutate_array, mutate_bytes, mutate_json

ROUTES = ServedRoutes(num_experts=8, layer_ids=(1, 2), num_layers=3, top_k=2)
PROMPT, NEW = [20, 21], 4


class RawServer:
    """Answers every connection with `answer`, and closes it."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.answer = b""
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            connection, _ = self.listener.accept()
            with connection:
                connection.settimeout(2)
                try:
                    request = b""
                    while not request.endswith(b"}") and not (request[:3] == b"GET" and request.endswith(b"\r\n\r\n")):
                        if not (piece := connection.recv(1 << 16)):
                            break
                        request += piece
                    connection.sendall(self.answer)
                except OSError:
                    continue


@cache
def running():
    """Return the one server of this process."""
    return RawServer()


def _ids(rng):
    ids = (np.arange(len(PROMPT) + NEW - 1)[:, None, None] + np.arange(3)[:, None] + np.arange(2)) % 8
    return mutate_array(rng, ids) if rng.random() < 0.3 else ids


def _body(rng, dialect):
    if dialect == "sglang":
        ids = _ids(rng)
        routes = base64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()
        if ids.dtype.kind in "iu":
            routes = base64.b64encode(ids.astype("<i4").tobytes()).decode()
        about = {"output_token_logprobs": [[-0.5, 3, None]] * NEW, "finish_reason": {"type": "length"}}
        about["weight_versions"] = [{"version": "1", "start": 0, "end": NEW}]
        return {"meta_info": {**about, "routed_experts": routes}}
    file = io.BytesIO()
    np.save(file, _ids(rng))
    data = mutate_bytes(rng, file.getvalue()) if rng.random() < 0.3 else file.getvalue()
    choice = {"token_ids": [3] * NEW, "logprobs": {"content": [{"logprob": -0.5}] * NEW}, "finish_reason": "length"}
    return {"choices": [{**choice, "routed_experts": base64.b64encode(data).decode()}]}


def server_answer(rng, _):
    dialect = ("sglang", "vllm")[int(rng.integers(2))]
    body = _body(rng, dialect)
    text = json.dumps(mutate_json(rng, body) if rng.random() < 0.6 else body).encode()
    text = mutate_bytes(rng, text) if rng.random() < 0.2 else text
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text
    running().answer = mutate_bytes(rng, answer) if rng.random() < 0.2 else answer
    requests.PAUSE_SECONDS, requests.ATTEMPTS, requests.TIMED_OUT_ATTEMPTS = 0.0, 1, 1
    client = ServerClient(
        url=f"http://127.0.0.1:{running().listener.getsockname()[1]}",
        dialect=dialect,
        routes=ROUTES,
        stop_ids=(7,),
        vocab_size=50,
        temperature=1.0,
        timeout_seconds=0.5,
    )
    engine = ServerEngine(servers=(client,), seed=0)
    [window], _ = engine.generate([new_response(1, 0, PROMPT)], window=NEW, max_response=NEW)
    assert window.tokens_w.min() >= 0
    assert window.tokens_w.max() < 50
    assert np.isfinite(window.log_probs_w).all()
    assert window.experts_mLK.max() < 8
