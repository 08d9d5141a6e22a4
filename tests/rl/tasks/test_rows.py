"""Rows of files: what was written is read back, and a damaged file is named with its line."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import ConfigError
from relibra.rl.tasks.rows import open_rows

VALUES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.lists(st.text(), max_size=3)


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=4), min_size=1, max_size=8), st.booleans(), st.data())
def test_json_lines_are_read_back_in_any_order(tmp_path_factory, rows, ends_with_a_line, data):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    blank = [data.draw(st.sampled_from(["", "\n", " \r\n"])) for _ in rows]
    lines = [before + json.dumps(row, ensure_ascii=False) for before, row in zip(blank, rows, strict=True)]
    path.write_text("\n".join(lines) + "\n" * ends_with_a_line, encoding="utf-8", newline="")
    opened = open_rows(path, "task.file")
    assert list(opened) == rows
    assert len(opened) == len(rows)
    for place in data.draw(st.permutations(range(len(rows)))):
        assert opened.row(place) == rows[place]
        number = int(opened.name(place).rpartition(" ")[2])
        assert json.loads(path.read_text(encoding="utf-8").split("\n")[number - 1]) == rows[place]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
    assert open_rows(path, "task.file").row(0) == {"prompt": "x"}


def test_rows_are_read_after_the_working_folder_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "x"}\n')
    rows = open_rows(Path("rows.jsonl"), "task.file")
    monkeypatch.chdir("/")
    assert list(rows) == [rows.row(0)] == [{"prompt": "x"}]
    assert rows.name(0) == "rows.jsonl, line 1"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 200_000, "not JSON"),
        (b'["prompt"]', "got a JSON list"),
        (b'"prompt"', "got a JSON str"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line, says):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n\n' + line + b"\n")
    rows = open_rows(path, "task.file")
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 3: {says}"):
        rows.row(1)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 3: {says}"):
        list(rows)


def test_files_that_cannot_be_opened_are_named_with_setting(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt\nx\n")
    with pytest.raises(
        ConfigError, match=r"task\.file is .*rows\.csv': a file of prompts ends in \.jsonl or \.parquet"
    ):
        open_rows(tmp_path / "rows.csv", "task.file")
    with pytest.raises(ConfigError, match=r"task\.evaluation_file is .*none\.jsonl', and there is no such file"):
        open_rows(tmp_path / "none.jsonl", "task.evaluation_file")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl' holds no rows"):
        open_rows(tmp_path / "empty.jsonl", "task.file")


def test_parquet_rows_are_those_that_were_written(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Parquet files are not tested")
    from pyarrow import parquet

    rows = [
        {"prompt": [{"role": "user", "content": f"{i}"}], "answer": i, "extra": {"level": i % 3}} for i in range(2500)
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    opened = open_rows(path, "task.file")
    assert list(opened) == rows
    for place in (0, 699, 700, 2499):
        assert opened.row(place) == rows[place]
    assert opened.name(2499).endswith("rows.parquet, row 2500")


def test_a_damaged_or_empty_parquet_file_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Parquet files are not tested")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ConfigError, match=r"rows\.parquet is not a readable Parquet file"):
        open_rows(path, "task.file")
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(ConfigError, match=r"rows\.parquet' holds no rows"):
        open_rows(path, "task.file")


def test_without_pyarrow_the_install_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "rows.parquet").touch()
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[data\]', or use \.jsonl"):
        open_rows(tmp_path / "rows.parquet", "task.file")
