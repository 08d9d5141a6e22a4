"""Cases of the clients of served engines: a small server that answers with damaged bytes."""

import asyncio
import base64
import io
import json
import socket
import threading
from functools import cache, partial
from pathlib import Path

import numpy as np

from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.served import requests
from relibra.rl.rollout.served.client import PublishedVersion, ServedRoutes, ServerClient
from relibra.rl.rollout.served.dialects import PATHS, SCORES, read_scores, scoring_body
from relibra.rl.rollout.served.engine import ServerEngine
from relibra.rl.rollout.served.preflight import check_servers
from tests.fuzz.mutations import mutate_array, mutate_bytes, mutate_json

ROUTES = ServedRoutes(num_experts=8, layer_ids=(1, 2), num_layers=3, top_k=2)
PROMPT, NEW = [20, 21], 4


class RawServer:
    """Answers every connection with what `answer` has for its path, and closes it.

    answer   bytes by path, or functions that send them; "": for all others
    """

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.answer = {"": b""}
        threading.Thread(target=self.serve, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

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
                    path = request.split(b" ", 2)[1].decode() if request.count(b" ") > 1 else ""
                    answer = self.answer.get(path.split("?")[0], self.answer.get("", b""))
                    answer(connection) if callable(answer) else connection.sendall(answer)
                except OSError:
                    continue


@cache
def running():
    """Return the one server of this process."""
    return RawServer()


def http(data):
    """Return an answer of HTTP around its bytes."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def _damaged(rng, body):
    """Return an answer of HTTP around JSON, one of them damaged more often than not."""
    text = json.dumps(mutate_json(rng, body) if rng.random() < 0.6 else body).encode()
    text = mutate_bytes(rng, text) if rng.random() < 0.2 else text
    return mutate_bytes(rng, http(text)) if rng.random() < 0.2 else http(text)


def client_of(dialect, **settings):
    requests.PAUSE_SECONDS, requests.ATTEMPTS, requests.TIMED_OUT_ATTEMPTS = 0.0, 1, 1
    values = {"routes": ROUTES, "stop_ids": (7,), "vocab_size": 50, "temperature": 1.0, "timeout_seconds": 0.5}
    return ServerClient(url=running().url, dialect=dialect, **values | settings)


def routes_of(rows):
    return (np.arange(rows)[:, None, None] + np.arange(3)[:, None] + np.arange(2)) % 8


def answer_body(dialect, ids, new, *, npy=bytes):
    """Return what a server sends for `new` tokens with these routes.

    npy   changes the bytes of the routes of vLLM
    """
    if dialect == "sglang":
        data = ids.astype("<i4").tobytes() if ids.dtype.kind in "iu" else np.ascontiguousarray(ids).tobytes()
        about = {"output_token_logprobs": [[-0.5, 3, None]] * new, "finish_reason": {"type": "length"}}
        about["weight_versions"] = [{"version": "1", "start": 0, "end": new}]
        return {"meta_info": {**about, "routed_experts": base64.b64encode(data).decode()}}
    file = io.BytesIO()
    np.save(file, ids)
    choice = {"token_ids": [3] * new, "logprobs": {"content": [{"logprob": -0.5}] * new}, "finish_reason": "length"}
    return {"choices": [{**choice, "routed_experts": base64.b64encode(npy(file.getvalue())).decode()}]}


def _answer_of(dialect, rng, _):
    """A sampled response."""
    ids = routes_of(len(PROMPT) + NEW - 1)
    ids = mutate_array(rng, ids) if rng.random() < 0.3 else ids
    damage = partial(mutate_bytes, rng) if rng.random() < 0.3 else bytes
    running().answer = {"": _damaged(rng, answer_body(dialect, ids, NEW, npy=damage))}
    engine = ServerEngine(servers=(client_of(dialect),), seed=0)
    [window], _ = engine.generate([new_response(1, 0, PROMPT)], window=NEW, max_response=NEW)
    assert window.tokens_w.min() >= 0
    assert window.tokens_w.max() < 50
    assert np.isfinite(window.log_probs_w).all()
    assert window.experts_mLK.max() < 8


CONFIG = {
    "vllm": {
        "vllm_config": {
            "model_config": {
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
                "max_model_len": 64,
                "enable_return_routed_experts": True,
            },
            "parallel_config": {"enable_eplb": False},
        }
    },
    "sglang": {
        "max_total_num_tokens": 4096,
        "max_req_input_len": 64,
        "enable_return_routed_experts": True,
        "dtype": "float32",
        "preferred_sampling_params": None,
        "hicache_storage_backend": None,
        "enable_hierarchical_cache": False,
        "launch_command": "python -m sglang.launch_server",
        "weight_version": "default",
    },
}


def _start_of(dialect, rng, _):
    """What is asked before the warm-up: configuration, then one token."""
    body = answer_body(dialect, routes_of(8), 1)
    parts = {"/server_info": CONFIG[dialect], PATHS[dialect]: body, "/v1/models": {"data": [{"max_model_len": 64}]}}
    chosen = list(parts)[int(rng.integers(len(parts)))]
    running().answer = {path: http(json.dumps(part).encode()) for path, part in parts.items()} | {"": http(b"{}")}
    running().answer[chosen] = _damaged(rng, parts[chosen])
    [served] = check_servers([client_of(dialect)], start_seconds=0, longest=48, dtype="float32")
    assert type(served.context) is int
    assert isinstance(served.dtype, str)


def _update_of(dialect, rng, _):
    """What is asked at an update of the weights."""
    version = {"weight_version": "3"}
    parts = {"/weight_info": version, "/model_info": version, "/update_weight_version": {}, "/collective_rpc": {}}
    parts |= {"/reset_prefix_cache": {"success": True}, "/update_weights_from_disk": {"success": True, "message": "x"}}
    running().answer = {path: http(json.dumps(part).encode()) for path, part in parts.items()} | {"": http(b"{}")}
    chosen = list(parts)[int(rng.integers(len(parts)))]
    running().answer[chosen] = _damaged(rng, parts[chosen])
    client = client_of(dialect, published=PublishedVersion(3, Path("weights")))

    async def update():
        async with client.connections(1) as connection:
            await client.load(connection, Path("weights"), 3)
            await client.bring_up(connection)

    asyncio.run(update())


def _scores_of(dialect, rng, _):
    """Log-probs of given tokens, as the canary reads them."""
    tokens = [5, 6, 7, 8]
    if dialect == "sglang":
        body = {
            "meta_info": {
                "input_token_logprobs": [[None, 5, None], *([-0.5, token, None] for token in tokens[1:])],
                "output_token_logprobs": [],
            }
        }
    else:
        body = {"prompt_logprobs": [None, *({str(token): {"logprob": -0.5, "rank": 1}} for token in tokens[1:])]}
    running().answer = {"": _damaged(rng, body)}
    client = client_of(dialect)

    async def score():
        async with client.connections(1) as connection:
            body, kind = scoring_body(dialect, tokens), SCORES[dialect]
            return await client.call(connection, PATHS[dialect], body, kind=kind, tokens=4)

    try:
        found = read_scores(asyncio.run(score()), tokens)
    except ValueError:
        return  # as its docstring says: the canary turns it into a sentence
    assert len(found) == 3


SERVERS = {
    f"{dialect}_{name}": partial(case, dialect)
    for dialect in ("sglang", "vllm")
    for name, case in (("answer", _answer_of), ("start", _start_of), ("update", _update_of), ("scores", _scores_of))
}
"""What each client reads: sampled answers, and what is asked before a run, at an update, and by the canary."""
