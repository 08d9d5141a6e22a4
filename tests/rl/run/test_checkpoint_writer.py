"""Checkpoints written while training goes on: of the moment they were staged, one at a time, told where they fail."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch.distributed as dist

from relibra.errors import EngineError
from relibra.rl.config.settings import CheckpointSettings
from relibra.rl.run.checkpoints import checkpoint
from relibra.rl.run.checkpoints.checkpoint import load_checkpoint
from relibra.rl.run.checkpoints.checkpoint_writer import CheckpointWriter
from relibra.rl.run.ranks import is_peer_loss
from tests.rl.joined import on_ranks
from tests.rl.run.test_checkpoint import contents, learn, models_of, names, response, same, small, small_files

pytestmark = pytest.mark.usefixtures("group")


@contextmanager
def slow_disk():
    """Let writing wait, once the weights are written, until the yielded event is set."""
    event, digest_files = threading.Event(), checkpoint.digest_files

    def slowly(*args):
        assert event.wait(60)
        return digest_files(*args)

    with mock.patch.object(checkpoint, "digest_files", slowly):
        yield event


def stage_and_start(writer, step, models, responses=(), **state):
    writer.stage(step, models=models, responses=responses, state=state)
    writer.start()


def test_training_goes_on_and_checkpoint_has_bits_of_its_moment(tmp_path):
    models = models_of(tmp_path, seed=0)
    learn(models)
    before = contents(models)
    with CheckpointWriter(tmp_path, CheckpointSettings()) as writer:
        with slow_disk() as disk:
            stage_and_start(writer, 3, models, [response(1)], note="here")
            expected = learn(models, first=2)
            writer.check()
            waited = writer.take_seconds()
            assert names(tmp_path) == [".step-00003.partial"]
            assert same(contents(models), before), "training went on while the checkpoint was written"
            start = time.perf_counter()
            threading.Timer(1.0, disk.set).start()
            writer.wait()
            assert time.perf_counter() - start > 0.1
            assert writer.take_seconds() > 0.1 > waited
        writer.wait()
    resumed = models_of(tmp_path, seed=5)
    loaded = load_checkpoint(tmp_path, models=resumed)
    assert (loaded.step, loaded.state, len(loaded.responses)) == (3, {"note": "here"}, 1)
    assert same(contents(resumed), before) == []
    assert learn(resumed, first=2) == expected


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path):
    models = small()
    with CheckpointWriter(tmp_path, CheckpointSettings(keep=1)) as writer, slow_disk() as disk:
        stage_and_start(writer, 1, models)
        threading.Timer(0.1, disk.set).start()
        writer.stage(2, models=models, responses=[], state={})
        assert names(tmp_path) == ["step-00001"]
        writer.start()
        writer.wait()
    assert names(tmp_path) == ["step-00002"]


def test_in_the_foreground_start_waits(tmp_path):
    with CheckpointWriter(tmp_path, CheckpointSettings(background=False)) as writer:
        stage_and_start(writer, 1, small())
        assert names(tmp_path) == ["step-00001"]
        assert writer.take_seconds() > 0


def run_until_told(writer, models):
    """Save a checkpoint, and ask after each step what became of it."""
    stage_and_start(writer, 2, models)
    while True:
        writer.check()


def test_full_disk_is_told_at_a_later_step_and_checkpoint_stays(tmp_path):
    models = models_of(tmp_path)
    with CheckpointWriter(tmp_path, CheckpointSettings()) as writer:
        stage_and_start(writer, 1, models)
        writer.wait()
        with small_files(2000), pytest.raises(EngineError, match=r"cannot write the checkpoint .*File too large"):
            run_until_told(writer, models)
        assert names(tmp_path) == ["step-00001"]
        stage_and_start(writer, 3, models)
        writer.wait()
    assert names(tmp_path) == ["step-00001", "step-00003"]


def test_failing_run_finishes_the_checkpoint_being_written(tmp_path):
    def fail():
        with slow_disk() as disk, CheckpointWriter(tmp_path, CheckpointSettings()) as writer:
            stage_and_start(writer, 1, small())
            threading.Timer(0.1, disk.set).start()
            raise EngineError("of the run")

    with pytest.raises(EngineError, match="of the run"):
        fail()
    assert names(tmp_path) == ["step-00001"]


def die_while_writing(folder):
    """Rank 1 is killed in the middle of a write; rank 0 notices at its next step, and nobody hangs."""
    models = models_of(folder, ranks=2)
    with CheckpointWriter(folder, CheckpointSettings()) as writer:
        stage_and_start(writer, 1, models, number=1)
        learn(models)
        writer.wait()
        if dist.get_rank() == 1:

            def die(*_args):
                os.kill(os.getpid(), signal.SIGKILL)

            mock.patch.object(checkpoint, "digest_files", die).start()
        try:
            stage_and_start(writer, 2, models, number=2)
            writer.wait()
        except RuntimeError as error:
            (folder / "noticed").write_text(str(is_peer_loss(error)))
            os._exit(0)


@pytest.mark.slow
def test_a_kill_while_writing_loses_only_that_checkpoint(tmp_path):
    on_ranks(2, die_while_writing, tmp_path, expect_deaths=True)
    assert (tmp_path / "noticed").read_text() == "True"
    assert names(tmp_path) == [".step-00002.partial", "step-00001"]
    assert load_checkpoint(tmp_path, models=models_of(tmp_path)).state == {"number": 1}
