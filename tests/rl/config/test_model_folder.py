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
    return str(caught.value)


def test_a_whole_folder_is_a_model(tmp_path):
    check_model_path(make(tmp_path / "a", *WHOLE))
    check_model_path(make(tmp_path / "b", "config.json", "pytorch_model.bin", "vocab.txt"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "has no config.json"),
        (WHOLE[:1], "has no weights"),
        (WHOLE[:2], "has no tokenizer that can be loaded"),
        (("adapter_config.json", "adapter_model.safetensors"), "holds an adapter, not a model: merge it"),
    ],
)
def test_a_folder_is_named_for_what_it_holds(tmp_path, files, said):
    assert said in refusal(make(tmp_path / "x", *files))


def test_an_adapter_names_its_base_model_and_a_run_its_policy(tmp_path):
    folder = tmp_path / "adapter"
    make(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-30B-A3B"}))
    assert "an adapter of 'Qwen/Qwen3-30B-A3B', not a model" in refusal(folder)
    make(tmp_path / "run" / "policy", *WHOLE)
    assert "is the folder of a run: its model is in" in refusal(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")


def test_a_misspelt_folder_gets_a_suggestion(tmp_path):
    make(tmp_path / "models" / "my-moe", *WHOLE)
    assert "(did you mean 'models/my-moe'?)" in refusal("models/my-meo")
    assert "(did you mean 'models/my-moe'?)" in refusal("modles/my-moe")
    assert f"(did you mean '{tmp_path}/models/my-moe'?)" in refusal(tmp_path / "models" / "mymoe")
    assert "did you mean" not in refusal("zzz/qqq")


def test_the_hub_is_asked_only_where_it_is_named(tmp_path):
    assert "name the hub: model.path=hub:owner/name" in refusal("Qwen/Qwen3-30B-A3B")
    check_model_path("hub:Qwen/Qwen3-30B-A3B")
    assert "is no name on the hub" in refusal("hub:a/b/c")
    make(hub_cache_folder() / "models--Qwen--Qwen3-30B-A3B" / "snapshots" / "abc", "config.json")
    check_model_path("Qwen/Qwen3-30B-A3B")
    assert load_config(None, ["model.path=hub:a/b"]).model.source == "a/b"
    assert load_config(None, ["model.path=~/x"]).model.source == os.path.expanduser("~/x")


def test_a_misspelt_model_is_told_at_once(tmp_path):
    began = time.monotonic()
    command = [sys.executable, "-m", "relibra", "train", "model.path=Qwen/Qwen3-30B-A3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: model.path 'Qwen/Qwen3-30B-A3' is no folder")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - began < 30  # it took 52 s of retries; a busy machine imports for some


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_ranks_that_do_not_divide_the_experts_are_refused_before_anything_is_loaded(tmp_path, name):
    folder = make(tmp_path / "moe")
    (tmp_path / "moe" / "config.json").write_text(json.dumps({"text_config": {name: 8}}))
    check_expert_ranks(folder, 4)
    with pytest.raises(ConfigError, match=r"parallel\.ranks 3 does not divide the 8 experts"):
        check_expert_ranks(folder, 3)
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
def test_an_unreadable_config_is_left_to_the_library_that_loads_it(tmp_path, body):
    folder = make(tmp_path / "moe")
    (tmp_path / "moe" / "config.json").write_text(body)
    check_expert_ranks(folder, 3)
    assert read_model_sizes(3) == {}
