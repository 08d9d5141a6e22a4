"""Settings of runs whose responses come from a server."""

import pytest

from relibra.errors import ConfigError
from relibra.rl.config.run_config import load_config
from relibra.rl.rollout.served.api_key import read_api_key
from relibra.rl.toy.model import built_in_config

SERVED = ("rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=weights")


def test_heads_of_the_built_in_model_fit_a_server():
    def width(*overrides):
        config = load_config(None, overrides)
        return built_in_config(config.model, 32, config.rollout.least_head_dim).head_dim

    assert (width(), width(*SERVED), width(*SERVED, "model.hidden_size=512")) == (16, 32, 128)


def test_new_weights_do_not_overwrite_the_model(tmp_path):
    (tmp_path / "policy").mkdir()
    for folder in (tmp_path / "policy", tmp_path / "policy" / ".." / "policy"):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [*SERVED, f"rollout.server_weights={folder}", f"model.path={tmp_path / 'policy'}"])
        assert caught.value.what == "rollout.server_weights"
    load_config(None, [*SERVED, f"rollout.server_weights={tmp_path}", f"model.path={tmp_path / 'policy'}"])


def test_a_key_among_the_settings_is_refused_and_not_shown():
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [*SERVED, "rollout.api_key_from=sk-secret"])
    assert refusal.value.what == "rollout.api_key_from"
    assert "secret" not in str(refusal.value)


def test_a_key_beside_one_of_a_file_is_not_shown(tmp_path):
    (tmp_path / "run.toml").write_text('[rollout]\napi_key_from = "env:KEY"\n')
    with pytest.raises(ConfigError) as refusal:
        load_config(tmp_path / "run.toml", [*SERVED, 'rollout={api_key_from="sk-secret"}'])
    assert "secret" not in str(refusal.value)


def test_keys_come_from_the_environment_or_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", " sk-1 \n")
    (tmp_path / "key").write_text("sk-2\n")
    (tmp_path / "two").write_text("sk 3\n")
    assert read_api_key("") == ""
    assert read_api_key("env:SERVER_KEY") == "sk-1"
    assert read_api_key(f"file:{tmp_path / 'key'}") == "sk-2"
    for source, says in {
        "env:NO_SUCH_KEY": "the environment variable NO_SUCH_KEY holds no key",
        f"file:{tmp_path / 'two'}": "holds no key",
        f"file:{tmp_path / 'none'}": "cannot read",
    }.items():
        with pytest.raises(ConfigError, match=says) as refusal:
            read_api_key(source)
        assert "sk 3" not in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("rollout.sleep=true", "rollout.transfer=nccl"), "sleep"),
        (("rollout.sleep=true", "rollout.transfer=gloo"), "sleep"),
        (("rollout.transfer=ipc",), "transfer"),
        (("rollout.transfer=ipc", "rollout.url=http://127.0.0.1:1,http://h:2"), "transfer"),
        (("rollout.transfer=gloo", "rollout.engine=sglang"), "transfer"),
        (("rollout.transfer=gloo", "rollout.engine=embedded"), "transfer"),
        (("rollout.sleep=true", "rollout.engine=embedded"), "sleep"),
    ],
)
def test_ways_that_cannot_work_are_refused_by_name(overrides, what):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*SERVED, *overrides])
    assert caught.value.what == f"rollout.{what}"


def test_weights_go_through_files_unless_told_otherwise():
    rollout = load_config(None, [*SERVED]).rollout
    assert (rollout.transfer, rollout.sleep) == ("folder", False)
    for how in ("gloo", "nccl"):  # needs no folder
        assert load_config(None, [*SERVED[:2], f"rollout.transfer={how}"]).rollout.server_weights is None
    both = ["rollout.transfer=ipc", "rollout.sleep=true", "rollout.url=http://localhost:1"]
    assert load_config(None, [*SERVED[:1], *both]).rollout.sleep


def test_several_servers_are_a_list_or_a_text_with_commas(tmp_path):
    two = ("http://h:1", "http://h:2")
    for override in ("rollout.url=http://h:1, http://h:2", 'rollout.url=["http://h:1", "http://h:2"]'):
        assert load_config(None, [*SERVED, override]).rollout.url == two
    (tmp_path / "run.toml").write_text(
        '[rollout]\nengine = "vllm"\nserver_weights = "weights"\nurl = ["http://h:1", "http://h:2"]\n'
    )
    config = load_config(tmp_path / "run.toml")
    assert config.rollout.url == two
    assert load_config(None, base=config.model_dump(mode="json")).rollout.url == two
    for url, what in {"http://h:1,h:2": "url", "http://h:1,http://h:1/": "url", ",": "engine"}.items():
        with pytest.raises(ConfigError) as caught:
            load_config(None, [*SERVED, f"rollout.url={url}"])
        assert caught.value.what == f"rollout.{what}"
    assert load_config(None, [*SERVED, "rollout.url=http://h:1,http://h:2", "rollout.engine=sglang"]).rollout.url == two
