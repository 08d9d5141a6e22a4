"""Serving on GPUs, rows through NCCL: answers are those of the whole model."""

import httpx
import pytest
import torch

from tests.serving.models import greedy_answer, greedy_request, write_model
from tests.serving.server_process import relibra_serve


@pytest.mark.parametrize(("experts", "micro_batches"), [(1, 1), (2, 2)])
def test_answers_equal_the_whole_model(experts, micro_batches, tmp_path):
    if torch.cuda.device_count() < 1 + experts:
        pytest.skip(f"torch sees fewer than {1 + experts} CUDA devices")
    model = write_model("Qwen3MoeForCausalLM", tmp_path)
    options = ("--device", "cuda", "--experts", str(experts), "--micro-batches", str(micro_batches))
    with relibra_serve(tmp_path, *options) as (url, _):
        for request in [greedy_request(number, length, 24) for number, length in enumerate((5, 9, 20))]:
            body = {"prompt": list(request.prompt), "max_tokens": 24, "temperature": 0, "return_token_ids": True}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == greedy_answer(model, request.prompt, 24).tokens
