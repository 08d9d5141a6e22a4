"""What a supervised run does after lost ranks: restart from newer checkpoints, a bounded number of times."""

import pytest

from relibra.errors import ConfigError, EngineError
from relibra.rl.config.run_config import load_config
from relibra.rl.run import launch as launching
from relibra.rl.run.launch import MAX_RESTARTS, LostRankError, launch


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
def test_without_a_checkpoint_and_after_errors_of_a_rank_nothing_is_restarted(ends, attempts):
    assert attempts(ends)[1] == 1


def test_a_bad_row_of_the_task_is_told_before_processes_start_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "check_model_path", lambda _path: None)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n{"prompt": 7, "answer": "2"}\n')
    words = ["task.name=prompts", f"task.file={tmp_path / 'rows.jsonl'}", f"model.path={tmp_path}", "task.reward=exact"]
    config = load_config(None, [*words, f"run.folder={tmp_path / 'runs'}"])
    with pytest.raises(ConfigError, match="line 2: column 'prompt' is 7"):
        launch(config)
    assert not (tmp_path / "runs").exists()
