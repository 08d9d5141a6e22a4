"""On how many ranks a run goes on that lost one for good, and what is counted as the cost."""

import json
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import ConfigError, EngineError
from relibra.rl.config.run_config import load_config
from relibra.rl.run import launch as launching
from relibra.rl.run.launch import MAX_RESTARTS, launch
from relibra.rl.run.run_failure import LostRankError, NoRoomError
from relibra.rl.run.run_folder import write_config
from relibra.rl.run.shrinking import ShrinkLog, Shrunk, fewer_ranks, measure_cost, read_step_lines


def line(step, seconds):
    return json.dumps({"step": step, "seconds": {"rollout": seconds / 4, "update": 3 * seconds / 4}})


@given(st.integers(1, 64), st.integers(0, 256))
def test_fewer_ranks_are_the_most_that_divide_the_experts(ranks, experts):
    allowed = [fewer for fewer in range(1, ranks) if experts % fewer == 0]
    assert fewer_ranks(ranks, experts) == (max(allowed) if allowed else None)


@pytest.fixture
def shrinking(monkeypatch, tmp_path):
    """Return a function that makes a run that loses a rank so many times; what it returns, and ranks of attempts."""

    def run(losses, ranks=4, kind=LostRankError):
        made = []

        def attempt(config, run):
            made.append(config.parallel.ranks)
            (run / "checkpoints" / "step-00003").mkdir(parents=True, exist_ok=True)
            write_config(run, config)
            if len(made) <= losses:
                raise kind("rank 1 was killed by SIGKILL")
            return True

        monkeypatch.setattr(launching, "_run_processes", attempt)
        settings = [f"run.folder={tmp_path}", f"parallel.ranks={ranks}", "plan.balancer=static"]
        try:
            return launch(load_config(None, settings), supervise=True, shrink=True), made
        except EngineError as error:
            return error, made

    return run


def test_a_run_shrinks_when_restarts_are_used_up(shrinking, capsys):
    tries = 1 + MAX_RESTARTS
    found, made = shrinking(2 * tries + 1)
    assert made == [4] * tries + [2] * tries + [1] * 2
    assert [(one.ranks_before, one.ranks, one.checkpoint) for one in found.shrunk] == [(4, 2, 3), (2, 1, 3)]
    assert "going on from step-00003 on 2 of 4 ranks" in capsys.readouterr().err


def test_a_run_on_one_rank_ends_after_its_restarts(shrinking):
    found, made = shrinking(99, 2)
    assert isinstance(found, LostRankError)
    assert made == [2] * (1 + MAX_RESTARTS) + [1] * (1 + MAX_RESTARTS)


def test_a_run_shrinks_at_once_where_a_cluster_has_no_room(shrinking):
    found, made = shrinking(2, 4, NoRoomError)
    assert (found.complete, made) == (True, [4, 2, 1])


def test_to_shrink_is_refused_without_supervision(tmp_path):
    with pytest.raises(ConfigError, match="needs --supervise"):
        launch(load_config(None, [f"run.folder={tmp_path}"]), shrink=True)
    assert not list(tmp_path.iterdir())


def test_the_cost_is_what_the_lines_of_steps_show(tmp_path):
    old = {step: line(step, 1.0 + step / 10) for step in range(7)}
    (tmp_path / "metrics.jsonl").write_text("\n".join([*old.values(), '{"step": 7, "sec']))
    log = ShrinkLog(tmp_path)
    log.note_loss("step-00004")
    assert read_step_lines(tmp_path) == old
    log.note_shrink(4, 2)
    [shrunk] = log.shrunk
    assert shrunk == Shrunk(ranks_before=4, ranks=2, checkpoint=4, steps_redone=3, step_seconds_before=1.4)
    assert measure_cost(shrunk, old, old, 9.0) == shrunk, "nothing was done anew"
    new = {step: old[step] for step in range(4)} | {4: line(4, 9.0), 5: line(5, 2.0)}
    on_the_way = measure_cost(shrunk, old, new, 10.0)
    assert (on_the_way.seconds, on_the_way.step_seconds) == (None, 2.0)
    back = measure_cost(on_the_way, old, new | {6: line(6, 3.0)}, 12.0)
    assert (back.seconds, back.step_seconds) == (12.0, 2.5)
    assert measure_cost(back, old, new | {6: line(6, 3.0), 7: line(7, 3.0)}, 15.0).seconds == 12.0


def test_steps_are_redone_from_where_the_run_had_been(tmp_path):
    """Also where the tries on all ranks came less far than the first."""
    log, metrics = ShrinkLog(tmp_path), tmp_path / "metrics.jsonl"
    for steps, checkpoint, redone in ((3, "step-00001", 2), (1, "step-00001", 2), (4, "step-00004", 0)):
        metrics.write_text("".join(line(step, 1.0) + "\n" for step in range(steps)))
        log.note_loss(checkpoint)
        log.note_shrink(2, 1)
        assert log.shrunk[-1].steps_redone == redone


def test_the_cost_is_printed_as_soon_as_it_is_known(tmp_path, capsys):
    log = ShrinkLog(tmp_path)
    log.note_loss("step-00001")
    log.note_shrink(2, 1)
    with log.watch():
        (tmp_path / "metrics.jsonl").write_text("".join(line(step, 0.5) + "\n" for step in range(3)))
        deadline = time.monotonic() + 10
        while log.shrunk[0].seconds is None and time.monotonic() < deadline:
            time.sleep(0.01)
        known = log.shrunk[0]
    assert known.seconds < 10
    assert known.step_seconds == 0.5
    assert json.loads(capsys.readouterr().err.removeprefix("shrunk: ")) == asdict(known)
