"""A stand-in for a vLLM server: it computes with a model in this process, and can be stale, corrupt or raw."""

from __future__ import annotations

import base64
import io
from contextlib import contextmanager

import numpy as np

from tests.rl.rollout.model_server import ModelHandler, ModelServer, serving

CONFIG = {
    "model_config": {
        "dtype": "torch.float32",
        "max_model_len": 64,
        "enable_return_routed_experts": True,
        "logprobs_mode": "processed_logprobs",
    },
    "parallel_config": {"enable_eplb": False},
}


class VllmServer(ModelServer):
    """A model server that answers as vLLM does; `config` as /server_info shows it, None: not in dev mode."""

    dialect, path = "vllm", "/inference/v1/generate"

    def __init__(self, model, handler=None, **address):
        super().__init__(model, handler or VllmHandler, **address)
        self.config = CONFIG

    def generate(self, body):
        tokens, sampling = list(body["token_ids"]), body["sampling_params"]
        if "prompt_logprobs" in sampling:
            scores, _ = self.scores(self.model, tokens)
            listed = [None] + [
                {str(token): {"logprob": float(row[token])}} for row, token in zip(scores, tokens[1:], strict=False)
            ]
            return {"choices": [], "prompt_logprobs": listed}
        added, log_probs = self.sample(
            tokens,
            limit=sampling["max_tokens"],
            temperature=sampling["temperature"],
            seed=sampling["seed"],
            stop_ids=sampling["stop_token_ids"],
        )
        routes, file = self.scores(self.cached, [*tokens, *added])[1][:-1], io.BytesIO()
        np.save(file, routes)
        choice = {
            "token_ids": added,
            "logprobs": {"content": [{"logprob": value} for value in log_probs]},
            "finish_reason": "stop" if added[-1] in sampling["stop_token_ids"] else "length",
            "routed_experts": base64.b64encode(file.getvalue()).decode(),
        }
        return {"choices": [choice]}


class VllmHandler(ModelHandler):
    def get(self, server, path):
        if path == "/weight_info":
            self.send({"weight_version": server.version})
        elif path == "/server_info" and server.config is not None:
            self.send({"vllm_config": server.config})
        else:
            self.send({"detail": "Not Found"}, 404)

    def post(self, server, path, body):
        if path == "/inference/v1/generate":
            self.send(server.generate(body))
            return
        if path == "/collective_rpc":
            server.load(body["kwargs"]["weights_path"])
        if path == "/update_weight_version":
            server.version = body["new_version"]
        self.send({"success": True})


@contextmanager
def running(model):
    """Serve a model until the block ends."""
    with serving(VllmServer(model)) as server:
        yield server
