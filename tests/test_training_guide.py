"""What docs/training.md, docs/tasks.md and the README say of runs is what the code does."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from relibra.rl.config.defaults import PRESETS
from relibra.rl.config.run_config import RunConfig, load_config
from relibra.rl.config.settings import AlgorithmSettings
from relibra.rl.tasks.rewards import make_reward

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "training.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("docs/training.md", "docs/tasks.md", "README.md")}
SMALL = (
    "run.steps=2",
    "model.num_layers=1",
    "model.hidden_size=16",
    "rollout.prompts_per_step=4",
    "rollout.responses_per_prompt=2",
    "update.mini_batches=2",
    "evaluation.prompts=4",
)


def _commands(page: str) -> list[list[str]]:
    blocks = re.findall(r"```console\n(.*?)```", page, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if "train" in line or line[:1] == ["relibra"]]


def preset_table() -> list[str]:
    """Return the rows of the guide's table: every setting that a preset sets, where it has an effect."""
    settings = {name: load_config(None, [f"algorithm.preset={name}"]).algorithm for name in PRESETS}
    rows = []
    for name, field in AlgorithmSettings.model_fields.items():
        if not any(name in of_preset for of_preset in PRESETS.values()):
            continue
        only = {*(field.description or "").partition(": ")[0].split(", ")}  # "ppo, tppo: ..." is of these presets
        cells = []
        for preset, algorithm in settings.items():
            has_effect = preset in only or not only <= PRESETS.keys()
            cells.append(json.dumps(getattr(algorithm, name)).strip('"') if has_effect else "-")
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return rows


def test_the_table_of_presets_is_that_of_the_code():
    [table] = re.findall(r"<!-- presets -->\n(.*?)<!-- end -->", GUIDE, flags=re.DOTALL)
    header, _, *rows = table.splitlines()
    assert header == f"| setting | {' | '.join(f'`{name}`' for name in PRESETS)} |"
    assert rows == preset_table()


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_are_named_exist(page):
    sections = RunConfig.model_fields
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)(?=[`= ])", PAGES[page]):
        if section in sections:
            assert key in sections[section].annotation.model_fields, f"{section}.{key}"
    if page != "README.md":  # which names arguments of functions in the same way
        for key in re.findall(r"`([a-z_]+)=[\"a-z0-9.]+`", PAGES[page]):
            assert any(key in section.annotation.model_fields for section in sections.values()), key


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_settings_are_those_of_a_run(page):
    blocks = re.findall(r"```toml\n(.*?)```", PAGES[page], flags=re.DOTALL)
    assert blocks
    for block in blocks:
        load_config(None, base=tomllib.loads(block))


def test_runs_of_the_guide_to_eight_gpus_are_valid():
    text = (ROOT / "docs" / "guides" / "eight-gpus.md").read_text()
    blocks = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        assert len(block.splitlines()) == 10
        config = load_config(None, base=tomllib.loads(block))
        assert config.parallel.ranks in (1, 8)
    assert re.search(r"\*\*None of these runs was made on eight GPUs", text)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda file: file.name)
def test_examples_of_settings_are_those_of_a_run(file):
    config = load_config(file)
    if config.task.name == "prompts":
        rows = [json.loads(line) for line in (ROOT / config.task.file).read_text().splitlines()]
        assert len(rows) > config.evaluation.prompts
        assert all({"prompt", "answer", "characters"} == set(row) for row in rows)


@pytest.mark.parametrize("page", ["docs/training.md", "README.md"])
def test_commands_that_train_are_valid(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [words for words in _commands(PAGES[page]) if "train" in words and "--resume" not in words]
    assert commands
    for words in commands:
        first, *rest = [*words[words.index("train") + 1 :], ""]
        file = Path(first) if first.endswith(".toml") else None
        load_config(file, [word for word in (rest if file else [first, *rest]) if "=" in word])


FILES_OF_METRICS = ("step.py", "stopwatch.py", "run/step_metrics.py", "algorithms/mismatch.py", "trainer.py")


def test_the_row_of_metrics_is_explained_key_by_key():
    said = _keys_of_the_guide()
    assert len(said) == len(set(said)), "a key is explained twice"
    texts = [(ROOT / "src/relibra/rl" / name).read_text() for name in FILES_OF_METRICS]
    for key in said:
        assert any(f'"{key}"' in text for text in texts), f"nobody writes {key}"


def test_stages_are_those_of_a_step():
    stages = re.findall(r"^\| `([a-z ]+)` \|", GUIDE.split("## What a step does")[1].split("## ")[0], re.MULTILINE)
    timed = re.findall(r'clock\.(?:balanced_)?stage\("([a-z ]+)"', (ROOT / "src/relibra/rl/step.py").read_text())
    assert stages
    assert set(stages) == set(timed)


def test_the_reward_of_the_tasks_page_rates_its_rows(tmp_path, monkeypatch):
    [program] = re.findall(r"```python\n(.*?)```", PAGES["docs/tasks.md"], flags=re.DOTALL)
    rows = [json.loads(line) for line in re.findall(r"^\{.*\}$", PAGES["docs/tasks.md"], flags=re.MULTILINE)]
    assert len(rows) == 2
    (tmp_path / "reward_of_the_page.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    rate = make_reward("reward_of_the_page:score", "answer")
    assert [rate.function("17 + 25 = 42", row) for row in rows] == [1.0, 1.0]
    assert rate.function("43" + "." * 500, rows[0]) < 0


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder to run in that looks like a checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def _run(words, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
def test_commands_of_the_training_guide_run_one_after_another(checkout):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for words in _commands(GUIDE):
        command = [*torchrun, *words[1:]] if words[0] == "torchrun" else [sys.executable, "-m", *words]
        if "train" in words:
            small = [word for word in SMALL if "--resume" not in words or not word.startswith("model.")]
            warm_up = [] if any("own_prompts" in word for word in words) else ["warmup.steps=2", "warmup.batch=4"]
            command += [*small, *warm_up, *(["run.steps=3"] if "--resume" in words else [])]
        done = _run(command, checkout)
        assert done.returncode == 0, f"{words}: {done.stderr}"
    rows = [json.loads(line) for line in (checkout / "runs/tppo/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2], "the resumed run goes on"
    assert set(rows[0]) == set(_keys_of_the_guide())
    left = {path.name for path in (checkout / "runs").rglob("*") if path.parent.parent == checkout / "runs"}
    said = re.findall(r"^\| `([a-z.]+)/?[^`]*`", GUIDE.split("## What a run leaves")[1].split("## ")[0], re.MULTILINE)
    assert left - {".lock", ".launch"} == {*said, "tensorboard"}, "hidden files are not listed"


@pytest.mark.slow
def test_the_program_of_the_training_guide_prints_what_it_says(checkout):
    [(program, output)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, flags=re.DOTALL)
    (checkout / "program.py").write_text(program)
    done = _run([sys.executable, "program.py"], checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def _keys_of_the_guide() -> list[str]:
    table = GUIDE.split("## What is logged")[1].split("## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    return [key for cell in cells for key in re.findall(r"`([a-z0-9_]+)`", cell)]
