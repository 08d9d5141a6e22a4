"""What goes on from step to step."""

from __future__ import annotations

import pytest

from relibra.errors import ConfigError
from relibra.rl.rollout.admission import SampleCursor
from relibra.rl.step import Progress


def test_progress_comes_back_from_what_a_checkpoint_keeps():
    progress = Progress(cursor=SampleCursor(next_sample=6, passed_over=(2,)), finished=3, policy_steps=4, planned=True)
    assert Progress.from_state(progress.as_state(), []) == progress


def test_a_checkpoint_of_another_version_is_one_sentence():
    state = Progress().as_state()
    del state["passed_over"], state["finished"]
    with pytest.raises(ConfigError, match="lacks passed_over, finished: another version of relibra wrote it"):
        Progress.from_state(state, [])
