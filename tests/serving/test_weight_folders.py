"""Folders from which clients let a server load weights: below that of --updates, links resolved."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from fastapi import HTTPException

from relibra.errors import ConfigError
from relibra.serving.roles.checkpoint import open_checkpoint, read_config
from relibra.serving.server.admission import Admission
from relibra.serving.server.weights import ReloadArguments, ServedWeights, WorkerCall


class NoLoading(Admission):
    """Stands in for the queue; loading would begin where a folder was accepted."""

    def __init__(self):
        """Hold nothing."""

    @property
    def clients(self):
        raise InterruptedError


def loads(updates, path):
    """Return whether a folder is accepted, or the sentence that refuses it."""
    call = WorkerCall(method="reload_weights", kwargs=ReloadArguments(weights_path=str(path)))
    with pytest.raises((InterruptedError, HTTPException)) as caught:
        asyncio.run(ServedWeights(NoLoading(), updates).load(call))
    return isinstance(caught.value, InterruptedError) or f"{caught.value.status_code} {caught.value.detail}"


def test_weights_come_from_below_the_folder_of_updates_only(tmp_path, monkeypatch):
    inside, outside = tmp_path / "updates", tmp_path / "updates-2"
    for folder in (inside / "one", inside / "linking", outside):
        folder.mkdir(parents=True)
    (outside / "model.safetensors").write_bytes(b"")
    (inside / "link").symlink_to(outside)
    (inside / "linking" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (tmp_path / "alias").symlink_to(inside)
    monkeypatch.chdir(tmp_path)
    for path in (inside / "one", "updates/one", tmp_path / "alias" / "one", inside / "link" / ".." / "updates" / "one"):
        assert loads(inside, path) is True, path
        assert loads(tmp_path / "alias", path) is True, path
    refused = ["nowhere", outside, inside / "link", inside / "linking", inside / "one" / ".." / ".." / "updates-2", "/",
               "/etc/hostname", "/nowhere", inside / "nowhere", "a" * 300, "a\0b"]  # fmt: skip
    sentences = {str(loads(inside, path)).replace(str(path)[:300], "", 1) for path in refused}
    assert len(sentences) == 1, "whether a folder elsewhere exists is not told"


def test_nothing_of_a_folder_elsewhere_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "updates").mkdir()

    def listed(folder):
        raise AssertionError(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    assert "no folder below" in loads(tmp_path / "updates", tmp_path)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "below/model.safetensors"])
def test_an_index_names_files_of_its_own_folder_only(name, tmp_path):
    index = {"weight_map": {"one": "model.safetensors", "other": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="no file of its folder"):
        open_checkpoint(tmp_path)


def test_the_folder_of_a_run_names_that_of_its_policy(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "policy"))):
        read_config(tmp_path)
