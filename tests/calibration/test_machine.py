"""`plan.cluster`: names, files, and the measurement that is kept, also where it is damaged or cannot be kept."""

import pytest
import torch

from relibra.calibration import measurement
from relibra.calibration.machine import check_cluster, find_cluster, measure_cluster, measurement_path
from relibra.cluster import cluster_preset, read_cluster, write_cluster
from relibra.errors import ClusterError

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "relibra"


@pytest.fixture
def no_measuring(monkeypatch):
    def refuse(_):
        raise AssertionError("measured again")

    monkeypatch.setattr(measurement, "measure_machine", refuse)


@pytest.mark.parametrize("name", ["laptop", "h100x8", "auto", "measure"])
def test_a_name_that_exists_passes(name):
    check_cluster(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h100", "plan.cluster 'h100' is unknown: allowed are .*auto, measure, or the path of a .toml file"),
        ("missing.toml", "missing.toml cannot be read .*relibra calibrate --output cluster.toml"),
    ],
)
def test_an_unknown_name_is_refused(name, said):
    for look_up in (check_cluster, lambda given: find_cluster(given, CPU, 2, 2)):
        with pytest.raises(ClusterError, match=said):
            look_up(name)


@pytest.mark.usefixtures("no_measuring")
def test_a_kept_measurement_is_used_with_the_ranks_of_the_run(cache):
    path = measurement_path(cuda=False)
    assert path.parent == cache
    with pytest.raises(ClusterError, match="no measurement of this machine"):
        find_cluster("measure", CPU, 4, 2)
    write_cluster(path, cluster_preset("h100x8"))
    assert measure_cluster(1 + torch.cuda.device_count()) == path
    assert find_cluster("measure", CPU, 4, 2) == cluster_preset("h100x8", 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 40])
def test_a_damaged_measurement_is_made_again(length, cache):
    path = measurement_path(cuda=False)
    write_cluster(path, cluster_preset("laptop"))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ClusterError, match=r"relibra calibrate --output cluster\.toml"):
        find_cluster("measure", CPU, 2, 2)
    assert measure_cluster(1 + torch.cuda.device_count()) == path
    assert read_cluster(path).label == "measured"
    assert list(cache.iterdir()) == [path]


@pytest.mark.usefixtures("no_measuring")
def test_an_unwritable_folder_is_found_before_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ClusterError, match=r"cannot be kept in .*: .*; set XDG_CACHE_HOME to a folder"):
        measure_cluster(1 + torch.cuda.device_count())
