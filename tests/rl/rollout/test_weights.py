"""Versions of the policy for servers: fresh folders that every user may read."""

import re

import pytest
from transformers import AutoModelForCausalLM

from relibra.errors import ConfigError
from relibra.rl.rollout.served.weights import write_version
from tests.rl.joined import policy_of, tiny_config

pytestmark = pytest.mark.usefixtures("group")


def test_a_version_is_a_fresh_folder_that_all_may_read(tmp_path):
    policy = policy_of(tiny_config(), tmp_path)
    first, last = (write_version(policy, tmp_path / "w", 11, setting="rollout.server_weights") for _ in range(2))
    assert {*(tmp_path / "w").iterdir()} == {first, last}, "a server may still read the folder before"
    assert re.fullmatch(r"version-000011-\w{8}", last.name)
    assert [oct(path.stat().st_mode & 0o777) for path in (last, last / "model.safetensors")] == ["0o755", "0o644"]
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all((loaded[name] == value).all() for name, value in policy.trained.state_dict().items())


def test_a_version_that_cannot_be_written_is_told(tmp_path):
    policy = policy_of(tiny_config("model.num_layers=1"), tmp_path)
    (tmp_path / "policy").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match=r"cannot write weights into .*policy.* \(rollout.server_weights\)"):
        write_version(policy, tmp_path / "policy", 1, setting="rollout.server_weights")
