"""A stand-in for servers of SGLang (0.5.23) and vLLM (0.29): it counts, or computes with a model, and goes wrong."""

from __future__ import annotations

import base64
import io
import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from relibra.replay import record_routing
from relibra.rl.rollout.served.client import ServedRoutes, ServerClient
from relibra.rl.rollout.served.dialects import HEALTH_PATHS, PATHS
from relibra.rl.rollout.served.engine import ServerEngine
from tests.fuzz.servers import CONFIG as CONFIGS
from tests.fuzz.servers import ROUTES
from tests.rl.rollout.stand_in_memory import SleepAndTransfer

CONTEXT, STOP = 128, 7
CONFIG = {"vllm": CONFIGS["vllm"]["vllm_config"], "sglang": CONFIGS["sglang"] | {"max_req_input_len": CONTEXT - 6}}
"""Some of what /server_info shows, by dialect."""
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_LOADING = threading.Lock()
"""transformers sets and restores functions of its classes while it loads: two threads at once leave them changed."""


def ids_of(tokens):
    """Routes that a test can predict: expert ids from token, layer and choice; the dense layer 0 is all zero."""
    rows = np.array(tokens[:-1])[:, None, None]
    ids = (rows + np.arange(3)[None, :, None] * 3 + np.arange(2)) % 8
    ids[:, 0] = 0
    return ids.astype(np.uint8)


def answer_of(tokens, limit):
    """Count on from the last token, which is all that a server without a model does; 7 ends."""
    added = []
    while len(added) < limit and (not added or added[-1] != STOP):
        added.append(([*tokens, *added][-1] + 1) % 50)
    return added


def reason_of(number, added, stop_ids):
    """Return why an answer ended that has so many of its tokens."""
    if number < len(added):
        return "abort"
    return "stop" if added[-1] in stop_ids else "length"


class StandIn(SleepAndTransfer, ThreadingHTTPServer):
    """What it serves, what it was asked, and what is wrong with it. It takes requests of both dialects.

    model      None: it counts
    config     as /server_info shows it; None: another program, or not in dev mode
    fault      "stale": loads nothing; "corrupt": loads damaged weights; "head": keeps the earlier output matrix;
               "raw": log-probs without temperature; "cache": answers from an earlier model, and scores with the
               new one; "shifted": routes of other layers; "unversioned": loads weights, and keeps their version
    asked      (path, body) of POST requests; `paths` of all, `keys` that came with them
    failures   statuses of the next POST requests
    change     called with each answer to one, returns another
    health     status of the answer to a look at its health; `starting` more of them are refused
    lives      requests for tokens that it answers before it is gone; None: it stays
    looks      requests without an answer after which it begins anew
    pace       seconds before a token, by the number of tokens before it; None: an answer takes no time, and is not cut;
               of answers that begin
    sampled    (tokens asked with, tokens sampled, version of the weights) of each answer
    """

    request_queue_size = 256

    def __init__(self, model=None, dialect="sglang"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = self.cached = self.first = model
        self.dialect, self.config, self.fault, self.version = dialect, CONFIG[dialect], "", "default"
        self.asked, self.paths, self.keys, self.failures = [], [], [], []
        self.change, self.on_get, self.health, self.starting = lambda answer: answer, lambda: None, 200, 0
        self.sees_folders, self.busy = True, False
        self.prepare_memory()
        self.lives, self.looks, self.dies_with = None, 1 << 30, None
        self.paused, self.resumed, self.pace, self.sampled = threading.Event(), threading.Event(), None, []
        self.going = threading.Event()
        self.resumed.set()
        self.going.set()
        self.count, self.turn = threading.Lock(), threading.Lock()

    def handle_error(self, *_):
        """A client that stopped waiting is no error of the server."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def die(self, *, looks, after=0, version=None):
        """Answer `after` more requests for tokens, then none, until `looks` had no answer: then begin anew.

        version   of the weights with which it begins to count; None: at once
        """
        self.lives, self.looks, self.dies_with = after, looks, version

    def pause(self, paused):
        """End answers under way, and let others wait; or go on."""
        first, then = (self.resumed, self.paused) if paused else (self.paused, self.resumed)
        first.clear()
        then.set()
        self.going.set()
        return {"status": "ok"}, 200

    def keep(self):
        """Hold answers under way, and let others wait."""
        self.going.clear()
        return {"status": "ok"}, 200

    def is_cut(self, seconds):
        """Wait before a token; return whether it does not come any more."""
        return self.paused.wait(seconds) or not self.going.wait(20)

    def passed(self, tokens, added, version):
        """Let time pass for each new token; return how many there are: all, or those before a pause."""
        number, pace = len(added), self.pace
        if pace is not None:
            number = next((n for n in range(len(added)) if self.is_cut(pace(n))), len(added))
        with self.count:
            self.sampled.append((tuple(tokens), added[:number], version))
        return number

    def begin_anew(self):
        """Be what it was when it was started."""
        self.pause(paused=False)
        self.model = self.cached = self.first
        self.version, self.lives = "default", None
        self.prepare_memory()

    def is_gone(self, path):
        """Return whether a request gets no answer, and count it."""
        with self.count:
            if self.lives is None or self.dies_with not in (None, self.version):
                return False
            gone = self.lives <= 0
            self.lives -= path in PATHS.values()
            self.looks -= gone
            if self.looks == 0:
                self.begin_anew()
            return gone

    def load(self, folder):
        assert "weights" not in self.asleep, "nobody loads weights into memory that is not there"
        if self.model is None or self.fault == "stale":
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
        """Return log-probs of all tokens behind each, and routes."""
        with record_routing(model) as recorder:
            logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
        routes = recorder.take()[0].numpy()
        return (logits / temperature).log_softmax(-1), routes[:, ::-1] if self.fault == "shifted" else routes

    def sample(self, tokens, *, limit, temperature, seed, stop_ids):
        """Return new tokens, their log-probs at a temperature, and the routes of all tokens but the last."""
        if self.model is None:
            added = answer_of(tokens, limit)
            return added, [-0.5 - token / 100 for token in added], ids_of([*tokens, *added])
        generator, log_probs, added = torch.Generator().manual_seed(seed), [], []
        while len(added) < limit and not (added and added[-1] in stop_ids):
            row = self.scores(self.cached, [*tokens, *added], temperature)[0][-1]
            added.append(int(torch.multinomial(row.exp(), 1, generator=generator)))
            if self.fault == "raw":
                row = self.scores(self.cached, [*tokens, *added[:-1]])[0][-1]
            log_probs.append(float(row[added[-1]]))
        return added, log_probs, self.scores(self.cached, [*tokens, *added])[1][:-1]

    def given_scores(self, tokens):
        """Return log-probs of all given tokens but the first; one that counts tells the version of its weights."""
        if self.model is None:
            return [-0.5 - token / 100 - int(self.version) for token in tokens[1:]]
        scores, _ = self.scores(self.model, tokens)
        return [float(row[token]) for row, token in zip(scores, tokens[1:], strict=False)]

    def answer(self, path, body):
        """Return the answer to a POST request, and its status."""
        if path in PATHS.values() and self.asleep:
            self.asked_asleep += 1  # vLLM lets it hang
            return {"error": "asleep"}, 500
        if (done := self.answer_about_memory(path, body)) is not None:
            return done
        if path == PATHS["sglang"]:
            return self.generate_as_sglang(body)
        if path == PATHS["vllm"]:
            return self.generate_as_vllm(body), 200
        if path in ("/pause", "/pause_generation"):
            mode = body.get("mode") or self.query["mode"][0]
            assert mode in ("abort", "keep" if self.dialect == "vllm" else "retract")
            return self.pause(paused=True) if mode == "abort" else self.keep()
        if path in ("/resume", "/continue_generation"):
            return self.pause(paused=False)
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return b"Success: as vLLM says in words, not in JSON.", 200
        if path == "/update_weights_from_disk":
            return self.update(body)
        if path == "/collective_rpc":
            self.load(body["kwargs"]["weights_path"])
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return {"success": True}, 200

    def update(self, body):
        if not self.sees_folders:
            return {"success": False, "message": f"{body['model_path']} does not exist."}, 400
        self.load(body["model_path"])
        if self.busy and not body.get("abort_all_requests"):
            return {"success": False, "message": NOT_FLUSHED}, 400
        self.version = self.version if self.fault == "unversioned" else body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights."}, 200

    def generate_as_sglang(self, body):
        tokens, sampling = list(body["input_ids"]), body["sampling_params"]
        wanted, stop_ids = sampling["max_new_tokens"], sampling.get("stop_token_ids", ())
        if len(tokens) + wanted > CONTEXT or len(tokens) >= CONTEXT - 6:
            return {"error": {"message": f"the maximum context length is {CONTEXT} tokens"}}, 400
        about = {"finish_reason": {"type": "length"}, "weight_version": self.version, "output_token_logprobs": []}
        if body.get("logprob_start_len", -1) == 0:
            scores = zip([None, *self.given_scores(tokens)], tokens, strict=True)
            about["input_token_logprobs"] = [[value, token, None] for value, token in scores]
        if limit := min(wanted, CONTEXT - 2 - len(tokens)):
            added, log_probs, routes = self.sample(
                tokens,
                limit=limit,
                temperature=sampling["temperature"],
                seed=sampling["sampling_seed"],
                stop_ids=stop_ids,
            )
            version = self.version

            def told():
                number = self.passed(tokens, added, version)
                pairs = list(zip(log_probs, added, strict=True))[:number]
                about["finish_reason"]["type"] = reason_of(number, added, stop_ids)
                about["weight_versions"] = [{"version": v} for v in sorted({version, self.version}) if number]
                about["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
                rows = np.ascontiguousarray(routes[: len(tokens) + number - 1], dtype="<i4")
                about["routed_experts"] = base64.b64encode(rows.tobytes()).decode() if number else None
                return {"meta_info": about}

            return told, 200
        return {"meta_info": about}, 200

    def generate_as_vllm(self, body):
        tokens, sampling, scored = list(body["token_ids"]), body["sampling_params"], {}
        if "prompt_logprobs" in sampling:
            scores = zip(tokens[1:], self.given_scores(tokens), strict=True)
            scored = {"prompt_logprobs": [None, *({str(token): {"logprob": value}} for token, value in scores)]}
        if "seed" not in sampling:
            return {"choices": [], **scored}
        limit, stop_ids = sampling["max_tokens"], sampling["stop_token_ids"]
        added, log_probs, routes = self.sample(
            tokens, limit=limit, temperature=sampling["temperature"], seed=sampling["seed"], stop_ids=stop_ids
        )
        version = self.version

        def told():
            number = self.passed(tokens, added, version)
            np.save(file := io.BytesIO(), routes[: len(tokens) + number - 1])
            choice = {
                "token_ids": added[:number],
                "logprobs": {"content": [{"logprob": value} for value in log_probs[:number]]},
                "finish_reason": reason_of(number, added, stop_ids),
                "routed_experts": base64.b64encode(file.getvalue()).decode() if number else None,
            }
            return {"choices": [choice], **scored}

        return told


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def is_gone(self, path):
        gone = self.server.is_gone(path)
        self.close_connection |= gone
        return gone

    def do_GET(self):
        server, path = self.server, self.path.partition("?")[0]
        server.on_get()
        if self.is_gone(path):
            return
        server.paths.append(path)
        if path in HEALTH_PATHS.values():
            server.starting -= 1
            self.send({}, 503 if server.starting >= 0 else server.health)
        elif path in ("/model_info", "/weight_info"):
            self.send({"weight_version": server.version})
        elif (answer := server.tell_memory(path)) is not None:
            self.send(answer)
        elif path == "/server_info" and server.config is not None:
            self.send({"vllm_config": server.config} if server.dialect == "vllm" else server.config)
        else:
            self.send({"detail": "Not Found"}, 404)

    def do_POST(self):
        server, path = self.server, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if path in PATHS.values():
            server.resumed.wait(20)  # a paused server lets them wait
            server.going.wait(20)
        with server.turn:  # once it begins anew, it answers no request of before
            if self.is_gone(path):
                return
            server.paths.append(path)
            server.asked.append((self.path, body))
            server.query = parse_qs(self.path.partition("?")[2])
            server.keys.append(self.headers["Authorization"])
            failure = server.failures.pop(0) if server.failures else None
            answer, status = server.answer(path, body) if failure is None else ({"error": "not now"}, failure)
        if callable(answer):
            answer = answer()
        self.send(server.change(answer) if failure is None else answer, status)

    def send(self, answer, status=200):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def running(model=None, dialect="vllm"):
    """Serve until the block ends."""
    with StandIn(model, dialect) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client_of(server, **settings):
    """Return a client of a server."""
    routes, vocab_size, stop_ids = ROUTES, 50, (STOP,)
    if server.model is not None:
        config = server.model.config
        vocab_size, stop_ids = config.vocab_size, ()
        routes = ServedRoutes(
            num_experts=config.num_experts,
            layer_ids=tuple(range(config.num_hidden_layers)),
            num_layers=config.num_hidden_layers,
            top_k=config.num_experts_per_tok,
        )
    client = ServerClient(
        url=server.url,
        dialect=server.dialect,
        routes=routes,
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        temperature=0.7,
        timeout_seconds=20.0,
    )
    return replace(client, **settings)


def engine_of(served, dialect="sglang", *, retry_seconds=0.0, max_batch=4, **changes):
    """Return an engine of one server, or of several."""
    listed = served if isinstance(served, list) else [served]
    first = client_of(listed[0], dialect=dialect, **changes)
    clients = tuple(replace(first, url=one.url) for one in listed)
    return ServerEngine(servers=clients, seed=3, max_batch=max_batch, retry_seconds=retry_seconds)
