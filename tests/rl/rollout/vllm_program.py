"""The stand-in for a vLLM server as a program, started with vLLM's words; it starts a process that outlives it."""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
from http import HTTPStatus

from transformers import AutoModelForCausalLM

from tests.rl.rollout.vllm_server import CONFIG, VllmHandler, VllmServer


class KeyHandler(VllmHandler):
    """Asks for the key that vLLM reads from its environment, where vLLM does."""

    def post(self, server, path, body):
        given = self.headers.get("Authorization", "")
        if path.startswith("/inference") and given != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.send({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
            return
        super().post(server, path, body)


def serve(words: list[str]) -> None:
    """Answer until the process is ended."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--host", "--dtype", "--logprobs-mode"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--max-model-len"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    given = parser.parse_args(words)
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    assert len(os.environ["VLLM_API_KEY"]) > 20
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "EngineCore"])
    model = AutoModelForCausalLM.from_pretrained(given.model).eval()
    with VllmServer(model, KeyHandler, address=(given.host, given.port)) as server:
        server.config = copy.deepcopy(CONFIG)
        server.config["model_config"] |= {
            "dtype": given.dtype,
            "max_model_len": given.max_model_len,
            "enable_return_routed_experts": given.enable_return_routed_experts,
            "logprobs_mode": given.logprobs_mode,
        }
        print(f"engine {engine.pid}, GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1:])
