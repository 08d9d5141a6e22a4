"""Routes that a server records: bad ones, and a folder that is taken."""

import io

import numpy as np
import pytest

from relibra.errors import TraceError
from relibra.routing.readers import open_trace
from relibra.routing.trace_files import TraceWriter
from relibra.serving.layout import WorkerLayout
from relibra.serving.server.recording import RouteRecorder
from relibra.serving.server.serve import ServerSettings, serve


def npy_file(rows, layers=2):
    """Return the routes of fed tokens, as a worker sends them."""
    file = io.BytesIO()
    np.save(file, np.tile(np.arange(3, dtype=np.uint8), (rows, layers, 1)))
    return file.getvalue()


def test_a_bad_answer_alone_is_left_out(tmp_path, caplog):
    recorder = RouteRecorder(TraceWriter(tmp_path), 8, [0, 1])
    for prompt_length, file in [
        (2, npy_file(0)),
        (2, npy_file(4)),
        (9, npy_file(4)),
        (2, npy_file(4, layers=3)),
        (3, npy_file(5)),
    ]:
        recorder.add(prompt_length, file)
    recorder.close()
    trace = open_trace(tmp_path)
    assert trace.rows_per_sample.tolist() == [5, 6]
    assert trace.prompt_lengths.tolist() == [2, 3]
    assert sum("an answer are left out" in line for line in caplog.messages) == 3


def test_a_folder_with_a_trace_is_refused_before_loading(tmp_path):
    (tmp_path / "index.json").write_text("{}")
    settings = ServerSettings(host="127.0.0.1", port=0, name="tiny", record=tmp_path)
    with pytest.raises(TraceError, match="already holds a trace"):
        serve(tmp_path / "no model", WorkerLayout(), settings, dtype="auto", threads=1, print_line=print)
