"""What the documents print is what the code prints."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "execution.md").read_text()
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.slow] * (path.name == "execute_plan.py"), id=path.name)
    for path in sorted((ROOT / "examples").glob("*.py"))
]


def _output_of(*program):
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", *program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_blocks_print_what_they_say():
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == README.count("```python")
    for program, output in blocks:
        assert _output_of("-c", program) == output


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_print_what_they_say(example):
    expected = example.read_text().split("# Output:\n")[1]
    assert "".join(f"# {line}\n" for line in _output_of(str(example)).splitlines()) == expected


@pytest.mark.slow
def test_blocks_of_the_execution_guide_run(tmp_path):
    from tests.guide_at_work import run_blocks

    found = run_blocks(re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL), tmp_path)
    assert all(found["saved"].values())
    assert len(found["saved"]) > 10
    assert found["trained"]
    assert found["homes"]
    assert found["replicas"] > 0
    assert "wait push" in found["stages"]


@pytest.mark.parametrize(("guide", "package"), [("execution", "parallel"), ("training", "rl")])
def test_guides_quote_messages_that_exist(guide, package):
    said = []
    for file in (ROOT / "src" / "relibra" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            said.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts))
    text = (ROOT / "docs" / f"{guide}.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", text.split("## What can go wrong")[1], flags=re.MULTILINE)
    assert len(quoted) > 10
    for message in quoted:
        assert any(message in one for one in said), message


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


@pytest.fixture
def render():
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_tables_come_from_result_files(render, page):
    text = (ROOT / page).read_text()
    assert render.rendered(text) == text, "run python benchmarks/render.py"
    assert set(re.findall(r"<!-- results: (\w+) -->", text)) <= set(render.COLUMNS)


def test_a_table_without_rows_says_so_until_there_are_some(render, monkeypatch, tmp_path):
    page = "<!-- results: runtime_targets -->\n<!-- end -->"
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    assert "Not measured yet: there is no `benchmarks/results/runtime_targets.json`." in render.rendered(page)
    origin = {"commit": "0" * 40, "dirty": False, "machine": "m", "versions": {"torch": "2"}, "command": "c"}
    row = {"case": "x", "what": "w", "reached": 0.0123456, "target": 0.02, "at_most": True, "ok": True}
    row |= {"label": "measured", "seed": 0, "repetitions": 9, **origin}
    (tmp_path / "runtime_targets.json").write_text(json.dumps([row, row | {"at_most": False, "ok": False}]))
    table = render.rendered(page).splitlines()
    assert table[1] == "| case | what | reached | target | ok |"
    assert table[3:5] == ["| x | w | 0.012 | <= 0.02 | yes |", "| x | w | 0.012 | >= 0.02 | NO |"]
    assert table[6].startswith("*measured: see each row; 9 repetition(s); `c` at commit 000000000000; m; torch 2.*")
    assert render.rendered("\n".join(table)) == "\n".join(table)


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

    source = ROOT / "src"
    files = [path for path in sorted(source.rglob("*.py")) if ">>> " in path.read_text()]
    files.remove(source / "relibra" / "cli" / "trace.py")  # its example is half a character, which doctest cannot read
    attempted = 0
    for path in files:
        module = importlib.import_module(".".join(path.relative_to(source).with_suffix("").parts))
        result = doctest.testmod(module)
        assert result.failed == 0, module
        attempted += result.attempted
    assert attempted > len(files)
