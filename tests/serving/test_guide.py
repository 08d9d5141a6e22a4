"""What docs/serving.md tells to run is run: the server, curl, the program, and a training."""

import base64
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

from relibra.cli.serve.app import app
from relibra.rl.config.run_config import load_config
from relibra.rl.run.checkpoints.policy_folder import write_start_folder
from tests.rl.ranks_at_work import TINY
from tests.serving.server_process import relibra_serve

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text().split("## Which GPUs")[0]
SERVE, CURL, PLACE, TRAIN = (shlex.split(block) for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL))


def test_settings_of_the_guide_are_those_of_a_run():
    assert TRAIN[:2] == ["relibra", "train"]
    assert load_config(None, TRAIN[2:]).rollout.engine == "serve"


def test_commands_of_placed_experts_are_options():
    """They run in test_placed_experts.py."""
    commands = " ".join(PLACE).split("relibra serve ")[1:]
    assert [line.split()[0] for line in commands] == ["models/mine", "place", "models/mine"]
    for verb, line in zip(("run", "place", "run"), commands, strict=True):
        shown = typer.main.get_command(app).commands[verb]
        known = {option for parameter in shown.params for option in parameter.opts}
        assert {word for word in line.split() if word.startswith("--")} <= known


@pytest.mark.slow
def test_the_guide_runs_from_top_to_bottom(tmp_path):
    write_start_folder(load_config(None, []), tmp_path / "mine")
    assert SERVE[:3] == ["relibra", "serve", "models/mine"]
    [program] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    options = [word for word in SERVE[3:] if word not in ("--port", "8100")]
    with relibra_serve(tmp_path / "mine", *options) as (url, _):
        words = [word.replace("localhost:8100", url.removeprefix("http://")) for word in CURL]
        streamed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        assert streamed.startswith("data: {")
        assert streamed.endswith("data: [DONE]\n\n")
        [curl] = re.findall(r"```bash\n(curl [^`]*/generate.*?)```", PAGE, flags=re.DOTALL)
        curl = curl.replace("\\\n", " ").replace("localhost:8100", url.removeprefix("http://"))
        answered = subprocess.run(shlex.split(curl), capture_output=True, text=True, timeout=60, check=True).stdout
        [choice] = json.loads(answered)["choices"]
        routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        assert routes.ndim == 3
        assert len(routes) >= 3
        program = program.replace("http://localhost:8100", url)
        subprocess.run([sys.executable, "-c", program], timeout=120, check=True)
    words = [sys.executable, "-m", *TRAIN, *TINY, f"run.folder={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
