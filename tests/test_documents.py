"""What the documents print is what the code prints."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def _output_of(program):
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_blocks_print_what_they_say():
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == README.count("```python")
    for program, output in blocks:
        assert _output_of(program) == output


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_print_what_they_say(example):
    text = example.read_text()
    expected = text.split("# Output:\n")[1]
    assert "".join(f"# {line}\n" for line in _output_of(text).splitlines()) == expected


def test_readme_names_commands_that_exist():
    for line in re.findall(r"^\| `relibra ([a-z ]+?) (?:[A-Z]|--|\[)", README, flags=re.MULTILINE):
        done = subprocess.run(
            [sys.executable, "-m", "relibra", *line.split(), "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, line
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_file_map_names_every_package():
    listed = set(re.findall(r"^  (\w+(?:/|\.py)) ", README, flags=re.MULTILINE))
    package = ROOT / "src" / "relibra"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert listed == folders | files


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_tables_come_from_result_files(page):
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    text = (ROOT / page).read_text()
    assert render.rendered(text) == text, "run python benchmarks/render.py"


def test_result_rows_without_provenance_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from provenance import write_results

    from relibra import ConfigError

    with pytest.raises(ConfigError, match="lacks"):
        write_results("nothing", [{"case": "x", "label": "measured"}])
    with pytest.raises(ConfigError, match="label"):
        write_results("nothing", [{"case": "x", "label": "guessed", "seed": 0, "repetitions": 1}])
    assert not (ROOT / "benchmarks" / "results" / "nothing.json").exists()


def test_docstring_examples_run():
    import doctest

    from relibra.rl import advantages, batch
    from relibra.rl.tasks import arithmetic
    from relibra.routing import demand, statistics, trace

    for module in (advantages, batch, arithmetic, demand, statistics, trace):
        result = doctest.testmod(module)
        assert result.attempted > 0, module
        assert result.failed == 0, module
