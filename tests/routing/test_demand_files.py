import contextlib
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relibra import Demand, ScheduledDemand, TraceError
from relibra.routing.demand_files import FORMAT, read_demand, read_scheduled_demand, write_demand
from relibra.routing.statistics import co_activation
from relibra.routing.synthetic import TraceShape
from relibra.routing.tensor_files import write_tensors
from tests.routing.traces import assert_same, balanced_trace, traces

in_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def demand():
    """6 samples in 2 micro-batches on 2 ranks, the last one left out, with pairs."""
    trace = balanced_trace(TraceShape(rows_per_sample=[5] * 6, num_layers=2, num_experts=8, top_k=2))
    demand = Demand.from_trace(trace).with_schedule(np.array([0, 0, 1, 1, 1, -1]), np.array([0, 1, 0, 1, 1, 0]), 2)
    return replace(demand, pairs_LEE=co_activation(trace))


@in_folder
@given(traces(), st.booleans(), st.booleans())
def test_round_trip(tmp_path, trace, scheduled, paired):
    demand = Demand.from_trace(trace)
    if scheduled:
        demand = demand.with_schedule(np.arange(trace.num_samples) % 3 - 1, np.zeros(trace.num_samples, int), 2)
    if paired:
        demand = replace(demand, pairs_LEE=co_activation(trace))
    write_demand(tmp_path / "d", demand)
    assert_same(read_demand(tmp_path / "d"), demand)


def test_ids_of_any_integer_type(tmp_path, demand):
    wide = replace(demand, layer_ids=demand.layer_ids.astype(np.int64), sample_ids=demand.sample_ids.astype(np.int16))
    write_demand(tmp_path / "d", wide)
    assert_same(read_demand(tmp_path / "d"), demand)


@settings(in_folder, max_examples=200)
@given(data=st.data())
def test_any_damage_is_noticed_or_means_nothing(tmp_path, demand, data):
    path = tmp_path / "d"
    write_demand(path, demand)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    path.write_bytes(damaged[:cut] if data.draw(st.booleans()) else damaged)
    with contextlib.suppress(TraceError):
        assert_same(read_demand(path), demand)


def forge(path, demand, *, facts=None, **changes):
    arrays = {name: getattr(demand, name) for name in FORMAT.axes} | changes
    arrays = {name: array for name, array in arrays.items() if array is not None}
    write_tensors(path, FORMAT, arrays, {"top_k": demand.top_k} if facts is None else facts)


@pytest.mark.parametrize(
    ("name", "where", "value", "sentence"),
    [
        ("counts_SLE", (0, 0, 0), -1, "negative token counts"),
        ("tokens_MLRE", (0, 0, 0, 0), -1, "negative counts"),
        ("tokens_MLRE", (0, 0, 0, 0), 1000, "more token-slots to an expert than its samples hold"),
        ("micro_batch_S", (0,), 2, r"outside its 2 micro-batches: allowed are -1 \(left out\) to 1"),
        ("rank_S", (0,), 2, r"outside its 2 ranks: allowed are 0\.\.1"),
        ("layer_ids", (0,), -1, "layer ids .* must rise from 0"),
        ("layer_ids", (0,), 1, "layer ids .* must rise from 0"),
        ("pairs_LEE", (0, 0, 0), -1, "negative co-routing pairs"),
    ],
)
def test_impossible_values_are_neither_read_nor_written(tmp_path, demand, name, where, value, sentence):
    array = getattr(demand, name).copy()
    array[where] = value
    with pytest.raises(TraceError, match=sentence):
        write_demand(tmp_path / "w", replace(demand, **{name: array}))
    assert not (tmp_path / "w").exists()
    forge(tmp_path / "d", demand, **{name: array})
    with pytest.raises(TraceError, match=sentence):
        read_demand(tmp_path / "d")


@pytest.mark.parametrize("facts", [{}, {"top_k": True}, {"top_k": "2"}, {"top_k": 0}, {"top_k": 2, "more": 1}])
def test_forged_facts_are_refused(tmp_path, demand, facts):
    forge(tmp_path / "d", demand, facts=facts)
    with pytest.raises(TraceError, match="top_k"):
        read_demand(tmp_path / "d")


def test_the_kind_of_demand_follows_from_the_file(tmp_path, demand):
    write_demand(tmp_path / "scheduled", demand)
    assert isinstance(read_scheduled_demand(tmp_path / "scheduled"), ScheduledDemand)
    forge(tmp_path / "bare", demand, rank_S=None, micro_batch_S=None, tokens_MLRE=None)
    assert type(read_demand(tmp_path / "bare")) is Demand
    with pytest.raises(TraceError, match="bare has no schedule"):
        read_scheduled_demand(tmp_path / "bare")
    forge(tmp_path / "half", demand, rank_S=None)
    with pytest.raises(TraceError, match="holds only tokens_MLRE, micro_batch_S"):
        read_demand(tmp_path / "half")
    wrong = replace(demand, tokens_MLRE=np.ascontiguousarray(demand.tokens_MLRE[::-1]))
    with pytest.raises(TraceError, match="not those of its samples"):
        write_demand(tmp_path / "d", wrong)
    groups = np.zeros(len(demand.tokens_MLRE), dtype=np.int32)
    forge(tmp_path / "groups", demand, rank_S=None, micro_batch_S=None, tokens_MLRE=None, group_M=groups)
    assert type(read_demand(tmp_path / "groups")) is Demand


def test_plans_missing_and_cut_files_are_no_demand(tmp_path, demand):
    with pytest.raises(TraceError, match="expected a demand"):
        read_demand(tmp_path / "none")
    write_demand(tmp_path / "d", demand)
    data = (tmp_path / "d").read_bytes()
    (tmp_path / "d").write_bytes(data.replace(b"relibra.demand", b"relibra.dement"))
    with pytest.raises(TraceError, match=r"is not a demand: its format must be 'relibra\.demand'"):
        read_demand(tmp_path / "d")
    (tmp_path / "d").write_bytes(data)
    os.truncate(tmp_path / "d", len(data) - 1)
    with pytest.raises(TraceError, match="cannot be read as safetensors"):
        read_demand(tmp_path / "d")
