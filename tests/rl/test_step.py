"""What goes on from step to step."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from relibra.errors import ConfigError, EngineError
from relibra.rl.rollout import engines
from relibra.rl.rollout.admission import SampleCursor
from relibra.rl.rollout.embedded import EmbeddedEngine
from relibra.rl.step import Progress, largest_mismatch
from tests.rl.ranks_at_work import run_alone, tiny_config


def test_progress_comes_back_from_what_a_checkpoint_keeps():
    progress = Progress(cursor=SampleCursor(next_sample=6, passed_over=(2,)), finished=3, policy_steps=4, planned=True)
    assert Progress.from_state(progress.as_state(), []) == progress


def test_a_checkpoint_of_another_version_is_one_sentence():
    state = Progress().as_state()
    del state["passed_over"], state["finished"]
    with pytest.raises(ConfigError, match="lacks passed_over, finished: another version of relibra wrote it"):
        Progress.from_state(state, [])


@pytest.mark.usefixtures("_leave_group")
@pytest.mark.parametrize("replay", ["R3", "off"])
def test_a_sampler_of_another_temperature_ends_the_first_step(tmp_path, monkeypatch, replay):
    monkeypatch.setattr(engines, "EmbeddedEngine", lambda **given: EmbeddedEngine(**{**given, "temperature": 1.5}))
    settings = (f"algorithm.replay={replay}", "algorithm.group_filter=off", "run.steps=1", "warmup.steps=0")
    refused = r"step 0: trainer and sampler disagree before any update: log_ratio_mean_abs .* raise update.max_mismatch"
    with pytest.raises(EngineError, match=refused):
        run_alone(settings, tmp_path / "refused")
    assert not (tmp_path / "refused" / "metrics.jsonl").read_text()
    dist.destroy_process_group()
    [row] = run_alone((*settings, "update.max_mismatch=10"), tmp_path / "meant")
    assert row["log_ratio_mean_abs"] > 5e-3
    assert row["trained_tokens"] > 0


def test_the_limit_follows_from_the_types_of_trainer_and_sampler():
    server = ("rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=w")
    for overrides, expected in (
        (("model.dtype=float32",), 5e-3),
        (("model.dtype=float32", "rollout.engine=serve"), 5e-3),
        (("model.dtype=bfloat16",), 5e-2),
        (("model.dtype=bfloat16", "rollout.temperature=0.5"), 0.1),
        (("model.dtype=float32", *server), 5e-2),
        (("model.dtype=float32", "update.max_mismatch=0.5"), 0.5),
    ):
        assert largest_mismatch(tiny_config(*overrides)) == expected
