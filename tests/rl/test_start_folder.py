"""The folder that a server starts from: the weights that a run without a warm-up publishes first."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.model.tokenizer import make_tokenizer
from relibra.rl.start_folder import write_start_folder
from relibra.rl.tasks.make import make_task
from relibra.rl.toy.model import built_in_config, initial_model
from tests.rl.ranks_at_work import TINY


def test_the_folder_holds_the_model_before_the_first_step(tmp_path, capsys):
    served = ("rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=weights")
    config = load_config(None, [*TINY, *served, "run.seed=5"])
    write_start_folder(config, tmp_path / "start")
    assert capsys.readouterr().err == "", "no bar of a library"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    task = make_task(config.task, 5, 0)
    tokenizer = make_tokenizer("", task.characters, trust_remote_code=False)
    expected = initial_model(built_in_config(config.model, tokenizer.vocab_size, config.rollout.least_head_dim), 5)
    assert loaded.config.head_dim == 32
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in expected.state_dict().items())
    assert len(AutoTokenizer.from_pretrained(tmp_path / "start")) == tokenizer.vocab_size
    assert oct((tmp_path / "start" / "model.safetensors").stat().st_mode & 0o777) == "0o644"
    with pytest.raises(ConfigError, match="is not empty: choose a new folder"):
        write_start_folder(config, tmp_path / "start")


def test_a_run_with_a_model_of_its_own_exports_nothing(tmp_path):
    config = load_config(None, [f"model.path={tmp_path}"])
    with pytest.raises(ConfigError, match="is a folder to start a server from"):
        write_start_folder(config, tmp_path / "start")
