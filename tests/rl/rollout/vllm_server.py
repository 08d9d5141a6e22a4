"""A stand-in for a vLLM server: it computes with a model in this process, and can be stale, corrupt or raw."""

from __future__ import annotations

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from relibra.replay import record_routing

CONFIG = {
    "model_config": {
        "dtype": "torch.float32",
        "max_model_len": 64,
        "enable_return_routed_experts": True,
        "logprobs_mode": "processed_logprobs",
    },
    "parallel_config": {"enable_eplb": False},
}


class VllmServer(ThreadingHTTPServer):
    """What it serves, and what is wrong with it.

    fault     "stale": loads nothing; "corrupt": loads damaged weights; "head": keeps the earlier output matrix;
              "raw": log-probs without temperature; "cache": answers from an earlier model, and scores with the
              new one; "shifted": routes of other layers
    config    as /server_info shows it; None: not in dev mode
    starting  looks at /health that are still refused
    """

    request_queue_size = 256

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model, self.cached, self.fault, self.config, self.starting = model, model, "", CONFIG, 0
        self.version, self.paths, self.turn = "default", [], threading.Lock()
        self.first, self.looks, self.lives, self.dies_with = model, 0, 0, None
        self.count = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def die(self, *, looks, after=0, version=None):
        """Answer `after` more requests for tokens, then none, until `looks` had no answer: then begin anew.

        version   of the weights with which it begins to count; None: at once
        """
        self.looks, self.lives, self.dies_with = looks, after, version

    def begin_anew(self):
        """Be what it was when it was started."""
        self.model = self.cached = self.first
        self.version, self.looks = "default", 0

    def is_gone(self, path):
        """Return whether a request gets no answer, and count it."""
        with self.count:
            if self.looks == 0 or self.dies_with not in (None, self.version):
                return False
            if self.lives > 0:
                self.lives -= path == "/inference/v1/generate"
                return False
            self.looks -= 1
            if self.looks == 0:
                self.begin_anew()
            return True

    def load(self, folder):
        if self.fault == "stale":
            return
        fresh = AutoModelForCausalLM.from_pretrained(folder).eval()
        if self.fault == "corrupt":
            with torch.no_grad():
                for name, parameter in fresh.named_parameters():
                    if "experts" in name:
                        parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
        if self.fault == "head":
            fresh.lm_head.weight = self.model.lm_head.weight
        self.model, self.cached = fresh, self.model if self.fault == "cache" else fresh

    @torch.inference_mode()
    def scores(self, model, tokens, temperature=1.0):
        with record_routing(model) as recorder:
            logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
        routes = recorder.take()[0].numpy()
        return (logits / temperature).log_softmax(-1), routes[:, ::-1] if self.fault == "shifted" else routes

    def generate(self, body):
        tokens, sampling = list(body["token_ids"]), body["sampling_params"]
        if "prompt_logprobs" in sampling:
            scores, _ = self.scores(self.model, tokens)
            listed = [None] + [
                {str(token): {"logprob": float(row[token])}} for row, token in zip(scores, tokens[1:], strict=False)
            ]
            return {"choices": [], "prompt_logprobs": listed}
        generator = torch.Generator().manual_seed(sampling["seed"])
        temperature, log_probs, added = sampling["temperature"], [], []
        while len(added) < sampling["max_tokens"] and not (added and added[-1] in sampling["stop_token_ids"]):
            row = self.scores(self.cached, [*tokens, *added], temperature)[0][-1]
            added.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            if self.fault == "raw":
                row = self.scores(self.cached, [*tokens, *added[:-1]])[0][-1]
            log_probs.append(float(row[added[-1]]))
        routes, file = self.scores(self.cached, [*tokens, *added])[1][:-1], io.BytesIO()
        np.save(file, routes)
        choice = {
            "token_ids": added,
            "logprobs": {"content": [{"logprob": value} for value in log_probs]},
            "finish_reason": "stop" if added[-1] in sampling["stop_token_ids"] else "length",
            "routed_experts": base64.b64encode(file.getvalue()).decode(),
        }
        return {"choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        if server.is_gone(path):
            self.close_connection = True
            return
        server.paths.append(path)
        if path == "/health":
            server.starting -= 1
            self.send({}, 503 if server.starting >= 0 else 200)
        elif path == "/weight_info":
            self.send({"weight_version": server.version})
        elif path == "/server_info" and server.config is not None:
            self.send({"vllm_config": server.config})
        else:
            self.send({"detail": "Not Found"}, 404)

    def do_POST(self):
        server, path = self.server, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.turn:
            if server.is_gone(path):
                self.close_connection = True
                return
            server.paths.append(path)
            if path == "/inference/v1/generate":
                self.send(server.generate(body))
                return
            if path == "/collective_rpc":
                server.load(body["kwargs"]["weights_path"])
            if path == "/update_weight_version":
                server.version = body["new_version"]
        self.send({"success": True})

    def send(self, answer, status=200):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def running(model):
    """Serve a model until the block ends."""
    with VllmServer(model) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
