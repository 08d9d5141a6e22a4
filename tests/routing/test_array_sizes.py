"""Small files whose numbers multiply to gigabytes: refused in a sentence before anything of that size is allocated."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from relibra import Demand, RoutingTrace, TraceError
from relibra.cli.main import main
from relibra.routing.demand_files import FORMAT, read_demand
from relibra.routing.readers import open_trace
from relibra.routing.readers.given_schedule import GivenSchedule, schedule_of
from relibra.routing.statistics import co_activation
from relibra.routing.tensor_files import write_tensors


def _archive(path, **arrays):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.save(file, array)
    return path


def _one_row(layers, largest):
    ids = np.zeros((1, layers, 1), dtype=np.uint16)
    ids[0, 0, 0] = largest
    return ids


@pytest.mark.parametrize(
    ("arrays", "limit"),
    [
        ({"ids": _one_row(97_900, 65_535), "seqlen": np.ones(1, int)}, "allowed are 65,536 layers"),
        ({"ids": _one_row(60_000, 65_535), "seqlen": np.ones(1, int)}, "4,194,304 experts over all layers"),
        ({"ids": np.arange(300, dtype=np.uint16)[None, None], "seqlen": np.ones(1, int)}, "allowed are 256 choices"),
        ({"ids": _one_row(1, 7), "seqlen": np.zeros((1 << 24) + 1, np.uint8)}, "16,777,216 samples"),
        ({"ids": np.zeros((1 << 28, 1, 1), np.uint8), "seqlen": np.ones(1, int)}, "would unpack to"),
    ],
)
def test_an_archive_whose_sizes_multiply(tmp_path, arrays, limit):
    path = _archive(tmp_path / "x.npz", **arrays)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(TraceError, match=limit):
        open_trace(path)


def _trace(*, samples=1, experts=8, layers=1):
    return RoutingTrace.from_samples([np.zeros((1, layers, 1), np.int64)] * samples, num_experts=experts)


def test_counts_that_would_be_far_larger_than_the_routes():
    wide = _trace(samples=5000, experts=1 << 16)
    with pytest.raises(TraceError, match=r"5,000 samples x 1 layers x 65,536 experts.* 1\.2 GiB .* 10,000 bytes"):
        Demand.from_trace(wide)
    with pytest.raises(TraceError, match=r"65,536 experts x 65,536 of_experts.*32\.0 GiB"):
        co_activation(wide.select([0]))


def test_a_schedule_that_names_a_far_micro_batch():
    trace = _trace(samples=2)
    given = GivenSchedule(path=Path("s.npz"), micro_batch_S=np.array([0, (1 << 31) - 1]), rank_S=np.zeros(2, np.int64))
    with pytest.raises(TraceError, match="micro-batch 1 has no samples"):
        schedule_of(trace, given, 1)
    with pytest.raises(TraceError, match=r"2,147,483,648 micro_batches x .*64\.0 GiB"):
        Demand.from_trace(trace).with_schedule(np.array([0, (1 << 31) - 1]), np.zeros(2, np.int64), 1)


@pytest.mark.parametrize(
    ("layers", "experts", "limit"), [(65_536, 32_768, "at most"), (2048, 4096, "4,194,304 experts")]
)
def test_a_demand_without_samples_and_with_long_axes(tmp_path, layers, experts, limit):
    """262 KB of layer ids once took 16 GiB."""
    arrays = {
        "counts_SLE": np.zeros((0, layers, experts), np.int32),
        "layer_ids": np.arange(layers, dtype=np.int32),
        "sample_ids": np.zeros(0, np.int64),
    }
    if limit == "at most":
        body = {"format": FORMAT.name, "version": FORMAT.version, "checksum": "", "facts": {}}
        save_file(arrays, tmp_path / "d", metadata={"relibra": json.dumps(body)})
    else:
        write_tensors(tmp_path / "d", FORMAT, arrays, {"top_k": None})
    with pytest.raises(TraceError, match=limit):
        read_demand(tmp_path / "d")


def test_the_command_line_tells_a_memory_error(monkeypatch, capsys):
    def fail(_):
        raise MemoryError("Unable to allocate 16.0 GiB")

    monkeypatch.setattr("relibra.planning.plan_files.read_plan", fail)
    monkeypatch.setattr("sys.argv", ["relibra", "explain", "x"])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err == (
        "error: this needs more memory than there is (Unable to allocate 16.0 GiB): choose smaller inputs\n"
    )
