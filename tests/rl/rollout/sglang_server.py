"""A stand-in for an SGLang server, as 0.5.23 with --skip-tokenizer-init: it computes with a model in this process."""

from __future__ import annotations

import base64
from contextlib import contextmanager

import numpy as np

from tests.rl.rollout.model_server import ModelHandler, ModelServer, serving

CONTEXT = 128
CONFIG = {
    "dtype": "float32",
    "context_length": CONTEXT,
    "enable_return_routed_experts": True,
    "preferred_sampling_params": None,
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
    "weight_version": "default",
    "launch_command": "python -m sglang.launch_server --model-path start --skip-tokenizer-init",
    "max_total_num_tokens": 4096,
    "max_req_input_len": CONTEXT - 6,
    "internal_states": [{"last_gen_throughput": 0.0}],
    "version": "0.5.23",
}
"""Some of what /server_info shows: flags as resolved, and what the scheduler found."""


class SglangServer(ModelServer):
    """A model server that answers as SGLang does.

    config         as /server_info shows it; None: another program
    sees_folders   it finds what is published
    busy           a request of somebody else is under way: caches are not dropped
    fault          also "unversioned": loads weights, and keeps their earlier version
    """

    dialect, path = "sglang", "/generate"

    def __init__(self, model):
        super().__init__(model, SglangHandler)
        self.config, self.sees_folders, self.busy = CONFIG, True, False

    def update(self, body):
        """Return the answer to new weights, and its status."""
        success, version, said = True, body["weight_version"], "Succeeded to update model weights."
        if not self.sees_folders:
            success, said = False, f"Failed to get weights iterator: {body['model_path']} does not exist."
        else:
            self.load(body["model_path"])
        if self.busy and not body.get("abort_all_requests"):
            success = False
            said = (
                "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                "Retract or finish them, then call /flush_cache."
            )
        if success:
            said += f" Weight version updated to {version}."
            self.version = self.version if self.fault == "unversioned" else version
        return {"success": success, "message": said, "num_paused_requests": 0}, 200 if success else 400

    def generate(self, body):
        """Return the answer to a request for tokens, and its status."""
        tokens, sampling = list(body["input_ids"]), body["sampling_params"]
        if refusal := self.refusal(len(tokens), sampling["max_new_tokens"]):
            return {"error": {"message": refusal}}, 400
        limit = min(sampling["max_new_tokens"], CONTEXT - 2 - len(tokens))
        stop_ids = sampling.get("stop_token_ids", ())
        added, log_probs = self.sample(
            tokens,
            limit=limit,
            temperature=sampling["temperature"],
            seed=sampling.get("sampling_seed", 0),
            stop_ids=stop_ids,
        )
        stopped = bool(added) and added[-1] in stop_ids
        about = {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": added[-1]} if stopped else {"type": "length", "length": limit},
            "prompt_tokens": len(tokens),
            "weight_version": self.version,
            "num_retractions": 0,
            "completion_tokens": len(added),
            "cached_tokens": 0,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(added)}],
        }
        if body.get("return_logprob"):
            about["input_token_logprobs"] = self.input_scores(tokens) if body.get("logprob_start_len", -1) == 0 else []
            about["output_token_logprobs"] = [
                [value, token, None] for value, token in zip(log_probs, added, strict=True)
            ]
            about["output_token_logprobs_length"] = len(added)
        if body.get("return_routed_experts") and self.config["enable_return_routed_experts"]:
            routes = self.scores(self.cached, [*tokens, *added])[1][:-1]
            about["routed_experts"] = base64.b64encode(np.ascontiguousarray(routes, dtype="<i4").tobytes()).decode()
        return {"output_ids": added, "meta_info": about}, 200

    def refusal(self, given, wanted):
        """Return why a request is refused; None: it is not."""
        if given + wanted > CONTEXT:
            return f"Requested token count exceeds the model's maximum context length of {CONTEXT} tokens."
        if given >= CONTEXT - 6:
            return f"Input length ({given} tokens) exceeds the maximum allowed length ({CONTEXT - 6} tokens)."
        return None

    def input_scores(self, tokens):
        """Return log-probs of given tokens, none of the first."""
        scores, _ = self.scores(self.model, tokens)
        found = [float(row[token]) for row, token in zip(scores, tokens[1:], strict=False)]
        return [[value, token, None] for value, token in zip([None, *found], tokens, strict=True)]


class SglangHandler(ModelHandler):
    def get(self, server, path):
        if path == "/model_info":
            self.send({"model_path": "start", "served_model_name": "start", "weight_version": server.version})
        elif path == "/server_info" and server.config is not None:
            self.send(server.config)
        else:
            self.send({"detail": "Not Found"}, 404)

    def post(self, server, path, body):
        if path == "/generate":
            self.send(*server.generate(body))
        elif path == "/update_weights_from_disk":
            self.send(*server.update(body))
        else:
            self.send({"detail": "Not Found"}, 404)


@contextmanager
def running(model):
    """Serve a model until the block ends."""
    with serving(SglangServer(model)) as server:
        yield server
