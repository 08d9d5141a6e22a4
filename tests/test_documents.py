"""What the documents print is what the code prints."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = (ROOT / "docs" / "commands.md").read_text()
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
WRITTEN = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "reliability.md", *RESULTS)
GENERATED = [str(page.relative_to(ROOT)) for page in WRITTEN]
"""Pages that benchmarks/render.py writes figures into."""
GUIDE = (ROOT / "docs" / "execution.md").read_text()
ORIGIN = {
    "commit": "0" * 40,
    "dirty": False,
    "machine": "m",
    "versions": {"torch": "2"},
    "command": "c",
    "label": "measured",
    "seed": 0,
    "repetitions": 9,
}
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.slow] * (path.name in ("execute_plan.py", "balance_live.py")), id=path.name)
    for path in sorted((ROOT / "examples").glob("*.py"))
    # These need torchrun and TRL, and Megatron-core: tests/integrations. Upcycling prints seconds.
    if path.name not in ("trl_grpo.py", "megatron_core.py", "upcycle.py")
]


def test_the_guide_to_fine_tuning_shows_lines_of_its_example():
    guide = (ROOT / "docs" / "guides" / "trainers.md").read_text().split("\n## SFT")[1]
    lines = {line.strip() for line in (ROOT / "examples" / "balance_live.py").read_text().splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 3
    for line in "".join(blocks).splitlines():
        assert line.strip() in lines, line


def _output_of(*program):
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", *program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", ["README.md", "docs/trace-format.md"])
def test_blocks_print_what_the_page_says(page):
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == text.count("```python") > 0
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


def test_commands_that_are_named_exist(monkeypatch):
    from relibra.cli.main import main

    named = re.findall(r"^\| `relibra ([a-z ]+?)(?: (?:[A-Z]|--|\[)|`)", COMMANDS, flags=re.MULTILINE)
    assert len(named) > 10
    for line in named:
        monkeypatch.setattr(sys, "argv", ["relibra", *line.split(), "--help"])
        with pytest.raises(SystemExit) as leaving:
            main()
        assert leaving.value.code in (0, None), line
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", COMMANDS, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile


def test_file_map_names_every_package():
    page = (ROOT / "docs" / "README.md").read_text()
    listed = set(re.findall(r"^  (\w+(?:/|\.py)) ", page, flags=re.MULTILINE))
    package = ROOT / "src" / "relibra"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    files = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert listed == folders | files


def test_index_of_documents_names_every_page():
    page = (ROOT / "docs" / "README.md").read_text()
    assert set(re.findall(r"^\| \[([\w-]+\.md)\]", page, flags=re.MULTILINE)) == {
        path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"
    }


def anchors(page):
    """Return the fragments that lead to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target, fragment in re.findall(r"\]\(([^):#\s]*)#?([^):\s]*)\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            assert not fragment or fragment in anchors(there), f"{page.name} links to {target}#{fragment}"


def test_files_that_documents_name_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    folders = [ROOT / name for name in ("src", "examples", "benchmarks", "tests")]
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*")]
    missing = []
    for page in pages:
        named = re.findall(r"`([\w./-]*[\w-]+\.(?:py|js|css))`", page.read_text())
        missing += [f"{page.name}: {name}" for name in named if not any(one.endswith(f"/{name}") for one in files)]
    assert not missing


def test_papers_name_whole_paths():
    for path in re.findall(r"`([\w./-]+\.py)`", (ROOT / "docs" / "papers.md").read_text()):
        assert (ROOT / path).exists() or (ROOT / "src" / "relibra" / path).exists(), path


def test_modules_that_documents_name_exist():
    """A dotted name of relibra in a document is a module, or a public name in one."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in set(re.findall(r"(?<![/\w-])relibra(?:\.[a-z_]+)+\b(?!\.)", page.read_text())):
            if not _is_module(name):
                module, _, last = name.rpartition(".")
                assert _is_module(module), f"{page.name} names {name}"
                assert hasattr(importlib.import_module(module), last), f"{page.name} names {name}"


def _is_module(name):
    folder = ROOT / "src" / Path(*name.split("."))
    return folder.with_suffix(".py").exists() or (folder / "__init__.py").exists()


@pytest.fixture
def render():
    return importlib.import_module("benchmarks.render")


@pytest.fixture
def table_columns():
    return importlib.import_module("benchmarks.table_columns")


@pytest.mark.parametrize("page", GENERATED)
def test_tables_come_from_result_files(render, page):
    text = (ROOT / page).read_text()
    assert render.rendered(text) == text, "run relibra bench render"
    assert set(re.findall(r"<!-- results: ([\w/]+)", text)) <= set(render.COLUMNS)


@pytest.mark.parametrize("page", GENERATED)
def test_figures_in_prose_come_from_result_files(page):
    """What a person typed on these pages holds no measured number: on the page of results none at all."""
    typed = typed_prose((ROOT / page).read_text())
    if page == "README.md":  # where versions and papers have numbers; measured ones carry a unit or a sign
        found = re.findall(r"\d[\d.,]*\s*(?:%|x faster|times|tokens/s|GB/s|ms\b|us\b|MiB|GiB)", typed)
    else:
        found = re.findall(r"(?<![\w.-])\d[\w.,-]*", typed)
    assert not found, f"{page} has typed figures {found}: write <!-- figure: NAME KEY --><!-- end --> instead"


def typed_prose(text):
    """Leave out what is generated, code, and the targets of links."""
    text = re.sub(r"<!-- (?:results|figure|answer): .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def test_typed_figures_are_seen():
    page = "It is <!-- figure: a b -->5<!-- end --> s, `x 7`, [a](b/9), gpt-oss-20b.\n\n    code 8\n"
    assert not re.findall(r"(?<![\w.-])\d[\w.,-]*", typed_prose(page))
    assert re.findall(r"(?<![\w.-])\d[\w.,-]*", typed_prose("It takes 3.5 s, 48-layer.")) == ["3.5", "48-layer."]


@pytest.mark.parametrize("page", GENERATED)
def test_no_marker_of_a_figure_begins_a_line(page):
    """Markdown takes a comment at the start of a line for a block of its own and breaks the sentence there."""
    assert not re.search(r"^<!-- figure", (ROOT / page).read_text(), flags=re.MULTILINE)


def test_the_picture_of_the_readme_is_drawn_from_result_rows(render):
    from benchmarks.load_picture import RANKS, SYSTEMS

    picture = render.PICTURE.read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "balancers_gpt_oss.json").read_text())
    assert picture == render.draw_skew(rows), "run relibra bench render"
    skews = {row["balancer"]: row for row in rows}
    expected = [f"{skews[name][ranks]:.2f}" for ranks in RANKS for name in SYSTEMS]
    assert re.findall(r">(\d\.\d\d)</text>", picture) == expected
    widths = [float(width) for width in re.findall(r'<rect x="\d+" y="\d+" width="([\d.]+)"', picture)]
    assert widths == pytest.approx([float(skew) * widths[0] / float(expected[0]) for skew in expected], rel=0.01)
    assert f"]({render.PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_a_figure_is_the_same_in_all_rows_it_stands_for(render, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    page = "<!-- figure: made size -->?<!-- end --> GB, <!-- figure: made speed @ b, c -->?<!-- end -->"
    assert "(not measured yet)<!-- end --> GB" in render.rendered(page)
    rows = [{"case": "a", "speed": 1}, {"case": "b, c", "speed": 20000.0}]
    rows = [ORIGIN | row | {"size": 38.4} for row in rows]
    (tmp_path / "made.json").write_text(json.dumps(rows))
    made = render.rendered(page)
    assert made == "<!-- figure: made size -->38.4<!-- end --> GB, <!-- figure: made speed @ b, c -->20,000<!-- end -->"
    assert render.rendered(made) == made
    for wrong in ("made speed", "made nothing", "made speed @ d"):
        with pytest.raises(ValueError, match="a figure in prose needs exactly one value"):
            render.rendered(f"<!-- figure: {wrong} --><!-- end -->")


def test_the_index_of_results_is_short_and_names_every_page(render):
    index = (ROOT / "docs" / "results.md").read_text()
    assert len(index.encode()) <= 20_000
    assert set(re.findall(r"<!-- answer: (\w+) -->", index)) == {page.stem for page in RESULTS}
    assert set(render.PAGES) == {ROOT / page for page in GENERATED}


def test_figures_are_taken_from_the_rows_that_a_marker_selects(render, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    rows = [{"case": f"W = {n}", "who": "a" if n < 3 else "b", "n ms": float(n)} for n in range(5)]
    (tmp_path / "made.json").write_text(json.dumps([ORIGIN | row for row in rows]))
    assert render.figure("made", "n ms", "W = 3") == "3"
    assert render.figure("made", "n ms", "who=b; case=W = 4") == "4"
    assert [render.figure("made", f"{name}:n ms", "who=a") for name in ("least", "most", "count")] == ["0", "2", "3"]
    assert [render.figure("made", "range:n ms", of) for of in ("who=b", "case=W = 4")] == ["3 to 4", "4"]
    assert render.figure("made", "count:case", "who=c") == "0"
    for key, of in (("count:case", "whom=a"), ("count:m ms", "who=a"), ("most:n ms", "who=c")):
        with pytest.raises(ValueError, match="needs exactly one value"):
            render.figure("made", key, of)


def test_quartiles_stand_in_tables_where_rows_have_them(table_columns):
    assert table_columns.between({"seconds low": 1.0, "seconds high": 2.5}, "seconds") == "1 to 2.5"
    assert table_columns.between({"seconds": 2.0}, "seconds") == ""
    row = {"tokens_per_second": 100.0, "seconds": [1.0, 2.0, 4.0]}
    assert table_columns.tokens_between(row) == "75 to 150"


def test_a_table_without_rows_says_so_until_there_are_some(render, monkeypatch, tmp_path):
    page = "<!-- results: runtime_targets -->\n<!-- end -->"
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    assert "Not measured yet: there is no `benchmarks/results/runtime_targets.json`." in render.rendered(page)
    row = {"case": "x", "what": "w", "reached": 0.0123456, "target": 0.02, "at_most": True, "ok": True, **ORIGIN}
    (tmp_path / "runtime_targets.json").write_text(json.dumps([row, row | {"at_most": False, "ok": False}]))
    table = render.rendered(page)
    assert [line.split(" | ")[1:] for line in table.splitlines() if line[:3] == "| x"] == [["<= 0.02 |"], [">= 0.02 |"]]
    assert (
        "*measured: see each row; what w; reached 0.012; 9 repetitions; `c` at commit 000000000000; m; "
        "`runtime_targets.json`.*" in table
    )
    assert render.rendered(table) == table


def test_a_table_takes_the_rows_of_its_marker(render, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    of = {"what": "w", "reached": 1.0, "target": 2.0, "at_most": True}
    rows = [ORIGIN | of | {"case": name, "ok": name == "a"} for name in "abc"]
    (tmp_path / "runtime_targets.json").write_text(json.dumps(rows))
    lines = render.table("runtime_targets", "ok=False").splitlines()
    assert [line[2] for line in lines if line[:1] == "|"][2:] == ["b", "c"]
    assert "has no rows with ok=None" in render.table("runtime_targets", "ok=None")


def test_a_grouped_table_shows_the_range_of_each_group(render, table_columns, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    grouped = {"made/in_columns": table_columns.Grouped(by=("who",), over="ranks", figures=("speed",))}
    grouped["made"] = table_columns.Grouped(by=("who",), figures=("speed", "said"))
    monkeypatch.setattr(render, "COLUMNS", grouped)
    of = [("a", 8, 1.5, "x"), ("a", 8, 2.5, "y"), ("b", 8, 1.0, "z"), ("b", 16, 3.0, "z")]
    rows = [ORIGIN | {"case": "c", "who": who, "ranks": n, "speed": speed, "said": said} for who, n, speed, said in of]
    (tmp_path / "made.json").write_text(json.dumps(rows))
    lines = render.table("made").splitlines()
    assert lines[:4] == ["| who | speed | said |", "|---|---|---|", "| a | 1.5 to 2.5 | x |", "| b | 1 to 3 | z |"]
    lines = render.table("made/in_columns").splitlines()
    assert lines[:4] == ["| who | 8 ranks | 16 ranks |", "|---|---|---|", "| a | 1.5 to 2.5 |  |", "| b | 1 | 3 |"]
    assert "cells: speed;" in lines[5]


def test_facts_of_all_rows_stand_under_a_table(render, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    monkeypatch.setattr(render, "COLUMNS", {"made": ("case", "configuration")})
    for of, cells, shared in (
        (("2 layers, a; x", "2 layers, b, c; x"), ["a", "b, c"], "; configuration 2 layers, x; 9 rep"),
        (("2 layers, a", "2 layers"), ["2 layers, a", "2 layers"], "see each row; 9 rep"),
        (("2,048 a", "2,048 b"), ["2,048 a", "2,048 b"], "see each row; 9 rep"),
    ):
        rows = [ORIGIN | {"case": str(n), "configuration": one} for n, one in enumerate(of)]
        (tmp_path / "made.json").write_text(json.dumps(rows))
        lines = render.table("made").splitlines()
        assert [line.split(" | ")[1].removesuffix(" |") for line in lines[2:4]] == cells
        assert shared in lines[5]


@pytest.mark.parametrize("key", ["command", "commit", "versions", "repetitions", "reached"])
def test_pages_are_not_made_from_rows_that_lack_something(render, monkeypatch, tmp_path, capsys, key):
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    monkeypatch.setattr(render, "ROOT", tmp_path)
    row = {"case": "x", "what": "w", "reached": 1.0, "target": 0.02, "at_most": True, "ok": True, **ORIGIN}
    rows = [row, {name: value for name, value in row.items() if name != key}]
    (tmp_path / "runtime_targets.json").write_text(json.dumps(rows))
    pages = [tmp_path / "first.md", tmp_path / "second.md"]
    monkeypatch.setattr(render, "PAGES", pages)
    texts = [
        "<!-- figure: runtime_targets target -->old<!-- end -->",
        "<!-- results: runtime_targets -->\n<!-- end -->",
    ]
    for page, text in zip(pages, texts, strict=True):
        page.write_text(text)
    for words in (["--check"], []):
        monkeypatch.setattr(sys, "argv", ["render.py", *words])
        with pytest.raises(ValueError, match=rf"runtime_targets\.json.*lacks '?{key}'?[:,]") as raised:
            render.main()
        assert "\n" not in str(raised.value)
        with pytest.raises(ValueError, match=key):
            render.write_pages()
        assert [page.read_text() for page in pages] == texts


def test_result_rows_without_provenance_are_refused():
    from benchmarks.harness.provenance import write_results
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
    attempted = 0
    for path in files:
        module = importlib.import_module(".".join(path.relative_to(source).with_suffix("").parts))
        result = doctest.testmod(module)
        assert result.failed == 0, module
        attempted += result.attempted
    assert attempted > len(files)
