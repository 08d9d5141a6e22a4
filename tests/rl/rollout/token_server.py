"""A small server that speaks both dialects, counts on from the last token, and now and then fails."""

import base64
import io
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.engine import ServerEngine

ROUTES = ServedRoutes(num_experts=8, layer_ids=(1, 2), num_layers=3, top_k=2)
STOP = 7


def ids_of(tokens):
    """Routes that a test can predict: expert ids from token, layer and choice; the dense layer 0 is all zero."""
    rows = np.array(tokens[:-1])[:, None, None]
    ids = (rows + np.arange(3)[None, :, None] * 3 + np.arange(2)) % 8
    ids[:, 0] = 0
    return ids


def answer_of(tokens, limit):
    """The server's whole policy: count on from the last token; 7 ends."""
    added = []
    while len(added) < limit and (not added or added[-1] != STOP):
        added.append(([*tokens, *added][-1] + 1) % 50)
    return added


class Server(ThreadingHTTPServer):
    """What it was asked, and what goes wrong: statuses for the next requests, or a change to every answer.

    lives   requests for tokens that it answers before it is gone; None: it stays
    """

    request_queue_size = 256

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.failures, self.change = [], [], lambda answer: answer
        self.version, self.keys = "default", []
        self.health, self.lives, self.on_get, self.turn = 200, None, lambda: None, threading.Lock()

    def handle_error(self, *_):
        """A client that stopped waiting is no error of the server."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def is_gone(self):
        """Return whether the server is gone: then nothing is sent. Counts requests for tokens."""
        server = self.server
        with server.turn:
            gone = server.lives is not None and server.lives <= 0
            if server.lives is not None and self.path.endswith("generate"):
                server.lives -= 1
        self.close_connection |= gone
        return gone

    def do_GET(self):
        self.server.on_get()
        if not self.is_gone():
            healthy = self.path in ("/health", "/ready")
            answer = {} if healthy else {"weight_version": self.server.version}
            self.send(answer, self.server.health if healthy else 200)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_gone():
            return
        self.server.asked.append((self.path, body))
        self.server.keys.append(self.headers["Authorization"])
        status = self.server.failures.pop(0) if self.server.failures else 200
        self.send({"error": "not now"} if status != 200 else self.server.change(self.answer(body)), status)

    def send(self, answer, status=200):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, body):
        if self.path == "/generate":
            tokens, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
            added = answer_of(tokens, limit)
            routes = ids_of([*tokens, *added]).astype("<i4").tobytes()
            return {
                "meta_info": {
                    "output_token_logprobs": [[-0.5 - token / 100, token, None] for token in added],
                    "finish_reason": {"type": "stop" if added[-1] == STOP else "length"},
                    "weight_version": self.server.version,
                    "routed_experts": base64.b64encode(routes).decode(),
                }
            }
        if self.path == "/inference/v1/generate":
            tokens, limit = body["token_ids"], body["sampling_params"]["max_tokens"]
            added, file = answer_of(tokens, limit), io.BytesIO()
            np.save(file, ids_of([*tokens, *added]).astype(np.uint8))
            choice = {
                "token_ids": added,
                "logprobs": {"content": [{"token": "x", "logprob": -0.5 - token / 100} for token in added]},
                "finish_reason": "stop" if added[-1] == STOP else "length",
                "routed_experts": base64.b64encode(file.getvalue()).decode(),
            }
            return {"choices": [choice]}
        if self.path == "/update_weights_from_disk":
            self.server.version = body["weight_version"]
            return {"success": True, "message": "done"}
        if self.path == "/update_weight_version":
            self.server.version = body["new_version"]
        return {"success": True}


@contextmanager
def running():
    """Serve until the block ends."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def engine_of(served, dialect="sglang", *, retry_seconds=0.0, max_batch=4, **changes):
    """Return an engine of one server, or of several."""
    listed = served if isinstance(served, list) else [served]
    first = ServerClient(
        url=listed[0].url,
        dialect=dialect,
        routes=ROUTES,
        stop_ids=(STOP,),
        vocab_size=50,
        temperature=0.8,
        timeout_seconds=10.0,
    )
    first = replace(first, **changes)
    clients = tuple(replace(first, url=one.url) for one in listed)
    return ServerEngine(servers=clients, seed=3, max_batch=max_batch, retry_seconds=retry_seconds)
