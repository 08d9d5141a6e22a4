"""What the stand-ins for servers share: a model in this process, and what can go wrong with it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM

from relibra.replay import record_routing
from relibra.rl.rollout.served.dialects import HEALTH_PATHS

_LOADING = threading.Lock()
"""transformers sets and restores functions of its classes while it loads: two threads at once leave them changed."""


class ModelServer(ThreadingHTTPServer):
    """What it serves, and what is wrong with it.

    dialect   that it speaks
    path      of requests for tokens
    fault     "stale": loads nothing; "corrupt": loads damaged weights; "head": keeps the earlier output matrix;
              "raw": log-probs without temperature; "cache": answers from an earlier model, and scores with the
              new one; "shifted": routes of other layers
    starting  looks at its health that are still refused
    """

    request_queue_size = 256
    dialect = path = ""

    def __init__(self, model, handler, address=("127.0.0.1", 0)):
        super().__init__(address, handler)
        self.model, self.cached, self.fault, self.starting = model, model, "", 0
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
                self.lives -= path == self.path
                return False
            self.looks -= 1
            if self.looks == 0:
                self.begin_anew()
            return True

    def load(self, folder):
        if self.fault == "stale":
            return
        with _LOADING:
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

    def sample(self, tokens, *, limit, temperature, seed, stop_ids):
        """Return new tokens, and their log-probs at a temperature."""
        generator, log_probs, added = torch.Generator().manual_seed(seed), [], []
        while len(added) < limit and not (added and added[-1] in stop_ids):
            row = self.scores(self.cached, [*tokens, *added], temperature)[0][-1]
            added.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            if self.fault == "raw":
                row = self.scores(self.cached, [*tokens, *added[:-1]])[0][-1]
            log_probs.append(float(row[added[-1]]))
        return added, log_probs


class ModelHandler(BaseHTTPRequestHandler):
    """Says whether it is healthy; the rest is in `get` and `post`."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        if server.is_gone(path):
            self.close_connection = True
            return
        server.paths.append(path)
        if path == HEALTH_PATHS[server.dialect]:
            server.starting -= 1
            self.send({}, 503 if server.starting >= 0 else 200)
        else:
            self.get(server, path)

    def do_POST(self):
        server, path = self.server, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.turn:
            if server.is_gone(path):
                self.close_connection = True
                return
            server.paths.append(path)
            self.post(server, path, body)

    def send(self, answer, status=200):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(server):
    """Serve until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
