"""Which devices and transports go together, and which GPU each worker gets."""

import pytest
import torch

from relibra.errors import ConfigError
from relibra.serving.launch import RunningWorkers, gpus_for
from relibra.serving.layout import WorkerLayout
from tests.serving.models import write_model

ON_GPUS = {"device": "cuda", "transport": "nccl"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"transport": "nccl"}, "--transport nccl does not go with --device cpu"),
        ({"device": "cuda"}, "--transport shared does not go with --device cuda"),
        ({"device": "cuda", "transport": "gloo"}, "--transport gloo does not go with --device cuda"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        WorkerLayout(**changes)


def test_attention_workers_have_the_first_of_the_visible_gpus(monkeypatch):
    layout = WorkerLayout(attention=2, experts=3, **ON_GPUS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus_for(layout, 8) == ["0", "1", "2", "3", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2")
    assert gpus_for(layout, 6) == ["7", "6", "5", "4", "3"]


def test_too_few_gpus_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="2 attention and 3 expert workers need 5 GPUs, one each, and 4 are visible"):
        gpus_for(WorkerLayout(attention=2, experts=3, **ON_GPUS), 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_no_worker_is_started(tmp_path):
    write_model("Qwen3MoeForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="0 are visible"):
        RunningWorkers(tmp_path, WorkerLayout(**ON_GPUS), dtype="auto", threads=1)
