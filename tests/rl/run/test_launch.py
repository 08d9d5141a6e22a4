"""What becomes of a run whose ranks are lost, or do not end; a supervised one restarts a bounded number of times."""

import os
import signal

import pytest

from relibra.errors import ConfigError, EngineError
from relibra.rl.config.run_config import load_config
from relibra.rl.run import launch as launching
from relibra.rl.run import node_ranks
from relibra.rl.run.launch import MAX_RESTARTS, launch
from relibra.rl.run.run_failure import LostRankError


@pytest.fixture
def attempts(monkeypatch, tmp_path):
    """Return a function that makes a supervised run whose attempts end as told, and the number of attempts."""

    def run(ends):
        made = []

        def attempt(_config, run):
            error, checkpoint = ends[len(made)]
            made.append(error)
            if checkpoint is not None:
                (run / "checkpoints" / f"step-{checkpoint:05d}").mkdir(parents=True, exist_ok=True)
            if error is not None:
                raise error("rank 1 was killed by SIGKILL")
            return True

        monkeypatch.setattr(launching, "_run_processes", attempt)
        config = load_config(None, [f"run.folder={tmp_path}", "plan.balancer=static"])
        try:
            return launch(config, supervise=True), len(made)
        except EngineError as error:
            return error, len(made)

    return run


def test_restarts_are_bounded_without_a_newer_checkpoint(attempts):
    found, made = attempts([(LostRankError, 1)] * 20)
    assert isinstance(found, LostRankError)
    assert made == 1 + MAX_RESTARTS


def test_a_newer_checkpoint_counts_anew(attempts, capsys):
    found, made = attempts([*((LostRankError, step) for step in range(1, 9)), (None, None)])
    assert (found.complete, made) == (True, 9)
    assert "restarting from step-00008, 2 more" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [[(LostRankError, None)], [(EngineError, 3)]])
def test_no_restart_without_checkpoint_or_after_a_rank_error(ends, attempts):
    assert attempts(ends)[1] == 1


def test_bad_row_is_told_before_processes_start_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "check_model_path", lambda _path: None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": 7, "answer": "2"}\n')
    words = ["task.name=prompts", f"task.file={tmp_path / 'rows.jsonl'}", f"model.path={tmp_path}", "task.reward=exact"]
    config = load_config(None, [*words, f"run.folder={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match="line 2: column 'prompt' is 7"):
        launch(config)
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Return a function that launches a run of one stand-in."""
    monkeypatch.setattr(
        node_ranks, "START_RANK", node_ranks.START_RANK.replace("relibra.rl.run.rank", "tests.rl.run.stand_in")
    )
    monkeypatch.setattr(node_ranks, "STOPPED_SECONDS", -0.5)  # beyond a heartbeat of a second
    monkeypatch.setattr(node_ranks, "POLL_SECONDS", 0.1)

    def run(name, **options):
        words = [f"run.folder={tmp_path}", f"run.name={name}", "plan.balancer=static", "parallel.ranks=1"]
        return launch(load_config(None, [*words, "parallel.heartbeat_seconds=1"]), **options)

    return run


@pytest.mark.parametrize(
    ("name", "complete", "said"),
    [
        ("stopped", False, ""),
        ("crashing_at_its_end", True, "rank 0 had done its work when its process was ended by SIGABRT"),
    ],
)
def test_after_its_work_a_rank_cannot_fail(name, complete, said, launched, capfd):
    assert launched(name).complete is complete
    assert said in capfd.readouterr().err


def test_rank_stopped_for_long_is_named_if_no_other_rank_is_left(launched):
    with pytest.raises(LostRankError, match=r"the process of rank 0 is stopped \(SIGSTOP\)"):
        launched("stopped_for_long")


def test_launcher_leaves_environment_and_signal_handlers_alone(launched):
    before = dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()]
    launched("done")
    assert (dict(os.environ), [signal.getsignal(number) for number in signal.valid_signals()]) == before


def test_killed_rank_is_noticed_while_a_helper_keeps_files_open(launched, tmp_path):
    try:
        with pytest.raises(LostRankError, match="rank 0 was killed by SIGKILL"):
            launched("killed_beside_a_helper")
    finally:
        os.kill(int((tmp_path / "helper.txt").read_text()), signal.SIGKILL)


def test_removed_run_folder_is_not_said_to_keep_anything(launched, tmp_path, capfd):
    with pytest.raises(EngineError, match=r"^the run ended early: rank 0 failed \(see above\)$"):
        launched("removed")
    assert "rank 0: the folder is gone" in capfd.readouterr().err
    assert not (tmp_path / "removed").exists()


def test_supervised_run_asked_to_stop_does_not_start_again(launched, capfd):
    with pytest.raises(EngineError, match="rank 0 was killed by SIGKILL") as raised:
        launched("asked_to_stop_then_killed", supervise=True)
    assert not isinstance(raised.value, LostRankError)
    assert "restarting" not in capfd.readouterr().err
