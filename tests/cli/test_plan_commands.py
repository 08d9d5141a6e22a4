"""`relibra plan`, `compare` and `explain`, as a shell would call them."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from relibra import write_trace
from relibra.cluster import cluster_preset, write_cluster
from relibra.planning.budget import Budget
from relibra.planning.costs.copies import memory_of_slots
from relibra.planning.costs.expert_shape import expert_shape
from relibra.planning.exports import read_vllm_json
from relibra.planning.plan_files import read_plan
from relibra.planning.validation import validate_plan
from relibra.routing.demand_files import read_demand
from relibra.routing.micro_batches import schedule_samples, select_micro_batches
from relibra.routing.synthetic import TraceShape, domain_trace
from relibra.simulation import memory_for_slots, model_shape
from relibra.timeline import Event, Timeline, read_timeline, write_timeline

KEYS = {
    "balancer", "skew", "bound", "gap", "copies", "bytes", "cross_node_token_slots", "plan_seconds",
    "predicted_seconds", "valid", "bound_any_homes", "scope", "exposed_seconds", "cross_node_share",
    "slots", "slots_used", "slot_bytes",
}  # fmt: skip
"""What the rows of `relibra compare --json` hold at least."""

CUT = ("--ranks", "4", "--ranks-per-node", "2", "--slots", "1", "--micro-batch-tokens", "25")


@pytest.fixture(scope="module")
def planned_files():
    """Files of the plan that tests read, by name: the first test that asks for it makes them."""
    return {}


@pytest.fixture
def plan(run, trace, tmp_path, planned_files):
    path = tmp_path / "one.safetensors"
    if not planned_files:
        assert run("plan", trace, *CUT, "-o", path)[0] == 0
        planned_files |= {file.name: file.read_bytes() for file in tmp_path.glob("one.*")}
    for name, content in planned_files.items():
        (tmp_path / name).write_bytes(content)
    return path


def test_plan_writes_a_plan_that_fits_its_demand(run, trace, routes, tmp_path):
    path = tmp_path / "out" / "p.safetensors"
    code, out, _ = run("plan", trace, *CUT, "--balancer", "relibra_paper_tokens", "--output", path)
    assert code == 0
    plan, demand = read_plan(path), read_demand(tmp_path / "out" / "p.demand.safetensors")
    validate_plan(plan, cluster_preset("h100x8", 4, 2).topology, demand)
    assert demand.load_MLE.tolist() == schedule_samples(routes, 25, 4).load_MLE.tolist()
    assert f"{plan.skew(plan.scheduled(demand)):.4g}" in out
    assert plan.digest() in out
    assert "micro batches 8, layers 2, ranks 4, experts 8, ranks per node 2" in out
    for lever in ("static", "schedule", "homes", "replicas", "cross-node copies", "bound"):
        assert f"{lever} " in out


def test_plan_says_that_tokens_cross_to_a_node_once(run, trace, tmp_path):
    words = ("plan", trace, *CUT, "--no-pack", "-o", tmp_path / "p.safetensors", "--dispatch")
    assert "hierarchical" in run(*words, "hierarchical")[1]
    assert read_plan(tmp_path / "p.safetensors").dispatch == "hierarchical"
    code, _, _ = run("report", tmp_path / "p.safetensors", "--trace", trace, "-o", tmp_path / "p.html")
    assert code == 0
    assert "forwarded" in (tmp_path / "p.html").read_text()
    rows = json.loads(
        run("compare", trace, *CUT, "--dispatch", "hierarchical", "--balancer", "static,relibra", "--json")[1]
    )
    assert all(row["valid"] and row["bytes"]["rows"]["between"] > 0 for row in rows)


def test_plan_names_what_it_overwrites(run, trace, tmp_path):
    words = (*CUT, "--balancer", "static", "-o", tmp_path / "p.safetensors")
    assert [json.loads(run("plan", trace, *words, "--json")[1])["overwritten"] for _ in range(2)] == [False, True]


def test_plan_prints_json(run, trace, tmp_path):
    path = tmp_path / "p.safetensors"
    options = ("--pack", "--model", "gpt-oss-20b", "--take", "second-half")
    code, out, _ = run("plan", trace, *CUT, *options, "-o", path, "--json")
    facts = json.loads(out)
    assert code == 0
    assert set(facts) > KEYS
    assert facts["digest"] == read_plan(path).digest()
    assert facts["skew_before"] == facts["levers"]["static"] >= facts["skew"] == facts["levers"]["cross-node copies"]
    assert len(read_plan(path).bound_ML) == 4
    assert facts["model"] == "gpt-oss-20b"
    assert 0 < facts["predicted_seconds"] <= facts["static_predicted_seconds"]


def test_plan_from_the_plan_before_moves_little(run, trace, plan, tmp_path):
    again = tmp_path / "again.safetensors"
    facts = json.loads(run("plan", trace, *CUT, "--previous", plan, "-o", again, "--json")[1])
    assert facts["moved_experts"] == read_plan(again).num_moved <= 4
    code, out, _ = run("explain", plan, "--diff", again)
    assert code == 0
    assert "moved homes" in out


def test_exports_are_written(run, trace, tmp_path):
    exports = [f"--export={form}={tmp_path / form}" for form in ("sglang", "vllm", "vllm-ascend", "tensorrt-llm")]
    words = ("--balancer", "relibra_paper_tokens", "-o", tmp_path / "p.safetensors")  # as many slots as --slots
    assert run("plan", trace, *CUT, *words, *exports)[0] == 0
    assert len(json.loads((tmp_path / "sglang").read_text())["physical_to_logical_map"][0]) == 12
    assert read_vllm_json(tmp_path / "vllm").shape[1] == 12
    assert all((tmp_path / form).stat().st_size for form in ("vllm-ascend", "tensorrt-llm"))


def test_the_schedule_of_a_trainer_is_planned_and_comes_back(run, trace, tmp_path):
    given, out = tmp_path / "given.npz", tmp_path / "out.npz"
    micro_batch_S, rank_S = np.arange(160) // 40, np.arange(160) % 4
    micro_batch_S[7] = -1
    np.savez(given, micro_batch_S=micro_batch_S, rank_S=rank_S, mini_batch_M=[0, 0, 1, 1])
    words = ("--ranks", "4", "--balancer", "eplb", "--no-pack", "-o", tmp_path / "p.safetensors")
    words = (*words, f"--export=trainer={out}")
    facts = json.loads(run("plan", trace, *words, "--schedule", given, "--json")[1])
    cut = {"schedule": str(given), "mini_batches": 2, "micro_batches": 4, "fullest_tokens": 50, "samples_left_out": 1}
    assert facts["cut"].items() >= (cut | {"tokens_left_out": 5}).items()
    assert facts["exports"] == {"trainer": str(out)}
    words_8 = ("--ranks", "8", "-o", tmp_path / "8.safetensors", "--schedule", given)
    assert "samples are on 4 of 8" in run("plan", trace, *words_8)[2]
    compared = run("compare", trace, "--ranks", "4", "--schedule", given, "--balancer", "static")[1]
    assert "history" not in compared  # the whole step
    for path in (out, given):
        found = dict(np.load(path))
        assert found["micro_batch_S"].tolist() == micro_batch_S.tolist()
        assert found["rank_S"].tolist() == rank_S.tolist()
        assert found["mini_batch_M"].tolist() == [0, 0, 1, 1]
    plan = read_plan(tmp_path / "p.safetensors")
    assert dict(np.load(out))["home_LE"].tolist() == plan.home_LE.tolist()
    assert run("plan", trace, *words[:-1], "--schedule", out)[0] == 0
    assert read_plan(tmp_path / "p.safetensors").digest() == plan.digest()
    for more, message in (
        (("--order", "shuffled"), "leave out --order shuffled"),
        (("--micro-batches", "3"), "leave out --micro-batches"),
        (("--micro-batch-tokens", "40"), "rank 0 has 50 tokens in micro-batch 0, above the limit of 40 per rank"),
    ):
        code, _, err = run("plan", trace, *words, "--schedule", given, *more)
        assert code == 1
        assert message in err
    assert "--output" in run("plan", trace, "--ranks", "4", "-o", given, "--schedule", given)[2]


def test_no_output_destroys_an_input_or_another_output(run, trace, plan, tmp_path):
    write_cluster(tmp_path / "mine.toml", cluster_preset("h100x8"))
    recording = tmp_path / "mine.npz"
    recording.write_bytes(b"a recording")
    other = tmp_path / "other" / ".." / "p"  # the same file by another name
    for words, message in (
        ((recording, "-o", recording), "is the input TRACE"),
        ((trace, "-o", trace / "manifest.json"), "lies in the input TRACE"),
        ((trace, "-o", tmp_path / "p", "--html", tmp_path / "p"), "--output and --html are the same file"),
        (
            (trace, "-o", tmp_path / "p", "--export", f"sglang={other}"),
            "--output and --export sglang are the same file",
        ),
        (
            (trace, "-o", tmp_path / "p", "--html", tmp_path / "p.demand.safetensors"),
            "the demand of --output and --html",
        ),
        ((trace, "--previous", plan, "-o", plan), "is the input --previous"),
        ((trace, "--cluster", tmp_path / "mine.toml", "-o", tmp_path / "mine.toml"), "is the input --cluster"),
    ):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code, out, err = run("plan", *words, *CUT)
        assert (code, out) == (1, "")
        assert message in err
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "is the input TRACE" in run("compare", recording, *CUT, "--html", recording)[2]


def test_unwritable_output_is_told_by_its_option_before_planning(run, trace, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "deeper" / "p.safetensors"
    assert f"--output {output} cannot be written" in run("plan", trace, *CUT, "-o", output)[2]
    output = tmp_path / "new" / "p.safetensors"
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    code, _, err = run("plan", "never read", *CUT, "-o", output)
    assert code == 1
    assert f"--output {output} cannot be written: no permission to write in {tmp_path}" in err


def test_a_full_disk_is_told_by_the_name_that_was_given(run, trace, tmp_path, monkeypatch):
    def full(path, plan):
        raise OSError(28, "No space left on device", f"{path}.tmp")

    monkeypatch.setattr("relibra.planning.plan_files.write_plan", full)
    code, _, err = run("plan", trace, *CUT, "--balancer", "static", "-o", tmp_path / "p.safetensors")
    assert code == 1
    assert f"error: {tmp_path / 'p.safetensors'} cannot be written: No space left on device" in err


def test_plans_for_other_ranks_have_no_difference(run, trace, plan, tmp_path):
    other = tmp_path / "two.safetensors"
    assert run("plan", trace, "--ranks", "2", "--micro-batch-tokens", "50", "-o", other)[0] == 0
    code, _, err = run("explain", plan, "--diff", other)
    assert code == 1
    assert "is for 4 ranks, " in err
    assert len(err.replace(str(tmp_path), "").splitlines()) == 1
    code, _, err = run("plan", trace, *CUT, "--previous", other, "-o", tmp_path / "p.safetensors")
    assert code == 1
    assert "previous plan" in err


def test_compare_prints_the_keys_that_were_promised(run, trace):
    code, out, err = run("compare", trace, *CUT, "--json", "--seed", "0", "--balancer", "static,eplb,ultraep")
    rows = json.loads(out)
    assert code == 0
    assert [row["balancer"] for row in rows] == ["static", "eplb", "ultraep"]
    assert all(set(row) >= KEYS and row["valid"] for row in rows), err
    assert "history" not in err


def test_compare_plans_the_second_half_with_the_first_as_history(run, trace, routes, monkeypatch):
    seen = {}

    def spy(demand, cluster, budget, names, *, expert, history_MLE):
        seen.update(demand=demand, history_MLE=history_MLE, budget=budget)
        return iter([])

    monkeypatch.setattr("relibra.reporting.data.comparison.iterate_comparison", spy)
    whole = schedule_samples(routes, 25, 4)
    with pytest.raises(StopIteration):
        run("compare", trace, *CUT, "--balancer", "static")
    assert seen["history_MLE"].tolist() == whole.load_MLE[:4].tolist()
    assert seen["demand"].load_MLE.tolist() == select_micro_batches(whole, 4).load_MLE.tolist()
    memory_gib = memory_for_slots(seen["demand"], cluster_preset("h100x8", 4, 2), model_shape("qwen3-30b-a3b"))
    assert seen["budget"] == Budget(slots=1, rank_tokens=25, memory_gib=memory_gib)
    with pytest.raises(StopIteration):
        run("compare", trace, *CUT, "--balancer", "static", "--take", "all")
    assert seen["history_MLE"] is None
    assert seen["demand"].load_MLE.tolist() == whole.load_MLE.tolist()


def test_balancers_are_named_one_by_one_or_in_a_row(run, trace):
    for words in (("--balancer", "static,eplb"), ("--balancer", "static", "--balancer", "eplb")):
        _, out, _ = run("compare", trace, *CUT, *words, "--json")
        assert [row["balancer"] for row in json.loads(out)] == ["static", "eplb"]
    code, _, err = run("compare", trace, "stray", *CUT)
    assert code == 2
    assert "stray" in err


def test_a_file_gets_every_column_and_whole_sentences(run, trace, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    code, out, _ = run("compare", trace, *CUT, "--balancer", "static,eplb")
    assert code == 0
    assert "no room for" not in out
    for title in ("skew", "copies", "pushed GB", "open s model", "step s model"):
        assert f"\n{title}: " in out
    [header] = [line for line in out.splitlines() if line.startswith("balancer")]
    assert {"skew", "bound", "gap", "copies", "used", "ok", "within"} <= set(header.split())
    monkeypatch.setenv("COLUMNS", "60")
    narrow = run("compare", trace, *CUT, "--balancer", "static,relibra_paper_anywhere")[1]
    assert re.search(r"no room for .*bound, gap, .*, copies within \(--json has all\)", narrow)
    assert "\ngap: " not in narrow


def test_plan_prints_bytes_by_kind_and_memory_of_slots(run, tmp_path):
    shape = TraceShape(rows_per_sample=[200, 600] * 32, num_layers=2, num_experts=32, top_k=4)
    write_trace(domain_trace(shape, np.random.default_rng(1), num_domains=2), tmp_path / "t")
    path = tmp_path / "p.safetensors"
    words = ("plan", tmp_path / "t", "--ranks", "16", "--model", "gpt-oss-20b", "-o", path)
    out, facts = run(*words)[1], json.loads(run(*words, "--json")[1])
    made = read_plan(path)
    assert made.num_copies > 0
    layers, expert = len(made.layer_ids) if made.resident else 1, expert_shape("gpt-oss-20b")
    assert facts["slot_memory"]["gib"] == memory_of_slots(made.slots, layers, expert) / 2**30
    [chosen] = [choice for choice in made.considered if choice.chosen]
    assert (chosen.slots, chosen.resident, chosen.memory_gib) == (
        made.slots,
        made.resident,
        facts["slot_memory"]["gib"],
    )
    assert f"gib {chosen.memory_gib:.4g}" in out
    assert facts["bytes"].keys() == {"rows", "gates", "weights", "gradients", "moves"}
    assert facts["bytes"]["moves"] == {"inside": 0, "between": 0}
    assert facts["bytes"]["weights"]["inside"] > 0
    [rows] = [line.split() for line in out.splitlines() if line.startswith("rows ")]
    assert rows == ["rows", *(f"{size:.4g}" for size in facts["bytes"]["rows"].values())]


def test_explain_lists_what_was_tried_and_its_cost(run, plan):
    made = read_plan(plan)
    code, out, _ = run("explain", plan)
    facts = json.loads(run("explain", plan, "--json")[1])
    assert code == 0
    assert [row["chosen"] for row in facts["considered"]].count(True) == 1
    assert [row["seconds"] for row in facts["considered"]] == [choice.seconds for choice in made.considered]
    for row in facts["considered"]:
        assert f"{row['seconds']:.4g}" in out
    followed = sum(row["micro_batches"] for row in facts["considered_layers"])
    layers = [json.loads(run("explain", plan, "--layer", layer, "--json")[1])["considered"] for layer in (0, 1)]
    assert followed == sum(row["micro_batches"] for rows in layers for row in rows)
    assert [row["seconds"] for row in facts["considered_layers"]] == [
        pytest.approx(one["seconds"] + other["seconds"]) for one, other in zip(*layers, strict=True)
    ]


def test_explain_of_a_layer(run, plan):
    code, out, _ = run("explain", plan, "--layer", 1, "--micro-batch", 2)
    assert code == 0
    facts = json.loads(run("explain", plan, "--layer", 1, "--micro-batch", 2, "--json")[1])
    assert (facts["layer"], facts["micro_batch"], facts["token_slots"]) == (1, 2, 200)
    for row in facts["replicas"]:
        assert str(row["quota"]) in out
    made = read_plan(plan)
    assert len(facts["moved"]) == (made.previous.home_LE[1] != made.home_LE[1]).sum()


def test_pages_are_written(run, trace, tmp_path):
    for verb, more in (("plan", ("-o", tmp_path / "p.safetensors")), ("compare", ("--balancer", "static"))):
        page = tmp_path / f"{verb}.html"
        code, _, err = run(verb, trace, *CUT, *more, "--html", page)
        assert code == 0
        assert str(page) in err
        first, *_ = re.findall(r'<section id="([a-z0-9-]+)"', page.read_text())
        assert (first == "balancers") == (verb == "compare")


def test_reports_of_plans(run, trace, plan, tmp_path):
    page = tmp_path / "page.html"
    code, out, _ = run("report", plan, "-o", page)
    assert (code, out.strip()) == (0, str(page))
    bounded = page.read_text()
    assert "lower bound" in bounded
    assert "with --trace to count its rows" in bounded
    assert run("report", plan, "-o", plan)[0] == 1, "the plan stays"
    assert run("report", plan, "--trace", trace, "-o", page)[0] == 0
    assert "counted token by token" in page.read_text()
    assert "--trace" not in page.read_text()
    other = tmp_path / "other.safetensors"
    assert run("plan", trace, *CUT, "--balancer", "static", "-o", other)[0] == 0
    facts = json.loads(run("report", other, plan, "--json", "-o", page)[1])
    assert facts == {"report": str(page)}
    assert f"other and plan {plan.stem}" in page.read_text()
    assert "lower bound from pairs of experts; name the trace of the plan with --trace" in page.read_text()
    timeline, event = tmp_path / "ran.jsonl", Event("experts", 1, 0, 0, 0.0, 1.0, 0, "")
    write_timeline(timeline, Timeline(events=(event,), num_ranks=4, label="measured"))
    assert run("report", plan, "--timeline", timeline, "-o", page)[0] == 0
    assert "ran (measured)" in page.read_text()
    shown = tmp_path / "step.json"
    read_timeline(timeline).save_perfetto(shown)
    code, out, err = run("report", plan, "--timeline", shown, "-o", page)
    assert (code, out) == (1, "")
    assert "a trace for Perfetto opens at" in " ".join(err.split())


def test_report_without_a_place_lies_beside_its_plan(run, plan):
    for _ in range(2):
        code, out, _ = run("report", plan)
        page = plan.with_name(f"{plan.stem}.report.html")
        assert (code, out.strip()) == (0, str(page))
        assert page.read_text().startswith("<!doctype html>")


def test_reports_of_what_has_no_demand_or_is_no_plan(run, trace, plan, tmp_path):
    lonely = tmp_path / "lonely.safetensors"
    lonely.write_bytes(plan.read_bytes())
    assert "name it with --demand" in run("report", lonely)[2]
    assert "is not a plan" in run("report", plan, trace)[2]
    assert "is not a plan" in run("report", tmp_path / "none.safetensors")[2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["compare", "TRACE", "--ranks", "4", "--balancer", "magic"], 1, "balancer 'magic' is unknown"),
        (["compare", "TRACE", "--ranks", "4", "--cluster", "abacus"], 1, "cluster 'abacus' is unknown"),
        (["compare", "TRACE", "--ranks", "4", "--model", "abacus"], 1, "or HIDDENxWIDTH of one of its experts"),
        (["compare", "TRACE", "--ranks", "4", "--model", "0x5"], 1, "HIDDEN and WIDTH of an expert must be at least 1"),
        (["compare", "TRACE", "--ranks", "12"], 1, "--ranks 12 does not divide 8 experts: allowed are 1, 2, 4, 8"),
        (
            ["plan", "TRACE", "--ranks", "8", "--ranks-per-node", "3"],
            1,
            "--ranks-per-node 3 does not divide --ranks 8: choose it from 1, 2, 4, 8",
        ),
        (["plan", "TRACE", "--ranks", "3", "--ranks-per-node", "4"], 1, "allowed are 4, 8, in nodes of 4"),
        (["plan", "TRACE", "--ranks", "4", "--objective", "tokens"], 2, "--objective"),
        (["plan", "TRACE", "--ranks", "4", "--balancer", "relibra+seconds"], 1, "relibra+seconds' is unknown"),
        (["plan", "TRACE", "--ranks", "4", "--balancer", "eplb,static"], 1, "takes one balancer; relibra compare and"),
        (["plan", "TRACE", "--ranks", "4", "--balancer", "live"], 1, "so there is no plan to write"),
        (["compare", "TRACE", "--ranks", "4", "--micro-batch-tokens", "250"], 1, "makes only 1 micro-batches"),
        (["compare", "TRACE", "--ranks", "4", "--num-experts", "64"], 1, "was recorded with 8 experts"),
        (["compare", "nowhere", "--ranks", "4"], 1, "nowhere does not exist"),
        (["compare", "TRACE", "--ranks", "4", "--html", "."], 1, "is a folder"),
        (["compare", "TRACE"], 2, "--ranks"),
        (["plan", "TRACE", "--ranks", "4", "--slots", "65"], 2, "64"),
        (["plan", "TRACE", "--ranks", "4", "--export", "onnx=x"], 1, "is not FORMAT=PATH"),
        (["plan", "TRACE", "--ranks", "4", "--previous", "nowhere"], 1, "nowhere"),
        (["explain", "nowhere", "--layer", "1"], 1, "nowhere"),
        (["explain", "STATIC"], 1, "with --layer: it has 0-1"),
        (["explain", "PLAN", "--layer", "9"], 1, "layer 9 is not in the plan"),
        (["explain", "PLAN", "--layer", "1", "--demand", "nowhere"], 1, "name it with --demand"),
    ],
)
def test_mistakes_get_a_sentence_and_a_code(run, trace, plan, tmp_path, arguments, code, message):
    static = tmp_path / "static.safetensors"
    if "STATIC" in arguments:
        run("plan", trace, *CUT, "--balancer", "static", "-o", static)
    got, out, err = run(*[{"TRACE": trace, "PLAN": plan, "STATIC": static}.get(word, word) for word in arguments])
    assert message in " ".join(err.replace("│", " ").split())
    assert (got, out) == (code, "")
    assert "Traceback" not in err


def test_the_program_starts_fast_whatever_the_verbs_need():
    program = "import sys; import relibra.cli.main; print({'numpy', 'numba', 'scipy', 'plotly'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
