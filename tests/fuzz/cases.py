"""The readers: each case makes a damaged input from random numbers and reads it as a user's program would.

A case is a function of (rng, folder). It may raise a `RelibraError`, and nothing else.
"""

import copy
import hashlib
import io
import json
import shutil
import zipfile
from dataclasses import asdict
from functools import cache

import numpy as np
from safetensors.numpy import save_file

from benchmarks.harness import results_files
from relibra import Demand, write_trace
from relibra.cli.serve.plan import open_served_model
from relibra.cluster import PRESETS, read_cluster, write_cluster
from relibra.planning.deployment.accelerator import accelerator, read_accelerators
from relibra.planning.deployment.deployment_files import read_deployment, write_deployment
from relibra.planning.deployment.performance import Efficiency
from relibra.planning.deployment.search import PAPER_SPACE, SearchSpace, search_pair
from relibra.planning.deployment.served_model import PAPER_MODELS
from relibra.planning.deployment.service_level import ServiceLevel
from relibra.planning.plan_files import FORMAT as PLAN
from relibra.planning.plan_files import read_plan, write_plan
from relibra.planning.validation import validate_plan
from relibra.reporting.data.metrics import read_metrics
from relibra.reporting.data.samples import read_samples
from relibra.rl.config.run_config import as_toml, load_config
from relibra.rl.run.checkpoints.checkpoint_manifest import digest_files, find_damage, write_manifest
from relibra.rl.run.run_folder import read_settings
from relibra.rl.tasks.rows import open_rows
from relibra.routing.demand_files import FORMAT as DEMAND
from relibra.routing.demand_files import read_demand, write_demand
from relibra.routing.readers import open_trace
from relibra.routing.readers.given_schedule import read_schedule, schedule_of
from relibra.routing.readers.npz_arrays import load_arrays, parse_npy
from relibra.routing.statistics import co_activation
from relibra.routing.synthetic import TraceShape
from relibra.timeline import Event, Timeline, read_timeline, write_timeline
from tests.fuzz.mutations import mutate_array, mutate_bytes, mutate_json, pick
from tests.planning.plans import planned_step
from tests.routing.traces import balanced_trace


@cache
def _trace():
    return balanced_trace(TraceShape(rows_per_sample=[5, 0, 7, 3], num_layers=2, num_experts=8, top_k=2))


@cache
def _step():
    return planned_step(np.random.default_rng(0), micro_batches=2)


def _rewrite(path, data):
    path.write_bytes(data)
    return path


def _text(rng, value):
    """Return damaged JSON: as a value, or as text."""
    if rng.random() < 0.5:
        return json.dumps(mutate_json(rng, value)).encode()
    return mutate_bytes(rng, json.dumps(value).encode())


def trace_folder(rng, folder):
    path = folder / "trace"
    shutil.rmtree(path, ignore_errors=True)
    write_trace(_trace(), path, shard_rows=8)
    index, shard = path / "index.json", sorted(path.glob("*.safetensors"))[0]
    body = json.loads(index.read_text())
    body.pop("digest")
    if rng.random() < 0.5:  # with digests that fit, as a faulty writer would make it
        _rewrite(shard, mutate_bytes(rng, shard.read_bytes()))
        entry = next(one for one in body["shards"] if one["file"] == shard.name)
        entry["size"], entry["sha256"] = shard.stat().st_size, hashlib.sha256(shard.read_bytes()).hexdigest()
    if rng.random() < 0.6:
        body = mutate_json(rng, body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    text = json.dumps({"digest": digest, **body} if isinstance(body, dict) else body).encode()
    _rewrite(index, mutate_bytes(rng, text) if rng.random() < 0.2 else text)
    use_trace(open_trace(path))


def use_trace(trace):
    """Derive from a trace what commands derive."""
    trace.validate()
    Demand.from_trace(trace)
    co_activation(trace)


def _archive(rng, path, arrays):
    """Write an archive: arrays damaged, or its bytes, stored or compressed in one of four ways."""
    buffer = io.BytesIO()
    damaged = rng.random() < 0.7
    with zipfile.ZipFile(buffer, "w", pick(rng, (0, 8, 12, 14))) as archive:
        for name, array in arrays.items():
            if damaged and rng.random() < 0.4:
                array = mutate_array(rng, array)
            file = io.BytesIO()
            np.save(file, array)
            data = file.getvalue()
            archive.writestr(f"{name}.npy", mutate_bytes(rng, data) if rng.random() < 0.1 else data)
    data = buffer.getvalue()
    return _rewrite(path, data if damaged else mutate_bytes(rng, data))


def npz_trace(rng, folder):
    ids = _trace().experts_TLK
    arrays = {"ids": ids, "seqlen": np.array([5, 0, 7, 3]), "layers": np.array([1, 4])}
    arrays |= {"dataset": np.array([0, 1, 1, 0]), "dataset_names": np.array(["a", "b"])}
    kept = {name: array for name, array in arrays.items() if rng.random() < 0.9}
    use_trace(open_trace(_archive(rng, folder / "x.npz", kept), pick(rng, (None, None, 8, 60, 1 << 20))))


def npz_padded(rng, folder):
    """Padded samples and masks, in archives and alone."""
    ids = np.full((3, 4, 2, 2), -1)
    for s, length in enumerate((4, 0, 2)):
        ids[s, :length] = _trace().experts_TLK[:length]
    arrays = {"ids": ids, "seqlen": np.array([4, 0, 2]), "valid": rng.random((3, 4)) < 0.8}
    if rng.random() < 0.3:
        arrays |= {"ids": ids.reshape(12, 2, 2), "valid": arrays["valid"].reshape(12), "seqlen": np.array([4, 4, 4])}
    kept = {name: array for name, array in arrays.items() if rng.random() < 0.8}
    use_trace(open_trace(_archive(rng, folder / "p.npz", kept), pick(rng, (None, 8, 60))))


def npy_trace(rng, folder):
    ids = _trace().experts_TLK.astype(np.int64)
    ids = ids if rng.random() < 0.5 else np.stack([ids, np.where(np.arange(15)[:, None, None] < 9, ids, -1)])
    file = io.BytesIO()
    np.save(file, mutate_array(rng, ids) if rng.random() < 0.7 else ids)
    data = mutate_bytes(rng, file.getvalue()) if rng.random() < 0.5 else file.getvalue()
    use_trace(open_trace(_rewrite(folder / "x.npy", data), pick(rng, (None, 8))))


def npz_schedule(rng, folder):
    arrays = {"micro_batch_S": np.array([0, 1, 1, -1]), "rank_S": np.array([0, 1, 0, 0])}
    arrays |= {"mini_batch_M": np.array([0, 0]), "sample_ids": np.array([3, 1, 2, 0])}
    kept = {name: array for name, array in arrays.items() if rng.random() < 0.9}
    given = read_schedule(_archive(rng, folder / "s.npz", kept))
    schedule_of(_trace(), given, int(pick(rng, (1, 2, 64))), pick(rng, (None, 4)))


def npy_bytes(rng, _):
    file = io.BytesIO()
    np.save(file, _trace().experts_TLK)
    try:
        parse_npy(mutate_bytes(rng, file.getvalue()))
    except ValueError:
        return  # as its docstring says: the server's client turns it into a sentence


def any_archive(rng, folder):
    load_arrays(_archive(rng, folder / "x.npz", {"a": np.arange(5), "b": np.zeros((2, 3))}))


def _signed(path, form, arrays, facts):
    """Write a file of tensors with a fitting checksum, whatever it says."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    body = {"format": form.name, "version": form.version, "checksum": digest.hexdigest(), "facts": facts}
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, {"relibra": json.dumps(body)}
    )


_STORABLE = "biuf"


def _tensor_file(rng, path, form, value, facts, write):
    """Write a damaged file of tensors; with a fitting checksum more often than not."""
    if rng.random() < 0.3:
        write(path, value)
        _rewrite(path, mutate_bytes(rng, path.read_bytes()))
        return path
    arrays = {name: array for name in form.axes if (array := getattr(value, name, None)) is not None}
    for name in list(arrays):
        if rng.random() < 0.15:
            arrays[name] = mutate_array(rng, arrays[name])
        if arrays[name].dtype.kind not in _STORABLE or rng.random() < 0.02:
            del arrays[name]
    _signed(path, form, arrays, mutate_json(rng, facts) if rng.random() < 0.3 else facts)
    return path


def demand_file(rng, folder):
    demand = _step()[1]
    facts = {"top_k": demand.top_k}
    use_demand(read_demand(_tensor_file(rng, folder / "d.safetensors", DEMAND, demand, facts, write_demand)))


def use_demand(demand):
    """Derive from a demand what commands derive."""
    demand.digest()
    assert len(demand.length_S) == len(demand.sample_ids)
    if hasattr(demand, "load_MLE"):
        assert demand.load_MLE.ndim == 3


def plan_file(rng, folder):
    plan, demand = _step()
    names = "balancer num_nodes ranks_per_node resident gradient_wire scope plan_seconds demand_digest"
    facts = {name: getattr(plan, name) for name in names.split()}
    facts |= {"predicted": dict(plan.predicted), "digest": plan.digest()}
    read = read_plan(_tensor_file(rng, folder / "p.safetensors", PLAN, plan, facts, write_plan))
    validate_plan(read, read.topology, demand)


def cluster_file(rng, folder):
    path = folder / "c.toml"
    write_cluster(path, pick(rng, list(PRESETS.values())))
    cluster = read_cluster(_rewrite(path, mutate_bytes(rng, path.read_bytes())))
    cluster.gemm_seconds(np.array([0, 1, 1000]), 1e6)


@cache
def _deployment():
    pair = accelerator("h20"), accelerator("l40s")
    level = ServiceLevel(seconds_per_token=0.15, context=650)
    return search_pair(PAPER_MODELS["dbrx"], level, pair, PAPER_SPACE, Efficiency())


def deployment_file(rng, folder):
    path = folder / "deployment.json"
    write_deployment(path, _deployment())
    body = json.loads(path.read_text())
    if rng.random() < 0.7:  # with a digest that fits, as a faulty writer would make it
        body.pop("sha256")
        part = pick(rng, ("model", "level", "efficiency", "attention", "experts"))
        body = {**body, part: mutate_json(rng, body[part])} if rng.random() < 0.7 else mutate_json(rng, body)
        if isinstance(body, dict):
            body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        _rewrite(path, json.dumps(body).encode())
    else:
        _rewrite(path, mutate_bytes(rng, path.read_bytes()))
    plan = read_deployment(path)
    assert plan.iteration_seconds <= plan.level.seconds_per_token
    write_deployment(folder / "again.json", plan)


def accelerator_file(rng, folder):
    table = {key: value for key, value in asdict(accelerator("h20")).items() if key != "name"}
    text = "".join(f"{key} = {value}\n" for key, value in table.items())
    for gpu in read_accelerators(_rewrite(folder / "g.toml", mutate_bytes(rng, f"[a]\n{text}".encode()))).values():
        level = ServiceLevel(seconds_per_token=0.15, context=650)
        space = SearchSpace(node_counts=(1,), ways=(1,), experts_per_node=(1,))
        search_pair(PAPER_MODELS["dbrx"], level, (gpu, gpu), space, Efficiency())


def timeline_file(rng, folder):
    path = folder / "t.jsonl"
    events = tuple(Event("push", i, 0, i % 2, 0.5 * i, 0.25, i, "x") for i in range(4))
    write_timeline(path, Timeline(events=events, num_ranks=2, label="measured", origin=5.0))
    if rng.random() < 0.5:
        lines = path.read_bytes().splitlines(keepends=True)
        header = json.loads(lines[0])
        place = int(rng.integers(1, len(lines)))
        lines[place] = json.dumps(mutate_json(rng, json.loads(lines[place]))).encode() + b"\n"
        digest = hashlib.sha256(json.dumps({k: v for k, v in header.items() if k != "sha256"}, sort_keys=True).encode())
        for line in lines[1:]:
            digest.update(line)
        lines[0] = json.dumps({**header, "sha256": digest.hexdigest()}).encode() + b"\n"
        _rewrite(path, b"".join(lines))
    else:
        _rewrite(path, mutate_bytes(rng, path.read_bytes()))
    read = read_timeline(path)
    read.perfetto()
    assert len(read.exposed_seconds()) == read.num_ranks


@cache
def _defaults():
    return as_toml(load_config(None)), load_config(None).model_dump(mode="json")


def settings_file(rng, folder):
    load_config(_rewrite(folder / "x.toml", mutate_bytes(rng, _defaults()[0].encode())))


def settings_values(rng, _):
    body = copy.deepcopy(_defaults()[1])
    if rng.random() < 0.3:
        body["algorithm"] = {"preset": pick(rng, ("tppo", "ppo", "grpo", "gspo"))}
        body["rollout"].pop("window")
    body = mutate_json(rng, body)
    load_config(None, base=body if isinstance(body, dict) else {"run": body})


def settings_overrides(rng, _):
    sections = _defaults()[1]
    overrides = []
    for _ in range(int(rng.integers(1, 5))):
        section = pick(rng, list(sections))
        text = f"{section}.{pick(rng, list(sections[section]))}={json.dumps(mutate_json(rng, 1))}"
        damaged = mutate_bytes(rng, text.encode()).decode("utf-8", errors="surrogateescape")
        overrides.append(damaged if rng.random() < 0.4 else text)
    load_config(None, overrides)


def resumed_settings(rng, folder):
    (folder / "checkpoints" / "step-00001").mkdir(parents=True, exist_ok=True)
    body = {**_defaults()[1], "versions": {"relibra": "0.3.0"}}
    _rewrite(folder / "config.json", _text(rng, body))
    load_config(None, base=read_settings(folder))


_ROW = {"step": 3, "reward": 0.5, "seconds": {"rollout": 1.0}, "alarms": ["x"], "evaluation": None, "rank_skew": 1.2}
_SAMPLE = {"step": 3, "prompt": "1+1", "response": "2", "reward": 1.0, "finish": "stop", "advantage": 0.1}


def _log(rng, path, row):
    lines = [json.dumps({**row, "step": step}, ensure_ascii=False).encode() for step in range(4)]
    place = int(rng.integers(len(lines)))
    lines[place] = _text(rng, json.loads(lines[place]))
    return _rewrite(path, mutate_bytes(rng, b"\n".join(lines)) if rng.random() < 0.3 else b"\n".join(lines) + b"\n")


def metrics_log(rng, folder):
    found = read_metrics(_log(rng, folder / "metrics.jsonl", _ROW))
    assert len(found.steps) == len(found.rows)
    for name in _ROW:
        found.column(name)
    found.texts("alarms")


def samples_log(rng, folder):
    assert read_samples(_log(rng, folder / "samples.jsonl", _SAMPLE)).num_steps >= 0


def json_lines(rng, folder):
    row = {"prompt": [{"role": "user", "content": "1+1"}], "answer": 2}
    rows = open_rows(_log(rng, folder / "rows.jsonl", row), "task.file")
    for index, row in enumerate(rows):
        assert isinstance(row, dict)
        rows.row(index)


@cache
def _parquet():
    import pyarrow as pa
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(
        pa.table({"prompt": ["1+1", "2+2"] * 20, "answer": [2, 4] * 20, "more": [["a"], None] * 20}), file
    )
    return file.getvalue()


def parquet_file(rng, folder):
    rows = open_rows(_rewrite(folder / "rows.parquet", mutate_bytes(rng, _parquet())), "task.file")
    for index, _ in zip(range(3), rows, strict=False):
        rows.row(index)


def model_config(rng, folder):
    body = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "head_dim": 16,
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 50,
        "num_key_value_heads": 2, "layer_types": ["sliding_attention"], "sliding_window": 8, "intermediate_size": 64,
    }  # fmt: skip
    _rewrite(folder / "config.json", _text(rng, body))
    load_config(None, [f"model.path={folder}"])
    open_served_model(str(folder))


def checkpoint_manifest(rng, folder):
    path = folder / "step-00001"
    if not path.is_dir():
        path.mkdir()
        (path / "state.json").write_text("{}")
    files = digest_files(path, 0, 1)
    write_manifest(path, files)
    _rewrite(path / "manifest.json", _text(rng, json.loads((path / "manifest.json").read_text())))
    find_damage(path, 0, 1)


def results(rng, folder):
    row = {"case": "x", "label": "model", "seconds": 1.5, "commit": "a", "machine": "b", "versions": {}, "seed": 0}
    rows = [{**row, "command": "c", "table": {"x": 1}}] * 2
    (folder / "a.json").write_text(json.dumps(rows))
    before = results_files.read_results(folder / "a.json")
    after = results_files.read_results(_rewrite(folder / "b.json", _text(rng, rows)))
    results_files.refuse_strangers(before, after, ("a", "b"))
    [str(one) for one in results_files.compare(before, after, 0.1)]


CASES = {
    function.__name__: function
    for function in (
        *(trace_folder, npz_trace, npz_padded, npy_trace, npz_schedule, npy_bytes, any_archive),
        *(demand_file, plan_file, cluster_file, deployment_file, accelerator_file),
        *(timeline_file, settings_file, settings_values, settings_overrides, resumed_settings, metrics_log),
        *(samples_log, json_lines, parquet_file, model_config, checkpoint_manifest, results),
    )
}
