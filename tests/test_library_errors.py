"""Errors of other libraries become one sentence that names stage and library; errors of our own lines stay."""

import json
import pickle
import sys
import zipfile

import numpy as np
import pytest

from relibra.cli.inputs.models import open_model
from relibra.cli.main import main
from relibra.cluster import read_cluster
from relibra.errors import ClusterError, ConfigError, EngineError, TraceError, in_a_line, library_errors, raised_by
from relibra.printable import excerpt
from relibra.rl.config.run_config import load_config
from relibra.rl.run.run_folder import read_settings
from relibra.routing.readers import open_trace

DEEP = 100_000
LIBRARY = compile("def work():\n    raise RuntimeError('first line.\\n second line')", "library.py", "exec")


def failing_library():
    """Return a function of a module called `otherlib` that raises."""
    module = {"__name__": "otherlib.inner"}
    exec(LIBRARY, module)
    return module["work"]


def test_an_error_of_a_library_names_stage_and_library():
    with pytest.raises(EngineError) as told, library_errors("the stage 'update' failed", EngineError):
        failing_library()()
    assert str(told.value).startswith("the stage 'update' failed: otherlib raised RuntimeError: first line; RELIBRA_")
    assert isinstance(told.value.__cause__, RuntimeError)


def test_a_type_of_a_library_is_one_too():
    assert raised_by(np.exceptions.AxisError(3)) == "numpy"
    assert raised_by(json.JSONDecodeError("x", "y", 0)) == "json"
    assert raised_by(ValueError("x")) is None


def test_our_own_errors_stay():
    with pytest.raises(TraceError, match="mine"), library_errors("x", EngineError):
        raise TraceError("mine")
    with pytest.raises(RuntimeError, match="first line"), library_errors("x", EngineError, stays=lambda _: True):
        failing_library()()
    bug = {"__name__": "relibra.bug"}
    exec("def work(): {}['a']", bug)
    with pytest.raises(KeyError), library_errors("x", EngineError):
        bug["work"]()


def test_an_error_in_a_line():
    assert in_a_line(ValueError()) == "ValueError"
    assert len(in_a_line(ValueError("x" * 10_000))) < 400


def test_a_value_in_a_message_is_short():
    deep = []
    for _ in range(DEEP):
        deep = [deep]
    assert excerpt(deep) == "a list"
    assert excerpt(10**5000) == "a int"
    while deep:  # freed level by level, which is no recursion
        [deep] = deep or [[]]


TEXTS = {
    "deep": "a = " + "[" * DEEP + "]" * DEEP,
    "digits": f"a = {'9' * 5000}",
    "date": "a = 9999-99-99",
    "bytes": b"a = '\xff'",
    "half": b"\xed\xa0\x80",
    "long": "#" * (2 << 20),
    "table": "[" + "a." * 2000 + "b]\nc = 1",
}


@pytest.mark.parametrize("name", TEXTS)
def test_settings_and_cluster_files_that_no_parser_likes(name, tmp_path):
    text = TEXTS[name]
    (tmp_path / "x.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as told:
        load_config(tmp_path / "x.toml")
    assert len(str(told.value)) < 1000
    with pytest.raises(ClusterError):
        read_cluster(tmp_path / "x.toml")


@pytest.mark.parametrize(
    "override",
    ["run.steps=" + "9" * 5000, "run.steps=" + "[" * DEEP, "a." * DEEP + "b=1", "run.steps=" + "[" * 90 + "]" * 90],
)
def test_overrides_that_no_parser_likes(override):
    with pytest.raises(ConfigError) as told:
        load_config(None, [override])
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize(
    "text",
    ["[" * DEEP, '{"update": ' * 900 + "1" + "}" * 900, "9" * 5000, "[]", '{"versions": 3}', '{"versions": {}}x'],
)
def test_the_settings_of_a_run_that_no_parser_likes(text, tmp_path):
    (tmp_path / "checkpoints" / "step-00001").mkdir(parents=True)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        load_config(None, base=read_settings(tmp_path))
    with pytest.raises(ConfigError):
        open_model(str(tmp_path / "config.json"))


def test_a_config_json_that_is_large_or_unreadable(tmp_path):
    (tmp_path / "config.json").write_text("{}" + " " * (1 << 20))
    with pytest.raises(ConfigError, match="is larger than 1,048,576 bytes: expected a config"):
        open_model(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        open_model("/proc/self/mem")  # the address 0 is no part of it


def test_an_archive_in_lzma(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("ids.npy", b"\0" * 1000)
    data = bytearray((tmp_path / "x.npz").read_bytes())
    for place in range(37, 70):
        (tmp_path / "x.npz").write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        with pytest.raises(TraceError):
            open_trace(tmp_path / "x.npz")


def test_a_parquet_file_whose_text_is_no_utf8(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from relibra.rl.tasks.rows import open_rows

    column = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    parquet.write_table(pa.table({"prompt": column}), tmp_path / "x.parquet")
    for use in (list, lambda rows: rows.row(0)):
        with pytest.raises(ConfigError, match=r"x\.parquet is not a readable Parquet file: UnicodeDecodeError"):
            use(open_rows(tmp_path / "x.parquet", "task.file"))


def test_the_command_line_says_which_library_failed(monkeypatch, capsys, tmp_path):
    work = failing_library()
    monkeypatch.setattr("relibra.planning.plan_files.read_plan", lambda _: work())
    monkeypatch.setattr(sys, "argv", ["relibra", "explain", "x"])
    with pytest.raises(SystemExit, match="1"):
        main()
    said = capsys.readouterr().err
    assert said.startswith("error: relibra explain: otherlib raised RuntimeError: first line; RELIBRA_TRACEBACK=1")
    assert "Traceback" not in said
    monkeypatch.setenv("RELIBRA_TRACEBACK", "1")
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "second line" in capsys.readouterr().err


def test_weights_that_torch_does_not_unpickle_are_told():
    from relibra.rl.model.sharding import loading

    said = "model.path 'x' cannot be loaded: UnpicklingError: Weights only load failed"
    with pytest.raises(ConfigError, match=said), loading("model.path 'x'"):
        raise pickle.UnpicklingError("Weights only load failed.\nmore")
