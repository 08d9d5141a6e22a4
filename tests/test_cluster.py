import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relibra.cluster import PRESETS, Cluster, Link, Transport, cluster_preset, read_cluster, write_cluster
from relibra.errors import ClusterError

rates = st.floats(1e-3, 1e20)
links = st.builds(Link, latency_seconds=st.floats(0, 10), bytes_per_second=rates)
tables = st.lists(st.tuples(st.integers(1, 10**6), rates), max_size=4, unique_by=lambda entry: entry[0])
text = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
clusters = st.builds(
    Cluster,
    name=text,
    num_nodes=st.integers(1, 64),
    ranks_per_node=st.integers(1, 72),
    intra=links,
    inter_send=links,
    inter_receive=links,
    host=links,
    memory_bytes=st.integers(1, 10**12),
    peak_flops_per_second=rates,
    efficiency=st.floats(0.01, 1),
    gemm_table=tables.map(lambda entries: tuple(sorted(entries))),
    transport=st.builds(
        Transport,
        puts=st.sampled_from(["peer", "expert"]),
        fence_seconds=st.floats(0, 1),
        fence_scope=st.sampled_from(["put", "peer"]),
    ),
    source=text,
    label=st.sampled_from(["cited", "measured", "model"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(clusters)
def test_toml_round_trip_is_exact(tmp_path, cluster):
    write_cluster(tmp_path / "c.toml", cluster)
    assert read_cluster(tmp_path / "c.toml") == cluster


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_and_say_where_they_come_from(tmp_path, name):
    cluster = cluster_preset(name)
    write_cluster(tmp_path / "c.toml", replace(cluster, source='say "\\" and ü'))
    assert read_cluster(tmp_path / "c.toml") == replace(cluster, source='say "\\" and ü')
    assert cluster.name == name
    assert "assumptions" in cluster.source
    assert cluster.label == "model"
    assert cluster.intra.bytes_per_second >= cluster.inter_send.bytes_per_second


def test_preset_figures():
    h100 = cluster_preset("h100x8", 32)
    assert (h100.num_nodes, h100.ranks_per_node, h100.num_ranks) == (4, 8, 32)
    assert h100.inter_send.bytes_per_second == 8 * 400e9 / 8 / 8  # 8 NICs of 400 Gb/s for 8 ranks
    assert h100.flops_per_second == pytest.approx(494.7e12)
    assert cluster_preset("nvl72", 64, 64).num_nodes == 1
    with pytest.raises(ClusterError, match=r"cluster 'h100' is unknown: allowed are h100x8, .*laptop"):
        cluster_preset("h100")


def test_a_link_costs_alpha_plus_beta_bytes():
    link = Link(latency_seconds=2.0, bytes_per_second=10.0)
    assert link.seconds(50.0) == 7.0
    assert link.seconds(50.0, messages=3) == 11.0
    assert link.seconds(0.0) == 0.0
    assert link.seconds(np.array([0, 20])).tolist() == [0.0, 4.0]


def test_gemm_seconds_with_and_without_a_table():
    slow = replace(cluster_preset("laptop"), peak_flops_per_second=100.0, efficiency=0.5, memory_bytes_per_second=10.0)
    assert slow.gemm_seconds(np.array([0, 1, 10]), 5.0).tolist() == [0.0, 0.6, 1.5]  # half a second for the weights
    plain = replace(slow, memory_bytes_per_second=0.0)
    assert plain.gemm_seconds(np.array([0, 10]), 5.0).tolist() == [0.0, 1.0]
    table = replace(plain, gemm_table=((10, 10.0), (20, 8.0), (30, 50.0)))
    # 0 rows: no time; 5 rows wait as long as 10; the dip at 20 counts as noise; between 20 and 30 linear; flat beyond
    assert table.gemm_seconds(np.array([0, 5, 10, 20, 25, 60]), 1.0).tolist() == [0.0, 1.0, 1.0, 2.0, 25 / 30, 60 / 50]


def test_an_expert_with_one_row_takes_as_long_as_its_weights():
    h100, parameters = cluster_preset("h100x8"), 3 * 2048 * 768
    one, some, many = (h100.gemm_seconds(np.array([rows]), 2.0 * parameters)[0] for rows in (1, 148, 1 << 15))
    assert one == pytest.approx(2 * parameters / 3.35e12, rel=0.01)
    assert some == pytest.approx(2 * one, rel=0.01)
    assert many == pytest.approx(2.0 * parameters * (1 << 15) / h100.flops_per_second, rel=0.01)


@given(st.integers(1, 64), st.integers(1, 64))
def test_with_ranks_keeps_or_refuses(num_ranks, ranks_per_node):
    cluster = replace(cluster_preset("h100x8"), ranks_per_node=ranks_per_node)
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node:
        with pytest.raises(ClusterError, match="do not fill nodes"):
            cluster.with_ranks(num_ranks)
    else:
        resized = cluster.with_ranks(num_ranks)
        assert resized.num_ranks == num_ranks
        assert resized.ranks_per_node == min(num_ranks, ranks_per_node)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "8", None, 10**400])
@pytest.mark.parametrize("key", ["num_nodes", "ranks_per_node", "memory_bytes", "peak_flops_per_second", "efficiency"])
def test_impossible_numbers_are_refused(key, value):
    with pytest.raises(ClusterError, match=f"{key} is "):
        replace(cluster_preset("h100x8"), **{key: value})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"efficiency": 1.5}, "efficiency is 1.5"),
        ({"num_nodes": 1 << 16}, "at most 65536 ranks"),
        ({"label": "guessed"}, "label is 'guessed': .*cited.*measured.*model"),
        ({"name": "two\nlines"}, "one line of printable text"),
        ({"gemm_table": ((2, 1.0), (2, 2.0))}, "they must rise"),
        ({"gemm_table": ((2, -1.0),)}, r"gemm_table\[0\]\[1\] is -1.0"),
        ({"ranks_per_node": 2.0}, "ranks_per_node is 2.0: .*integer"),
        ({"peak_flops_per_second": 1e-300}, "peak_flops_per_second is 1e-300: .*0.001"),
    ],
)
def test_impossible_clusters_are_refused(changes, sentence):
    with pytest.raises(ClusterError, match=sentence):
        replace(cluster_preset("h100x8"), **changes)


@pytest.mark.parametrize("changes", [{"latency_seconds": -1}, {"bytes_per_second": 0}, {"bytes_per_second": math.nan}])
def test_impossible_links_are_refused(changes):
    with pytest.raises(ClusterError, match=r"_per_second is|latency_seconds is"):
        Link(**{"latency_seconds": 0, "bytes_per_second": 1, **changes})


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("num_nodes = 1", "num_nodes = 1\nnodes = 2", "c.toml has unknown entry 'nodes': did you mean 'num_nodes'"),
        ("efficiency", "efficency", "c.toml has unknown entry 'efficency': did you mean 'efficiency'"),
        ("num_nodes = 1", "", "c.toml has no entry 'num_nodes'"),
        ("[host]", "[host]\nspeed = 1", "host has unknown entry 'speed': allowed are latency_seconds"),
        ("[host]\nlatency_seconds = 1e-05", "[host]\nlatency_seconds = -1", "host: latency_seconds is -1: "),
        ("gemm_table = []", "gemm_table = [[1, 2, 3]]", "gemm_table"),
        ("gemm_table = []", "gemm_table = 7", "gemm_table is 7: "),
        ("gemm_table = []", f"gemm_table = {'[' * 300}{']' * 300}", "gemm_table"),
        ("efficiency = 0.5", "efficiency = nan", "efficiency is nan"),
        ("[intra]", "[intra", "not valid TOML"),
        ("efficiency = 0.5", "efficiency = 1" + "0" * 5000, "efficiency is|not valid TOML"),
        ("num_nodes = 1", "num_nodes = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_bad_files_get_a_sentence(tmp_path, old, new, sentence):
    path = tmp_path / "c.toml"
    write_cluster(path, cluster_preset("h100x8"))
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))
    with pytest.raises(ClusterError, match=sentence):
        read_cluster(path)


def test_a_transport_is_read_and_its_mistakes_named(tmp_path):
    path = tmp_path / "c.toml"
    write_cluster(path, cluster_preset("h100x8"))
    text = path.read_text()
    assert "transport" not in text
    path.write_text(f'{text}\n[transport]\nputs = "expert"\nfence_seconds = 1e-5\n')
    expected = Transport(puts="expert", fence_seconds=1e-5, fence_scope="put")
    assert read_cluster(path) == replace(cluster_preset("h100x8"), transport=expected)
    for entry, sentence in (
        ('puts = "token"', "transport: puts is 'token'.*peer.*expert"),
        ("fence_seconds = -1", "transport: fence_seconds is -1"),
        ("fences = 3", "transport has unknown entry 'fences'"),
    ):
        path.write_text(f"{text}\n[transport]\n{entry}\n")
        with pytest.raises(ClusterError, match=sentence):
            read_cluster(path)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ClusterError, match=r"cannot be read \(No such file"):
        read_cluster(tmp_path / "none.toml")
    with pytest.raises(ClusterError, match=r"cannot be read \(Is a directory"):
        read_cluster(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="not valid TOML"):
        read_cluster(tmp_path / "b.toml")
    (tmp_path / "big.toml").write_text("#" * (2 << 20))
    with pytest.raises(ClusterError, match="expected a cluster file"):
        read_cluster(tmp_path / "big.toml")


def test_a_link_written_as_a_number_is_refused(tmp_path):
    values = asdict(cluster_preset("laptop"))
    assert set(values) > {"intra", "host"}
    path = tmp_path / "c.toml"
    write_cluster(path, cluster_preset("laptop"))
    path.write_text("host = 3\n" + path.read_text().split("[host]")[0])
    with pytest.raises(ClusterError, match="host: it is 3: "):
        read_cluster(path)


def test_a_cluster_may_leave_its_memory_bandwidth_open(tmp_path):
    known = cluster_preset("h100x8")
    assert known.memory_bytes_per_second == 3.35e12
    open_ = replace(known, memory_bytes_per_second=0.0)
    write_cluster(tmp_path / "open.toml", open_)
    assert read_cluster(tmp_path / "open.toml") == open_
    text = (tmp_path / "open.toml").read_text()
    (tmp_path / "old.toml").write_text(text.replace("memory_bytes_per_second = 0.0\n", ""))
    assert read_cluster(tmp_path / "old.toml") == open_
    with pytest.raises(ClusterError, match="memory_bytes_per_second is -1"):
        replace(known, memory_bytes_per_second=-1.0)
