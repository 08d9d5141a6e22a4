"""Routes that a server records: bad ones, and a folder that is taken."""

import io

import numpy as np

from relibra.routing.readers import open_trace
from relibra.serving.server.recording import RouteRecorder


def npy_file(rows, layers=2):
    """Return the routes of fed tokens, as a worker sends them."""
    file = io.BytesIO()
    np.save(file, np.tile(np.arange(3, dtype=np.uint8), (rows, layers, 1)))
    return file.getvalue()


def test_a_bad_answer_alone_is_left_out(tmp_path, caplog):
    recorder = RouteRecorder(tmp_path, 8, [0, 1])
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
