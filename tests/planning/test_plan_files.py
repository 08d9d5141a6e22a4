import contextlib
import copy
import json
import re
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from relibra import PlanError
from relibra.planning.plan_files import FORMAT, read_plan, write_plan
from relibra.routing.tensor_files import MAX_HEADER_BYTES, write_tensors
from tests.planning.plans import planned_step, planned_steps
from tests.routing.traces import assert_same

in_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def stored(tmp_path):
    plan, _ = planned_step(np.random.default_rng(0))
    write_plan(tmp_path / "plan.safetensors", plan)
    return plan, tmp_path / "plan.safetensors"


def facts_of(plan):
    names = "balancer num_nodes ranks_per_node resident gradient_wire scope plan_seconds assumed_model demand_digest"
    return {name: getattr(plan, name) for name in names.split()} | {
        "predicted": plan.predicted,
        "digest": plan.digest(),
    }


def forge(path, plan, *, arrays=(), **facts):
    """Write a file with a fitting checksum, whatever it says."""
    tensors = {name: getattr(plan, name) for name in FORMAT.axes} | dict(arrays)
    write_tensors(path, FORMAT, tensors, facts_of(plan) | facts)


@in_folder
@given(planned_steps())
def test_round_trip(tmp_path, step):
    plan, _ = step
    write_plan(tmp_path / "p.safetensors", plan)
    again = read_plan(tmp_path / "p.safetensors")
    assert_same(again, plan)
    assert again.digest() == plan.digest()
    arrays = load_file(tmp_path / "p.safetensors")  # as other programs read them
    assert np.array_equal(arrays["replica_MLRB"], plan.replica_MLRB)
    assert set(arrays) == {*plan.decisions(), "bound_ML"}


def test_same_plan_same_bytes(stored, tmp_path):
    plan, path = stored
    for i in range(5):
        write_plan(tmp_path / f"{i}.safetensors", plan)
        assert (tmp_path / f"{i}.safetensors").read_bytes() == path.read_bytes()


def test_a_step_without_micro_batches(tmp_path):
    plan, _ = planned_step(np.random.default_rng(0))
    none = {name: getattr(plan, name)[:0] for name in ("replica_MLRB", "quota_MLRB", "bound_ML", "group_M")}
    plan = replace(plan, micro_batch_S=np.full_like(plan.micro_batch_S, -1), **none)
    write_plan(tmp_path / "p", plan)
    assert_same(read_plan(tmp_path / "p"), plan)


@settings(in_folder, max_examples=300)
@given(data=st.data())
def test_any_damage_is_noticed_or_means_nothing(stored, data):
    plan, path = stored
    original = path.read_bytes()
    try:
        damaged = bytearray(original)
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(damaged)))
        path.write_bytes(damaged[:cut] if data.draw(st.booleans()) else damaged)
        with contextlib.suppress(PlanError):
            assert_same(read_plan(path), plan)
    finally:
        path.write_bytes(original)


def test_every_flipped_bit_in_the_payload_is_noticed(stored):
    _, path = stored
    original = path.read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    for where in range(8 + length, len(original)):
        damaged = bytearray(original)
        damaged[where] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(PlanError, match="checksum does not match"):
            read_plan(path)


@settings(in_folder, max_examples=200)
@given(data=st.data())
def test_forged_values_raise_or_read_as_a_plan_within_range(tmp_path, data):
    """Whoever writes a checksum that fits may still not make a reader read out of place."""
    plan, _ = planned_step(np.random.default_rng(0))
    name = data.draw(st.sampled_from(sorted(FORMAT.axes)))
    array = getattr(plan, name).copy()
    info = np.iinfo(array.dtype)
    edges = st.sampled_from([-2, -1, 0, 1, plan.num_experts, int(info.min), int(info.max)])
    array.ravel()[data.draw(st.integers(0, array.size - 1))] = data.draw(edges)
    forged = replace(plan, **{name: array})
    forge(tmp_path / "p", forged)
    with contextlib.suppress(PlanError):
        read = read_plan(tmp_path / "p")
        assert read.digest() == forged.digest()
        assert read.replica_MLRB.max() < plan.num_experts
        assert sorted(read.physical_to_logical_map[0]) == list(range(plan.num_experts))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"num_nodes": 3}, "3 nodes x 2 ranks do not fit its 4 ranks"),
        ({"num_nodes": 0}, "num_nodes: Input should be greater than or equal to 1"),
        ({"num_nodes": 1 << 60}, "num_nodes"),
        ({"num_nodes": "2"}, "num_nodes: Input should be a valid integer"),
        ({"scope": "world"}, "scope: Input should be 'node' or 'cluster'"),
        ({"predicted": {"total": -1.0}}, r"predicted\.total"),
        ({"plan_seconds": "soon"}, "plan_seconds"),
        ({"digest": "0" * 64}, "is damaged: its digest is .* '000000000000'"),
        ({"surprise": 1}, "surprise: Extra inputs"),
    ],
)
def test_forged_facts_are_refused(tmp_path, facts, sentence):
    plan, _ = planned_step(np.random.default_rng(0))
    forge(tmp_path / "p", plan, **facts)
    with pytest.raises(PlanError, match=sentence):
        read_plan(tmp_path / "p")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("micro_batch_S", 3, r"micro_batch_S holds .*3: allowed are -1\.\.2"),
        ("rank_S", 4, r"rank_S of samples that run holds .*4: allowed are 0\.\.3"),
        ("replica_MLRB", 8, r"replica_MLRB holds .*8: allowed are -1\.\.7"),
        ("quota_MLRB", -1, "quota_MLRB holds -1"),
        ("bound_ML", -1, "bound_ML holds -1"),
        ("layer_ids", 9, "layer ids .* must rise"),
        ("physical_to_logical_map", 8, "physical_to_logical_map of layer 1 must hold each of the 8 experts"),
        ("previous_map", 7, "previous_map of layer 1 must hold"),
    ],
)
def test_values_out_of_range_are_neither_read_nor_written(tmp_path, name, value, sentence):
    plan, _ = planned_step(np.random.default_rng(0))
    array = getattr(plan, name).copy()
    array.flat[0] = value
    plan = replace(plan, **{name: array})
    with pytest.raises(PlanError, match=sentence):
        write_plan(tmp_path / "w", plan)
    assert not (tmp_path / "w").exists()
    forge(tmp_path / "p", plan)
    with pytest.raises(PlanError, match=sentence):
        read_plan(tmp_path / "p")


def with_unchecked(plan, **arrays):
    """Copy a plan past the shape checker that tests run under and users do not."""
    wrong = copy.copy(plan)
    for name, array in arrays.items():
        object.__setattr__(wrong, name, array)
    return wrong


def test_wrong_types_and_shapes_are_not_written(tmp_path):
    plan, _ = planned_step(np.random.default_rng(0))
    with pytest.raises(PlanError, match=r"a step plan: bound_ML is int32 \[3, 2\], expected int64 \[M, L\]"):
        write_plan(tmp_path / "p", with_unchecked(plan, bound_ML=plan.bound_ML.astype(np.int32)))
    with pytest.raises(PlanError, match="axis S of rank_S has length 6, elsewhere 7"):
        write_plan(tmp_path / "p", with_unchecked(plan, rank_S=plan.rank_S[:6]))
    with pytest.raises(PlanError, match=r"plan of 'made up': predicted\.total"):
        write_plan(tmp_path / "p", replace(plan, predicted={"total": float("nan")}))
    empty = replace(plan, replica_MLRB=np.full_like(plan.replica_MLRB, -1), quota_MLRB=np.ones_like(plan.quota_MLRB))
    with pytest.raises(PlanError, match="quota_MLRB of empty slots"):
        write_plan(tmp_path / "p", empty)


def header_of(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_header(path, header, payload):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)


@pytest.mark.parametrize("shape", [[1 << 40, 2], [2, 1 << 62], [0, 1 << 62], [3, 3], [6]])
def test_forged_shapes_are_refused_before_they_are_allocated(stored, shape):
    _, path = stored
    header, payload = header_of(path)
    header["bound_ML"]["shape"] = shape
    put_header(path, header, payload)
    tracemalloc.start()
    with pytest.raises(PlanError, match=r"cannot be read as safetensors|axis|bound_ML is"):
        read_plan(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("length", [2**64 - 1, 2**40, MAX_HEADER_BYTES + 1])
def test_a_huge_header_is_refused_before_it_is_read(stored, length):
    _, path = stored
    data = bytearray(path.read_bytes())
    data[:8] = struct.pack("<Q", length)
    path.write_bytes(data)
    with pytest.raises(PlanError, match=f"a header of {length} bytes does not fit"):
        read_plan(path)


def test_arrays_missing_or_unknown(stored):
    plan, path = stored
    with pytest.raises(PlanError, match=r"holds arrays .*: expected"):
        forge(path, plan, arrays={"surprise": np.zeros(1, np.int32)})
    header, payload = header_of(path)
    header["surprise"] = header.pop("bound_ML")
    put_header(path, header, payload)
    with pytest.raises(PlanError, match=r"holds arrays .*'surprise'"):
        read_plan(path)


def test_other_versions_and_foreign_files(stored, tmp_path):
    _, path = stored
    data = path.read_bytes()
    path.write_bytes(data.replace(rb"\"version\": 3", rb"\"version\": 4"))
    with pytest.raises(PlanError, match="format version 4: this relibra reads version 3"):
        read_plan(path)
    path.write_bytes(data.replace(b"relibra.step-plan", b"relibra.something"))
    with pytest.raises(PlanError, match=r"is not a step plan: its format must be 'relibra\.step-plan'"):
        read_plan(path)
    save_file({"x": np.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(PlanError, match="is not a step plan"):
        read_plan(tmp_path / "foreign")
    save_file({"x": np.zeros(3)}, tmp_path / "nested", metadata={"relibra": "[" * 100_000})
    with pytest.raises(PlanError, match="holds no JSON"):
        read_plan(tmp_path / "nested")
    for content, sentence in (
        (b"hello, this is no plan at all", "is not a step plan, or is truncated"),
        (b"", "is not a step plan, or is truncated"),
        (data[:-1], "cannot be read as safetensors"),
    ):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(PlanError, match=sentence):
            read_plan(tmp_path / "other")
    for nothing in (tmp_path, tmp_path / "none"):
        with pytest.raises(PlanError, match="expected a step plan"):
            read_plan(nothing)


def test_axes_without_a_byte_to_show_cannot_be_of_any_length(tmp_path):
    plan, _ = planned_step(np.random.default_rng(0))
    L, R = plan.replica_MLRB.shape[1:3]
    endless = {name: np.zeros((0, L, R, 1 << 40), getattr(plan, name).dtype) for name in ("replica_MLRB", "quota_MLRB")}
    none_S = np.full_like(plan.micro_batch_S, -1)
    forged = replace(plan, micro_batch_S=none_S, bound_ML=plan.bound_ML[:0], **endless)
    with pytest.raises(PlanError, match=r"axis B of .* has length 1099511627776, at most 1024"):
        forge(tmp_path / "p", forged)  # writing and reading check the same layout


def test_the_reader_in_the_document_needs_no_relibra(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "plan-format.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert "relibra" not in "".join(re.findall(r"^(?:from|import) .*$", program, flags=re.MULTILINE))
    assert len(program.strip().splitlines()) <= 12
    plan, _ = planned_step(np.random.default_rng(0))
    write_plan(tmp_path / "step.safetensors", plan)
    read: dict = {}
    exec(program.replace("step.safetensors", str(tmp_path / "step.safetensors")), read)
    for layer, homes in enumerate(read["home"]):
        assert [homes[expert] for expert in range(plan.num_experts)] == plan.home_LE[layer].tolist()
    facts = read["body"]["facts"]
    assert (facts["resident"], facts["digest"]) == (plan.resident, plan.digest())
    tables = re.findall(r"^\| (`[\w`, ]+`)", page.split("## For a trainer")[0], flags=re.MULTILINE)
    named = set(re.findall(r"\w+", " ".join(tables)))
    assert set(read["arrays"]) | {"group_M"} | set(facts) <= named


def write_version_2(path, plan, resident_slots, **facts):
    """Write the plan as relibra wrote it before slots had one lifetime."""
    digest = plan.digest_under(2, plan.num_nodes, plan.ranks_per_node, resident_slots, plan.scope)
    body = {**facts_of(plan), "resident_slots": resident_slots, "digest": digest, **facts}
    del body["resident"], body["gradient_wire"]
    arrays = {name: getattr(plan, name) for name in FORMAT.axes}
    write_tensors(path, replace(FORMAT, version=2), arrays, body)


@pytest.mark.parametrize("resident", [False, True])
def test_version_2_files_are_read_to_the_same_decisions(tmp_path, resident):
    plan, _ = planned_step(np.random.default_rng(0), slots=2, resident=resident)
    write_version_2(tmp_path / "p", plan, 2 * resident)
    again = read_plan(tmp_path / "p")
    assert again.digest() == replace(plan, gradient_wire=again.gradient_wire).digest()
    assert (again.resident, again.gradient_wire) == (resident, "float32" if resident else "model")
    write_version_2(tmp_path / "p", plan, 2 * resident, digest="0" * 64)
    with pytest.raises(PlanError, match="is damaged"):
        read_plan(tmp_path / "p")


@pytest.mark.parametrize("facts", [{"resident_slots": 1}, {"static_rows": True}, {"resident_slots": "many"}], ids=str)
def test_version_2_files_of_two_lifetimes_are_refused(tmp_path, facts):
    plan, _ = planned_step(np.random.default_rng(0), slots=2, resident=True)
    write_version_2(tmp_path / "p", plan, **{"resident_slots": 2, **facts})
    with pytest.raises(PlanError, match="plan the step again"):
        read_plan(tmp_path / "p")
