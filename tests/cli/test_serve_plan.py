import itertools
import json
import re
import shlex
import tomllib
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import pytest

from relibra import ConfigError, write_trace
from relibra.cli.serve.run import planned_workers
from relibra.planning.deployment.accelerator import Accelerator, accelerator
from relibra.planning.deployment.deployment_files import read_deployment
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.serving.layout import WorkerLayout


def test_a_plan_is_searched_and_written(run, tmp_path):
    code, out, err = run("serve", "plan", "dbrx", "--gpus", "h20,L40S", "--output", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert "gpu h20, ways 8, nodes 1" in out
    assert "disaggregate yes" in " ".join(out.split())
    plan = read_deployment(tmp_path / "plan.json")
    assert (plan.attention.accelerator.name, plan.experts.accelerator.name) == ("h20", "l40s")
    assert plan.iteration_seconds <= 0.15


def test_gpus_of_a_file_are_considered_beside_the_default_ones(run, tmp_path):
    """GPUs that are named are the only ones; a table may also stand for a known name."""
    file = tmp_path / "gpus.toml"
    keys = {key: value for key, value in asdict(accelerator("h20")).items() if key != "name"}
    text = "\n".join(f"{key} = {value}" for key, value in keys.items())
    file.write_text(f"[Mine]\n{text}\n[l40s]\n{text}\n")

    def considered(*more):
        pairs = json.loads(run("serve", "plan", "dbrx", "--accelerators", file, "--json", *more)[1])["pairs"]
        return {(pair["attention"]["gpu"], pair["experts"]["gpu"]) for pair in pairs}

    assert considered() == set(itertools.product(("h20", "l40s", "mine"), repeat=2))
    assert considered("--gpus", "MINE") == {("mine", "mine")}


def test_a_server_takes_its_workers_from_a_plan_of_its_config(run, tmp_path):
    config = {
        "model_type": "mixtral", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 2048,
        "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "plan.json"
    code, out, _ = run("serve", "plan", tmp_path, "--gpus", "l40s", "--max-gpus", "8", "--output", path, "--json")
    assert code == 0
    assert all(pair["gpus"] <= 8 for pair in json.loads(out)["pairs"])
    plan = read_deployment(path)
    nodes = {"attention": plan.attention.nodes, "experts": plan.experts.nodes}
    assert planned_workers(path, tmp_path) == nodes | {"micro_batches": plan.micro_batches}
    assert (WorkerLayout.attention, WorkerLayout.experts, WorkerLayout.micro_batches) == (1, 1, 2), "without a plan"
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 4}))
    with pytest.raises(ConfigError, match=r"2 of 8 experts, hidden 1024.*has 4 layers, 2 of 4 experts"):
        planned_workers(path, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dbrx", "--tpot", "soon"], "--tpot 'soon': it must be a time above 0"),
        (["dbrx", "--tpot", "0ms"], "it must be a time above 0"),
        (["dbrx", "--tpot", "150"], "--tpot '150' has no unit: allowed are us, ms and s"),
        (["dbrx", "--tpot", "0.15"], "--tpot '0.15' has no unit"),
        (["dbrx", "--gpus", "abacus"], "--gpus: accelerator 'abacus' is unknown: allowed are l20"),
        (["dbrx", "--gpus", "h20,l4os"], "--gpus: accelerator 'l4os' is unknown (did you mean 'l40s'?): allowed are"),
        (["dbrx", "--gpus", ","], "name at least one"),
        (["nothing"], "MODEL 'nothing' is unknown: allowed are mixtral-8x22b"),
        (["64x64"], "only the sizes of one expert"),
        (
            ["dbrx", "--gpus", "l40s", "--tpot", "1us"],
            "answers within 1e-06 s per token with a context of 650; allow more time per",
        ),
        (["dbrx", "--gpus", "l40s", "--tpot", "0.00001s"], "answers within 1e-05 s per token"),
        (["dbrx", "--tpot", "0.1us"], "--tpot '0.1us' is out of range: it must be from 1us to 10000s"),
        (["dbrx", "--gpus", "l40s", "--max-gpus", "1"], "with a context of 650 on at most 1 GPUs"),
    ],
)
def test_wrong_requests_end_in_one_sentence(run, arguments, words):
    code, _, err = run("serve", "plan", *arguments)
    assert code == 1
    assert words in err
    assert err.count("\n") == 1


def test_plans_are_simulated_with_recorded_routes_and_copies(run, tmp_path):
    shape = TraceShape(rows_per_sample=[64] * 8, num_layers=2, num_experts=16, top_k=4)
    write_trace(domain_trace(shape, np.random.default_rng(0), sigma=1.0), tmp_path / "t")
    asked = ["serve", "plan", "dbrx", "--gpus", "a800", "--simulate", "--trace", tmp_path / "t"]
    code, out, _ = run(*asked, "--copies", "1", "--timeline", tmp_path / "timeline.json", "--json")
    assert code == 0
    runs = {one["case"]: one for one in json.loads(out)["simulated"]}
    assert set(runs) == {"apart", "apart, NCCL-like messages", "apart, 1 spare slot(s)", "colocated, expert parallel"}
    assert {one["label"] for one in runs.values()} == {"simulated"}
    assert runs["apart"]["tokens_per_second"] > runs["apart, NCCL-like messages"]["tokens_per_second"]
    assert runs["apart, 1 spare slot(s)"]["tokens_per_second"] > runs["apart"]["tokens_per_second"]
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    code, out, _ = run(*asked)
    assert "colocated, expert parallel" in out


MEASURED = "attention = [[8, {0}e-3], [64, {1}e-3]]\nexpert = [[1, {0}e-4], [16, {1}e-4]]\n"
MESSAGE = "message = [[4096, 2e-5], [262144, 3e-5]]\n"
SMALL = {
    "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64,
    "vocab_size": 1000,
}  # fmt: skip


def test_measured_seconds_decide_and_are_simulated(run, tmp_path):
    """Twice the seconds give half the tokens, in the search, in the verdict and in simulated steps."""
    file = tmp_path / "nodes.toml"
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    asked = ["serve", "plan", tmp_path, "--measured", file, "--simulate", "--tpot", "10s", "--max-gpus", "2", "--json"]
    found = {}
    for factor in (1, 2):
        file.write_text(MEASURED.format(factor, 2 * factor) + MESSAGE.replace("e-5", f"e-{5 - factor // 2}"))
        code, out, err = run(*asked, "--output", tmp_path / "plan.json")
        assert (code, "does both in turn" in err) == (0, True)
        found[factor] = json.loads(out)
    [pair], [together] = found[1]["pairs"], found[1]["colocated"]
    assert (pair["attention"]["nodes"], pair["experts"]["nodes"], pair["gpus"], together["gpus"]) == (1, 1, 2, 1)
    assert f"--experts 1 --micro-batches {pair['micro_batches']}" in found[1]["serve_best_pair"]
    assert planned_workers(tmp_path / "plan.json", tmp_path)["micro_batches"] == found[2]["pairs"][0]["micro_batches"]
    speeds = [[one["pairs"][0]["tokens_per_second"], one["colocated"][0]["tokens_per_second_per_unit"]]
              + [run["tokens_per_second"] for run in one["simulated"]] for one in found.values()]  # fmt: skip
    assert speeds[0] == pytest.approx([2 * one for one in speeds[1]], rel=0.1)
    assert {one["case"] for one in found[1]["simulated"]} >= {"apart", "colocated, tensor parallel"}


def test_the_command_serves_all_requests_of_the_plan(run, tmp_path):
    """From a file in a folder with a space: its folder, and a cache for requests of twice their mean length."""
    file, folder = tmp_path / "nodes.toml", tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    file.write_text(MEASURED.format(1, 2))
    asked = ["serve", "plan", folder / "config.json", "--measured", file, "--max-gpus", "2", "--json"]
    found = json.loads(run(*asked, "--context", "700", "--tpot", "1s")[1])
    [pair], words = found["pairs"], shlex.split(found["serve_best_pair"])
    requests = pair["micro_batches"] * pair["micro_batch_requests"]
    assert words[2] == str(folder)
    assert words[words.index("--kv-tokens") + 1] == str(2 * 700 * requests)
    assert 2 * 700 * requests > 65536


def test_seconds_of_one_named_gpu_keep_its_memory_and_links(run, tmp_path):
    file, asked = tmp_path / "nodes.toml", ["serve", "plan", "dbrx", "--gpus", "a800", "--json"]
    file.write_text("attention = [[0, 1e-3], [1000, 2e-3]]\nexpert = [[0, 0], [1000, 1e-3]]\n")
    code, out, _ = run(*asked, "--measured", file)
    [pair] = json.loads(out)["pairs"]
    assert (code, pair["attention"]["gpu"], pair["attention"]["ways"], pair["limit"]) == (0, "a800", 1, "memory")
    assert pair["attention_seconds"] == pytest.approx(1e-3 * (1 + pair["micro_batch_requests"] / 1000))
    asked[4] = "a800,h20"
    assert "name it alone" in run(*asked, "--measured", file)[2]
    (tmp_path / "gpus.toml").write_text("")
    assert "name it alone" in run(*asked[:3], "--accelerators", tmp_path / "gpus.toml", "--measured", file)[2]
    file.write_text("attention = 1")
    assert run(*asked[:5], "--measured", file)[0] == 1


def test_a_trace_of_another_model_is_refused(run, tmp_path):
    shape = TraceShape(rows_per_sample=[8], num_layers=2, num_experts=8, top_k=2)
    write_trace(domain_trace(shape, np.random.default_rng(0)), tmp_path / "t")
    code, _, err = run("serve", "plan", "dbrx", "--gpus", "a800", "--simulate", "--trace", tmp_path / "t")
    assert code == 1
    assert "name a trace of this model" in err
    asked = ["serve", "plan", "mixtral-8x22b", "--gpus", "l40s", "--simulate", "--copies", 5]
    assert "experts do not fit a node of" in run(*asked)[2]
    assert "add --simulate" in run("serve", "plan", "dbrx", "--gpus", "a800", "--copies", "1")[2]


def test_the_guide_shows_what_the_command_prints(run):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    command, shown = re.search(
        r"```console\nrelibra (serve plan .*?)\n```.*?```text\n(.*?)```", page, flags=re.DOTALL
    ).groups()
    assert run(*command.split())[1] == shown
    block = page.split("```toml\n")[1].split("```")[0]
    assert set(tomllib.loads(block)["mine"]) == {field.name for field in fields(Accelerator)} - {"name", "node_size"}


def test_requests_arrive(run):
    asked = ["serve", "plan", "dbrx", "--gpus", "a800", "--simulate", "--lengths", "500,20", "--json"]
    runs = {}
    for rate in (100, 3000):
        body = json.loads(run(*asked, "--rate", rate)[1])["simulated"]
        runs[rate] = next(one for one in body if "requests/s" in one["case"])
    assert runs[100]["iteration_seconds"] < runs[3000]["iteration_seconds"]
    assert runs[100]["queue_seconds"] < runs[3000]["queue_seconds"]
    assert runs[100]["tokens_per_second"] < runs[3000]["tokens_per_second"]
    assert "--lengths '5'" in run(*asked[:6], "--rate", 1, "--lengths", "5")[2]
    assert "at most 1,000,000 are simulated" in run(*asked, "--rate", 1e8)[2]
