"""The wheel alone, in an empty environment outside the checkout, runs the commands of the README."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 600


def _run(words, cwd):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=clean, text=True, capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _answer(words, cwd):
    """Serve a model, and return the answer to one request."""
    with subprocess.Popen(words, cwd=cwd, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        addresses = (re.search(r"at (http://\S+)/v1 ", line) for line in server.stderr)
        url = next(found for found in addresses if found)[1]
        body = json.dumps({"prompt": "3+4=", "max_tokens": 4, "ignore_eos": True}).encode()
        request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with build_opener(ProxyHandler({})).open(request, timeout=SECONDS) as answer:
            found = json.load(answer)
        server.stdin.close()
        server.stderr.read()
    assert server.returncode == -signal.SIGTERM  # the end of its input counts as this signal
    return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the programs of an environment with the wheel and what it needs, and a folder beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    _run([sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], folder)
    [wheel] = folder.glob("relibra-*.whl")
    venv.create(folder / "environment", with_pip=True)
    programs = folder / "environment" / "bin"
    torch = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install torch"))
    _run([programs / "python", *pip, "install", torch.split()[2]], folder)
    _run([programs / "python", *pip, "install", f"{wheel}[train,report,serve]"], folder)
    work = folder / "work"
    work.mkdir()
    return programs, work


@pytest.mark.slow
def test_commands_of_the_readme_run_from_the_wheel(installed):
    programs, work = installed
    where = _run([programs / "python", "-c", "import relibra; print(relibra.__file__)"], work)
    assert Path(where.strip()).is_relative_to(programs.parent)
    shutil.copy(ROOT / "examples" / "demo.toml", work)
    relibra = programs / "relibra"
    trained = _run([relibra, "train", "demo.toml", "run.steps=2", "warmup.steps=20", "--json"], work)
    assert json.loads(trained)["complete"]
    _run([relibra, "report", "runs/demo"], work)
    sizes = ("--ranks", 16, "--micro-batch-tokens", 256, "--mini-batches", 1, "--model", "qwen3-30b-a3b")
    planned = json.loads(_run([relibra, "plan", "runs/demo", *sizes, "--json"], work))
    assert planned["skew"]
    _run([relibra, "simulate", "runs/demo", *sizes], work)
    answer = _answer([relibra, "serve", "runs/demo/policy", "--experts", "2", "--port", "0", "--until-eof"], work)
    assert answer["usage"]["completion_tokens"] == 4
