"""Stands for a rank in tests of the launcher, and ends as the name of the run folder says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

from relibra.environment import error_file
from relibra.rl.run.run_failure import Exit


def main(place: dict[str, str]) -> None:
    run, told = Path(place["run"]), error_file()
    if run.name == "killed_beside_a_helper":
        helper = os.fork()
        if not helper:
            signal.pause()
        (run.parent / "helper.txt").write_text(str(helper))
        os.kill(os.getpid(), signal.SIGKILL)
    if run.name == "removed":
        shutil.rmtree(run)
        (run / "traces").mkdir(parents=True)
        about = {"message": "the folder is gone", "extraInfo": {"timestamp": "0"}}
        told.write_text(json.dumps({"message": about}))
        os._exit(Exit.FAILED)
    if run.name == "asked_to_stop_then_killed":
        (run / "checkpoints" / "step-00001").mkdir(parents=True)
        os.kill(os.getppid(), signal.SIGTERM)
        while (run / ".running").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if run.name == "stopped_for_long":
        os.kill(os.getpid(), signal.SIGSTOP)
    told.with_name("done").write_text("stopped" if run.name == "stopped" else "complete")
    if run.name == "crashing_at_its_end":
        os.kill(os.getpid(), signal.SIGABRT)
