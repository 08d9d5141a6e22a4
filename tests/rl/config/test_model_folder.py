"""A model is looked up on this machine, and a folder is named for what it holds."""

import json
import os
import subprocess
import sys
import time

import pytest

from relibra.environment import hub_cache_folder
from relibra.errors import ConfigError
from relibra.rl.config.model_folder import check_expert_ranks, check_model_path, read_model_sizes
from relibra.rl.config.run_config import load_config

WHOLE = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def make(folder, *files):
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}")
    return str(folder)


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        check_model_path(str(path))
    assert (caught.value.what, caught.value.got) == ("model.path", str(path))
    return caught.value


def test_a_whole_folder_is_a_model(tmp_path):
    check_model_path(make(tmp_path / "a", *WHOLE))
    check_model_path(make(tmp_path / "b", "config.json", "pytorch_model.bin", "vocab.txt"))


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ((), "config.json"),
        (WHOLE[:1], "weights"),
        (WHOLE[:2], "tokenizer"),
        (("adapter_config.json", "adapter_model.safetensors"), "adapter"),
    ],
)
def test_a_folder_is_named_for_what_it_holds(tmp_path, files, lacks):
    assert lacks in refusal(make(tmp_path / "x", *files)).allowed


def test_an_adapter_names_its_base_model_and_a_run_its_policy(tmp_path):
    folder = tmp_path / "adapter"
    make(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-30B-A3B"}))
    assert "Qwen/Qwen3-30B-A3B" in refusal(folder).allowed
    make(tmp_path / "run" / "policy", *WHOLE)
    assert refusal(tmp_path / "run").next_step.endswith(f"{tmp_path}/run/policy")
    (tmp_path / "file").write_text("")
    assert "file" in refusal(tmp_path / "file").allowed


def test_a_misspelt_folder_gets_a_suggestion(tmp_path):
    make(tmp_path / "models" / "my-moe", *WHOLE)
    assert "'models/my-moe'" in refusal("models/my-meo").next_step
    assert "'models/my-moe'" in refusal("modles/my-moe").next_step
    assert f"'{tmp_path}/models/my-moe'" in refusal(tmp_path / "models" / "mymoe").next_step
    assert "did you mean" not in refusal("zzz/qqq").next_step


def test_the_hub_is_asked_only_where_it_is_named(tmp_path):
    assert "model.path=hub:owner/name" in refusal("Qwen/Qwen3-30B-A3B").next_step
    check_model_path("hub:Qwen/Qwen3-30B-A3B")
    assert "hub:owner/name" in refusal("hub:a/b/c").next_step
    make(hub_cache_folder() / "models--Qwen--Qwen3-30B-A3B" / "snapshots" / "abc", "config.json")
    check_model_path("Qwen/Qwen3-30B-A3B")
    assert load_config(None, ["model.path=hub:a/b"]).model.source == "a/b"
    assert load_config(None, ["model.path=~/x"]).model.source == os.path.expanduser("~/x")


def test_a_misspelt_model_is_told_at_once(tmp_path):
    began = time.monotonic()
    command = [sys.executable, "-m", "relibra", "train", "model.path=Qwen/Qwen3-30B-A3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: model.path, got 'Qwen/Qwen3-30B-A3': no folder")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - began < 30  # it took 52 s of retries; a busy machine imports for some


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_ranks_that_do_not_divide_the_experts_are_refused(tmp_path, name):
    folder = make(tmp_path / "moe")
    (tmp_path / "moe" / "config.json").write_text(json.dumps({"text_config": {name: 8}}))
    check_expert_ranks(folder, 4)
    with pytest.raises(ConfigError) as caught:
        check_expert_ranks(folder, 3)
    assert (caught.value.what, caught.value.got) == ("parallel.ranks", 3)
    (tmp_path / folder / "config.json").write_text(json.dumps({"num_experts": 16384, "is_moe": False}))
    check_expert_ranks(folder, 3)


def test_sizes_come_from_the_newest_download_too(tmp_path):
    assert read_model_sizes("hub:some/moe") == {}
    downloaded = tmp_path / "cache" / "hub" / "models--some--moe" / "snapshots"
    for age, experts in ((2, 8), (1, 16)):
        folder = downloaded / str(experts)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"num_experts": experts}))
        os.utime(folder / "config.json", (1e9 - age, 1e9 - age))
    assert read_model_sizes("hub:some/moe") == read_model_sizes("some/moe") == {"num_experts": 16}


@pytest.mark.parametrize("body", ["", "[]", "[" * 100_000, '{"text_config": 3}', '{"num_experts": "many"}'])
def test_an_unreadable_config_is_left_to_the_library(tmp_path, body):
    folder = make(tmp_path / "moe")
    (tmp_path / "moe" / "config.json").write_text(body)
    check_expert_ranks(folder, 3)
    assert read_model_sizes(3) == {}
