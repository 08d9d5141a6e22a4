"""Exported folders: the weights that a run without a warm-up publishes first, and the policy of a checkpoint."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from relibra.cli.export import export
from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.model.optimizer import make_optimizer
from relibra.rl.model.sharding import full_parameters
from relibra.rl.model.tokenizer import make_tokenizer
from relibra.rl.run.checkpoints.policy_folder import write_model_folder, write_policy_folder, write_start_folder
from relibra.rl.run.run_folder import write_config
from relibra.rl.tasks.make import make_task
from relibra.rl.toy.model import built_in_config, initial_model
from relibra.rl.toy.tasks import Arithmetic
from tests.rl import joined
from tests.rl.checkpoints import save_checkpoint
from tests.rl.ranks_at_work import TINY


def test_the_folder_holds_the_model_before_the_first_step(tmp_path, capsys):
    served = ("rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=weights")
    config = load_config(None, [*TINY, *served, "run.seed=5"])
    write_start_folder(config, tmp_path / "start")
    assert capsys.readouterr().err == "", "no bar of a library"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    task = make_task(config.task, 5, 0)
    tokenizer = make_tokenizer("", task.characters, config.task)
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


def test_a_run_without_a_checkpoint_exports_nothing(tmp_path):
    for step in (None, 2):
        with pytest.raises(ConfigError, match="has no checkpoint to export"):
            write_policy_folder(load_config(None, TINY), tmp_path, step, tmp_path / "out", "float32")


class Written:
    """A model of one file, which does something else before it is written."""

    def __init__(self, before):
        self.before = before

    def save_pretrained(self, folder):
        self.before()
        (folder / "model").write_text("weights")


def test_a_failed_export_leaves_another_to_its_folder_alone(tmp_path):
    def fail():
        raise OSError("disk full")

    def fail_meanwhile():
        with pytest.raises(ConfigError, match="disk full"):
            write_model_folder(Written(fail), lambda _: None, tmp_path / "out")

    write_model_folder(Written(fail_meanwhile), lambda _: None, tmp_path / "out")
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "model"]


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    """Return the folder of a run in bfloat16 with checkpoints after 2 and 5 steps, and the trained biases of each."""
    run = tmp_path_factory.mktemp("run")
    config = joined.tiny_config("model.dtype=bfloat16")
    write_config(run, config)
    trained = {}
    with joined.alone():
        policy = joined.policy_of(config, run, make_tokenizer("", Arithmetic.characters, config.task).vocab_size)
        for step in (2, 5):
            with torch.no_grad():
                policy.trained.lm_head.weight.add_(step / 1000)
            models = {
                "policy": (policy.trained, make_optimizer(policy.trained, 1e-3)),
                "critic": (nn.Linear(2, 1), None),
            }
            save_checkpoint(run, step, models=models, responses=[], state={}, keep=9)
            trained[step] = {name: full.detach().clone() for name, full in full_parameters(policy.trained)}
    return run, trained


@pytest.mark.parametrize(
    ("words", "step", "dtype"),
    [({}, 5, torch.bfloat16), ({"step": 2, "dtype": "float32"}, 2, torch.float32)],
)
def test_the_policy_of_a_checkpoint_is_exported(trained_run, words, step, dtype, tmp_path, capsys):
    run, trained = trained_run
    export(folder=tmp_path / "out", run=run, **words)
    assert capsys.readouterr().err.endswith(f"/step-0000{step}\n")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == dtype
    weights = dict(model.named_parameters())
    assert weights.keys() == trained[step].keys()
    assert all(torch.equal(weights[name], full.to(dtype)) for name, full in trained[step].items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+2=")


def test_exports_without_such_a_checkpoint_are_refused(trained_run, tmp_path):
    run, _ = trained_run
    with pytest.raises(ConfigError, match=r"--step 3: \S+ has checkpoints after the steps 2, 5"):
        export(folder=tmp_path / "out", run=run, step=3)
    with pytest.raises(ConfigError, match=r"has its own settings: leave out run\.seed=1"):
        export(folder=tmp_path / "out", run=run, settings=["run.seed=1"])
    with pytest.raises(ConfigError, match=r"cannot export .*: the folder does not exist"):
        export(folder=tmp_path / "out", run=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="give --run too"):
        export(folder=tmp_path / "out", step=3)
    shard = next((run / "checkpoints" / "step-00005" / "weights").glob("*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"step-00005 is damaged: .* bytes instead of"):
        export(folder=tmp_path / "out", run=run)
    shard.write_bytes(whole)
    assert not (tmp_path / "out").exists()
