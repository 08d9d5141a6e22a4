import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra import PlanError
from relibra.planning.exports import (
    filled_map,
    physical_maps,
    write_sglang_json,
    write_tensorrt_llm_yaml,
    write_trainer_npz,
    write_vllm_ascend_json,
)
from relibra.routing.demand import Demand
from tests.planning.plans import planned_step, planned_steps


@given(planned_steps(), st.booleans())
def test_maps_hold_homes_then_replicas_and_invert_each_other(step, one_micro_batch):
    plan, _ = step
    maps = physical_maps(plan, 0 if one_micro_batch else None)
    L, R, E, B = len(plan.layer_ids), plan.num_ranks, plan.num_experts, plan.slots
    per_rank = E // R + B
    assert maps.physical_to_logical_map.shape == (L, R * per_rank)
    assert maps.physical_to_logical_map.dtype == np.int64
    by_rank = maps.physical_to_logical_map.reshape(L, R, per_rank)
    assert np.array_equal(by_rank[:, :, : E // R].reshape(L, E), plan.physical_to_logical_map)
    if one_micro_batch:
        assert np.array_equal(by_rank[:, :, E // R :], plan.replica_MLRB[0])
    for layer, row in enumerate(maps.physical_to_logical_map):
        for rank in by_rank[layer]:
            held = rank[rank >= 0]
            assert len(set(held)) == len(held)
        for expert in range(E):
            slots = maps.logical_to_physical_map[layer, expert]
            assert sorted(slots[slots >= 0]) == np.flatnonzero(row == expert).tolist()
            assert slots[0] // per_rank == plan.home_LE[layer, expert]
            assert maps.logical_replica_count[layer, expert] == (row == expert).sum()


def test_a_step_keeps_the_replicas_that_carry_most():
    plan, _ = planned_step(np.random.default_rng(0), nodes=1, per_node=2, experts_per_rank=3, layers=1, slots=2)
    plan = replace(plan, physical_to_logical_map=plan.previous_map)  # rank 0 is home of 0, 1, 2
    replica_MLRB, quota_MLRB = np.full((3, 1, 2, 2), -1, np.int16), np.zeros((3, 1, 2, 2), np.int32)
    replica_MLRB[:, 0, 0] = [[3, 4], [5, 4], [4, 3]]
    quota_MLRB[:, 0, 0] = [[2, 5], [7, 1], [1, 5]]  # 3: 7, 4: 7, 5: 7 token-slots; ties go to the lower id
    replica_MLRB[1, 0, 1, 0], quota_MLRB[1, 0, 1, 0] = 2, 1
    plan = replace(plan, replica_MLRB=replica_MLRB, quota_MLRB=quota_MLRB)
    assert physical_maps(plan).physical_to_logical_map.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 2, -1]]
    assert physical_maps(plan, 1).physical_to_logical_map.tolist() == [[0, 1, 2, 5, 4, 3, 4, 5, 2, -1]]
    assert physical_maps(plan).logical_to_physical_map[0, 3].tolist() == [5, 3]  # home first
    with pytest.raises(PlanError, match=r"micro-batch 3 is not in the plan: allowed are 0\.\.2"):
        physical_maps(plan, 3)


@given(planned_steps(max_slots=4))
def test_filling_changes_empty_slots_only(step):
    plan, demand = step
    before, after = physical_maps(plan).physical_to_logical_map, filled_map(plan, demand)
    assert (after >= 0).all()
    assert np.array_equal(after[before >= 0], before[before >= 0])
    per_rank = after.shape[1] // plan.num_ranks
    for rank in after.reshape(-1, per_rank):
        assert len(set(rank)) == min(per_rank, plan.num_experts)


def test_filling_prefers_the_highest_load_per_copy():
    plan, demand = planned_step(np.random.default_rng(0), nodes=1, per_node=2, experts_per_rank=2, layers=1, slots=2)
    plan = replace(plan, physical_to_logical_map=plan.previous_map, replica_MLRB=np.full_like(plan.replica_MLRB, -1))
    counts_SLE = np.zeros_like(demand.counts_SLE)
    counts_SLE[0, 0] = [9, 9, 4, 8]
    demand = replace(demand, counts_SLE=counts_SLE)
    assert filled_map(plan, demand).tolist() == [[0, 1, 3, 2, 2, 3, 0, 1]]
    with pytest.raises(PlanError, match="pass the demand it was made for"):
        filled_map(
            plan, Demand(counts_SLE=counts_SLE[:, :, :2], layer_ids=demand.layer_ids, sample_ids=demand.sample_ids)
        )


@given(planned_steps())
def test_engine_files_read_back(tmp_path_factory, step):
    plan, demand = step
    folder = tmp_path_factory.mktemp("exports")
    expected = filled_map(plan, demand)
    L, P = expected.shape

    write_sglang_json(folder / "s.json", plan, demand, num_hidden_layers=8)
    body = json.loads((folder / "s.json").read_text())
    assert list(body) == ["physical_to_logical_map"]
    assert np.array_equal(np.array(body["physical_to_logical_map"])[plan.layer_ids], expected)
    assert len(body["physical_to_logical_map"]) == 8
    assert body["physical_to_logical_map"][0] == [p % plan.num_experts for p in range(P)]  # layer 0 has no experts

    write_vllm_ascend_json(folder / "a.json", plan, demand)
    body = json.loads((folder / "a.json").read_text())
    assert body["moe_layer_count"] == L
    assert [layer["layer_id"] for layer in body["layer_list"]] == list(range(L))
    for layer, row in zip(body["layer_list"], expected, strict=True):
        assert layer["device_count"] == len(layer["device_list"]) == plan.num_ranks
        assert [device["device_id"] for device in layer["device_list"]] == list(range(plan.num_ranks))
        assert [e for device in layer["device_list"] for e in device["device_expert"]] == row.tolist()

    write_tensorrt_llm_yaml(folder / "t.yaml", plan, demand)
    text = (folder / "t.yaml").read_text()
    assert text.startswith(f"num_slots: {P}\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n")
    rows = {int(layer): json.loads(row) for layer, row in re.findall(r"^  (\d+): (\[.*\])$", text, re.MULTILINE)}
    assert rows == dict(zip(plan.layer_ids.tolist(), expected.tolist(), strict=True))


def test_sglang_layers(tmp_path):
    plan, demand = planned_step(np.random.default_rng(0), layers=2)  # decoder layers 1 and 3
    write_sglang_json(tmp_path / "s.json", plan, demand)
    assert len(json.loads((tmp_path / "s.json").read_text())["physical_to_logical_map"]) == 4
    with pytest.raises(PlanError, match="a model of 3 hidden layers has no layer 3"):
        write_sglang_json(tmp_path / "s.json", plan, demand, num_hidden_layers=3)


@given(planned_steps())
def test_a_trainer_gets_homes_schedule_and_quotas(tmp_path_factory, step):
    plan, demand = step
    path = tmp_path_factory.mktemp("exports") / "step.npz"
    write_trainer_npz(path, plan, demand)
    found = dict(np.load(path))
    assert np.array_equal(found["sample_ids"], demand.sample_ids)
    for name in ("micro_batch_S", "rank_S", "layer_ids", "home_LE", "replica_MLRB", "quota_MLRB"):
        assert np.array_equal(found[name], getattr(plan, name))
    assert np.array_equal(found["previous_home_LE"], plan.previous.home_LE)
    assert len(found["mini_batch_M"]) == len(plan.bound_ML)
    assert found["resident"] == plan.resident
    assert (str(found["digest"]), str(found["demand_digest"])) == (plan.digest(), plan.demand_digest)
    load_MLE = plan.scheduled(demand).load_MLE
    computed_MLR = np.zeros((*plan.bound_ML.shape, plan.num_ranks), dtype=np.int64)
    for m, layer, expert in np.ndindex(load_MLE.shape):
        copies = (plan.replica_MLRB[m, layer] == expert) * plan.quota_MLRB[m, layer]
        assert found["home_quota_MLE"][m, layer, expert] + copies.sum() == load_MLE[m, layer, expert]
        computed_MLR[m, layer, plan.home_LE[layer, expert]] += found["home_quota_MLE"][m, layer, expert]
    assert np.array_equal(computed_MLR + plan.quota_MLRB.sum(axis=3), plan.rank_load(plan.scheduled(demand)))
