"""Checkpoints: the same bits again, whole or not there, on any number of ranks."""

import copy
import errno
import json
import logging
import os
import re
import resource
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from relibra.errors import ConfigError, EngineError
from relibra.parallel import relocate
from relibra.parallel.balanced import balanced_layers
from relibra.rl.model.critic import build_critic
from relibra.rl.model.optimizer import make_optimizer
from relibra.rl.model.sharding import full_parameters
from relibra.rl.run.checkpoints import checkpoint
from relibra.rl.run.checkpoints.checkpoint import load_checkpoint
from tests.replay.tiny_models import random_tokens
from tests.rl.checkpoints import save_checkpoint
from tests.rl.joined import CPU, on_ranks, policy_of, tiny_config
from tests.rl.made_up import random_response
from tests.rl.made_up import same as same_response

pytestmark = pytest.mark.usefixtures("group")

STATE = {"next_sample": 17, "note": "anything", "alpha": 0.1}


def response(sample_id):
    return random_response(sample_id, 0, dtype=None)


def models_of(folder, *overrides, ranks=1, seed=0, reference=False):
    """Return a policy and a critic with their optimizers."""
    config = tiny_config("algorithm.preset=ppo", f"run.seed={seed}", *overrides, ranks=ranks)
    policy = policy_of(config, folder)
    critic = build_critic(config.model, policy, folder, CPU)
    models = {
        "policy": (policy.trained, make_optimizer(policy.trained, 1e-2)),
        "critic": (critic, make_optimizer(critic, 1e-2)),
    }
    return models | ({"reference": (copy.deepcopy(policy.copy), None)} if reference else {})


def learn(models, steps=2, first=0):
    """Make optimizer steps; return the losses."""
    losses = []
    for number in range(first, first + steps):
        for model, optimizer in models.values():
            if optimizer is not None:
                tokens = random_tokens(2, 8, seed=10 * number + dist.get_rank())
                loss = (model(input_ids=tokens, use_cache=False).logits.float() - 0.5).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
    return losses


def contents(models):
    """Return copies of all weights and states of this rank, as they lie in memory."""
    found = {}
    for name, (model, optimizer) in models.items():
        for key, parameter in model.named_parameters():
            found[f"{name} {key}"] = parameter
            for state, value in (optimizer.state[parameter] if optimizer else {}).items():
                found[f"{name} {key} {state}"] = value
    return {key: getattr(value.detach(), "_local_tensor", value.detach()).clone() for key, value in found.items()}


def whole(models):
    """Return all weights and states, gathered whole, in logical order."""
    found = {}
    for name, (model, optimizer) in models.items():
        found |= {f"{name} {key}": value.clone() for key, value in full_parameters(model)}
        if optimizer:
            with checkpoint.in_logical_order({name: (model, optimizer)}):
                for key, parameter in model.named_parameters():
                    for state, value in optimizer.state[parameter].items():
                        full = value.full_tensor() if hasattr(value, "full_tensor") else value
                        found[f"{name} {key} {state}"] = full.clone()
    return found


def same(one, other):
    assert one.keys() == other.keys()
    return [key for key in one if one[key].dtype != other[key].dtype or not torch.equal(one[key], other[key])]


@pytest.mark.parametrize(
    ("overrides", "trained"),
    [((), ("policy", "critic")), (("model.dtype=bfloat16",), ("policy", "critic")), ((), ("critic",))],
)
def test_a_resumed_run_has_the_same_bits(tmp_path, overrides, trained):
    """The first steps of a run may train the value model alone."""
    models = models_of(tmp_path, *overrides, reference=True)
    learn({name: models[name] for name in trained})
    before = contents(models)
    folder = save_checkpoint(tmp_path, 10, models=models, responses=[response(3), response(1)], state=STATE, keep=2)
    assert folder == tmp_path / "checkpoints" / "step-00010"
    assert same(contents(models), before) == []
    expected = learn(models, first=2)

    resumed = models_of(tmp_path, *overrides, seed=5, reference=True)
    learn(resumed, steps=1)  # whatever the optimizer knew is forgotten
    loaded = load_checkpoint(tmp_path, models=resumed)
    assert (loaded.step, loaded.state) == (10, STATE)
    assert [r.sample_id for r in loaded.responses] == [3, 1], "in the order of the rank that saved them"
    assert same_response(loaded.responses[0], response(3))
    assert same_response(loaded.responses[1], response(1))
    assert same(contents(resumed), before) == []
    assert any(resumed["policy"][1].state.values()) == ("policy" in trained)
    assert learn(resumed, first=2) == expected


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    models = models_of(tmp_path)
    learn(models, steps=1)
    folder = save_checkpoint(tmp_path, 1, models=models, responses=[], state={}, keep=1)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == [
        "manifest.json",
        "responses/rank-00000.safetensors",
        "state.json",
        "weights/shard-00001-model-00001-of-00001.safetensors",
    ]
    assert json.loads((folder / "manifest.json").read_text())["files"].keys() == set(files) - {"manifest.json"}


def small():
    """Return a model that is quickly saved."""
    model = torch.nn.Linear(3, 2)
    return {"model": (model, make_optimizer(model, 1e-3))}


def save(run, step, models=None, keep=9, **state):
    return save_checkpoint(run, step, models=models or small(), responses=[], state=state, keep=keep)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_only_the_latest_are_kept_and_nothing_hidden_is_left(tmp_path):
    for step in (5, 10, 15, 100_000):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00015", "step-100000"]


def test_step_saved_again_replaces_its_checkpoint_and_later_ones(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, tries=1)
    save(tmp_path, 10, tries=2)
    assert names(tmp_path) == ["step-00005", "step-00010"]
    assert load_checkpoint(tmp_path, models=small()).state == {"tries": 2}


def test_a_run_without_checkpoints_starts_anew(tmp_path):
    assert load_checkpoint(tmp_path, models=small()) is None
    (tmp_path / "checkpoints" / ".step-00010.partial").mkdir(parents=True)
    assert load_checkpoint(tmp_path, models=small()) is None


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rewrite_format(path):
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


WEIGHTS = "weights/shard-00001-model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        (WEIGHTS, cut_off, r"has \d+ bytes instead of \d+"),
        (WEIGHTS, flip_a_bit, "has changed contents"),
        (WEIGHTS, Path.unlink, "No such file"),
        ("state.json", flip_a_bit, "has changed contents"),
        ("responses/rank-00000.safetensors", flip_a_bit, "has changed contents"),
        ("manifest.json", Path.unlink, "its manifest.json cannot be read"),
        ("manifest.json", cut_off, ""),
        ("manifest.json", rewrite_format, "its format is 2, this version of relibra reads 1"),
        (
            "weights/more.safetensors",
            lambda path: path.write_bytes(b""),
            "weights/more.safetensors is not in its manifest",
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_aloud(tmp_path, caplog, file, damage, told):
    save(tmp_path, 1, number=1)
    damage(save(tmp_path, 2, number=2) / file)
    if (file, damage) == ("manifest.json", cut_off):  # only its last line break is gone
        assert load_checkpoint(tmp_path, models=small()).step == 2
        return
    with caplog.at_level(logging.WARNING):
        loaded = load_checkpoint(tmp_path, models=small())
    assert (loaded.step, loaded.state) == (1, {"number": 1})
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "step-00002 is damaged and was skipped: " in record.message
    assert re.search(told, record.message)


def test_when_all_are_damaged_nothing_is_trained_on(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "state.json").unlink()
    with pytest.raises(
        ConfigError, match=r"none of the checkpoints in .* can be read \(step-00002, step-00001\): state"
    ):
        load_checkpoint(tmp_path, models=small())


def test_a_checkpoint_of_other_models_is_refused(tmp_path):
    save(tmp_path, 1)
    other = {"critic": small()["model"]}
    with pytest.raises(ConfigError, match=r"holds model, this run has critic: resume with the configuration"):
        load_checkpoint(tmp_path, models=other)
    for wider in (torch.nn.Linear(4, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))):
        with pytest.raises(
            ConfigError, match=r"step-00001 does not fit the models of this run: rank 0: .*; resume with"
        ):
            load_checkpoint(tmp_path, models={"model": (wider, None)})


@contextmanager
def small_files(limit):
    """Let no file of this process grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [100, 2000])  # in the way of the responses, or of the weights
def test_full_disk_is_one_sentence_and_last_checkpoint_stays(tmp_path, limit):
    models = models_of(tmp_path)
    save(tmp_path, 1, models=small(), number=1)
    with (
        small_files(limit),
        pytest.raises(
            EngineError, match=r"cannot write the checkpoint .* \(rank 0: .*File too large.*\): earlier checkpoints"
        ),
    ):
        save(tmp_path, 2, models=models)
    assert names(tmp_path) == ["step-00001"]
    assert load_checkpoint(tmp_path, models=small()).step == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00001", "step-00002"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(EngineError, match=r"cannot write the checkpoint .*\(rank 0: (File exists|Not a directory)\)"):
        save(tmp_path, 1)


# --- several ranks -------------------------------------------------------------------------------------------------


def move_homes(models, seed):
    model, optimizer = models["policy"]
    layers = balanced_layers(model).values()
    rng = np.random.default_rng(seed)
    relocate(model, np.stack([rng.permutation(len(layer.physical_to_logical_E)) for layer in layers]), optimizer)


def homes(models):
    return [layer.physical_to_logical_E.tolist() for layer in balanced_layers(models["policy"][0]).values()]


def save_on_ranks(folder):
    """Train, move experts, save; go on, and say what came of it."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    folder = folder / str(ranks)
    folder.mkdir(exist_ok=True)
    models = models_of(folder, ranks=ranks, reference=True)
    learn(models, steps=1)
    if ranks > 1:
        move_homes(models, seed=1)
    learn(models, steps=1, first=1)
    before = contents(models)
    own = [response(number) for number in range(7) if number % ranks == rank]
    save_checkpoint(folder, 4, models=models, responses=own, state=STATE, keep=1)
    assert same(contents(models), before) == []
    if ranks > 1:
        assert homes(models) != [[0, 1, 2, 3]] * 2
    found = {"before": before, "whole": whole(models), "homes": homes(models) if ranks > 1 else None}
    return found | {"after": learn(models, first=2), "contents after": contents(models)}


def load_on_ranks(folder):
    """Load what 1, 2 and 4 ranks saved; say what it was and what came of it."""
    models = models_of(folder, ranks=dist.get_world_size(), seed=3, reference=True)
    return {saving: load_what_was_saved(folder / str(saving), models) for saving in (1, 2, 4)}


def load_what_was_saved(folder, models):
    ranks = dist.get_world_size()
    learn(models, steps=1)  # whatever they know and wherever experts are, is forgotten
    if ranks > 1:
        move_homes(models, seed=2)
    loaded = load_checkpoint(folder, models=models)
    found = {"before": contents(models), "whole": whole(models), "homes": homes(models) if ranks > 1 else None}
    found["responses"] = [r.sample_id for r in loaded.responses]
    assert all(same_response(r, response(r.sample_id)) for r in loaded.responses)
    assert (loaded.step, loaded.state) == (4, STATE)
    return found | {"after": learn(models, first=2), "contents after": contents(models)}


def save_and_load(folder):
    """Save on four ranks, and load what they and fewer have saved."""
    return save_on_ranks(folder), load_on_ranks(folder)


@pytest.mark.slow
def test_any_number_of_ranks_resumes_what_any_number_saved(tmp_path):
    written = {1: [save_on_ranks(tmp_path)], 2: on_ranks(2, save_on_ranks, tmp_path)}
    on_four = on_ranks(4, save_and_load, tmp_path)
    written[4] = [saved for saved, _ in on_four]
    read = {1: [load_on_ranks(tmp_path)], 2: on_ranks(2, load_on_ranks, tmp_path), 4: [loaded for _, loaded in on_four]}
    for loading, saving in product((1, 2, 4), repeat=2):
        for rank, of_rank in enumerate(read[loading]):
            found, there = of_rank[saving], written[saving][rank % saving]
            assert same(found["whole"], there["whole"]) == [], (saving, loading)
            assert found["responses"] == list(range(7))[rank::loading]
            if saving == loading:
                assert found["homes"] == there["homes"]
                assert same(found["before"], there["before"]) == []
                assert found["after"] == there["after"]
                assert same(found["contents after"], there["contents after"]) == []
            elif loading > 1:
                assert found["homes"] == [[0, 1, 2, 3]] * 2


def fail_on_one_rank(folder):
    """Rank 1 runs out of disk, in each phase of writing; nobody hangs, everybody is told, and training goes on."""
    models = models_of(folder, ranks=2)
    move_homes(models, seed=1)
    learn(models, steps=1)
    save_checkpoint(folder, 1, models=models, responses=[], state={}, keep=1)
    before, told = contents(models), []

    def full(*_args, **_settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("save_responses", "torch", "digest_files", "write_manifest"):
        failing = dist.get_rank() == (0 if name == "write_manifest" else 1)
        where = "torch.distributed.checkpoint.filesystem._write_files_from_queue" if name == "torch" else ""
        with (
            mock.patch(where or f"relibra.rl.run.checkpoints.checkpoint.{name}", full) if failing else mock.MagicMock()
        ):
            try:
                save_checkpoint(folder, 2, models=models, responses=[], state={}, keep=1)
            except EngineError as error:
                told.append(str(error))
        dist.barrier()
        assert names(folder) == ["step-00001"], name
        assert same(contents(models), before) == []
    return {"told": told, "after": learn(models), "step": load_checkpoint(folder, models=models).step}


@pytest.mark.slow
def test_a_rank_without_room_leaves_the_last_checkpoint(tmp_path):
    both = on_ranks(2, fail_on_one_rank, tmp_path)
    for found in both:
        assert len(found["told"]) == 4
        assert all("No space left on device): earlier checkpoints are unchanged" in told for told in found["told"])
        assert found["step"] == 1
    assert both[0]["told"] == both[1]["told"]
