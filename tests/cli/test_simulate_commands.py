"""`relibra simulate` and `relibra sweep`, as a shell would call them."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from relibra import write_trace
from relibra.cli.inputs.recordings import find_recording
from relibra.cli.outputs import simulated_step
from relibra.cluster import Transport, cluster_preset, write_cluster
from relibra.planning.budget import Budget
from relibra.planning.plan_files import read_plan
from relibra.planning.planner import plan_step
from relibra.planning.traffic.distinct_rows import distinct_rows_of_step
from relibra.reporting.data.compared_plans import ComparedStep, compare_plan, compare_static
from relibra.reporting.data.step_simulation import simulate_plans
from relibra.routing.demand_files import read_scheduled_demand
from relibra.routing.demand_rows import sample_of_rows
from relibra.routing.micro_batches import schedule_samples
from relibra.simulation import cut_model, memory_for_slots, model_shape, overlap_ratio, simulate_step

CUT = ("--ranks", "4", "--ranks-per-node", "2", "--micro-batch-tokens", "25")
CONFIG = {
    "model_type": "mine", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "num_experts": 8,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def run_folder(tmp_path, routes):
    for step in (0, 3):
        write_trace(routes, tmp_path / "runs" / "mine" / "traces" / f"step-{step:05d}")
    settings = tmp_path / "run.toml"
    settings.write_text(f'[run]\nname = "mine"\nfolder = "{tmp_path / "runs"}"\n')
    return settings


def test_step_limit_comes_first_and_figures_equal_the_library(run, trace, routes, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("simulate", trace, *CUT, "--slots", "1", "--model", "qwen3-30b-a3b")
    assert code == 0
    assert out.startswith("overlap ratio ")
    cluster, demand = cluster_preset("h100x8", 4, 2), schedule_samples(routes, 25, 4)
    model = cut_model(model_shape("qwen3-30b-a3b"), demand)
    assert (model.moe_layers, model.experts, model.top_k) == (2, 8, 2)
    assert "simulated 2, of 48" in " ".join(out.split())
    memory_gib = memory_for_slots(demand, cluster, model_shape("qwen3-30b-a3b"))
    budget = Budget(slots=1, rank_tokens=25, memory_gib=memory_gib)
    plan = plan_step(demand, cluster, budget, expert=model.expert)
    scheduled = plan.scheduled(demand)
    rows = distinct_rows_of_step(plan, scheduled, routes.experts_TLK, sample_of_rows(routes, demand))
    step = simulate_step(plan, scheduled, cluster, model, distinct=rows).with_relocation_over(10)
    facts = json.loads(run("simulate", trace, *CUT, "--slots", "1", "--json")[1])
    assert facts["rows_counted"]
    assert facts["seconds"] == step.seconds
    assert f"{step.seconds:.4g}" in out
    assert facts["label"] == "simulated"
    assert list(facts)[:3] == ["overlap_ratio", "sustained_overlap_ratio", "limits"]
    assert facts["limits"][0]["seconds"] == max(limit["seconds"] for limit in facts["limits"])
    ratio = overlap_ratio(model.expert, cluster.inter_send.bytes_per_second, cluster.peak_flops_per_second)
    assert facts["overlap_ratio"]["between nodes"] == ratio


def test_dispatch_is_an_option_or_in_the_cluster_file(run, trace, tmp_path):
    words = ("simulate", trace, *CUT, "--slots", "1", "--balancer", "static", "--json")
    write_cluster(tmp_path / "own.toml", replace(cluster_preset("h100x8"), dispatch="hierarchical"))
    given, read, flat = (
        json.loads(run(*words, *more)[1])
        for more in (
            ("--dispatch", "hierarchical"),
            ("--cluster", tmp_path / "own.toml"),
            ("--cluster", tmp_path / "own.toml", "--dispatch", "flat"),
        )
    )
    assert [facts["dispatch"] for facts in (given, read, flat)] == ["hierarchical", "hierarchical", "flat"]
    assert given["terms"] == read["terms"]
    assert json.loads(run(*words)[1])["terms"] == flat["terms"]
    given_rows, flat_rows = (facts["bytes_by_kind"]["rows"]["between"] for facts in (given, flat))
    assert 0 < given_rows < flat_rows
    assert "hierarchical" in run(*words[:-1], "--dispatch", "hierarchical")[1]
    rows = json.loads(run("sweep", trace, *CUT, "--dispatch", "hierarchical", "--balancer", "static", "--json")[1])
    assert rows["rows"][0]["seconds"] == given["seconds"]


def test_ways_to_send_and_a_transport_in_the_cluster_file(run, trace, tmp_path):
    words, known, found = ("simulate", trace, *CUT, "--balancer", "static", "--json"), cluster_preset("h100x8"), {}
    for name, transport in (
        ("none", Transport()),
        ("free", Transport(fence_scope="peer")),
        ("dear", Transport(puts="expert", fence_seconds=1e-4)),
    ):
        write_cluster(tmp_path / f"{name}.toml", replace(known, transport=transport))
        found[name] = json.loads(run(*words, "--cluster", tmp_path / f"{name}.toml")[1])
    assert found["none"]["terms"] == found["free"]["terms"] == json.loads(run(*words)[1])["terms"]
    for name, facts in found.items():
        ways = {way["way"]: way for way in facts["ways_to_send"]}
        assert list(ways) == ["per choice", "once per rank", "once per node", "gather all"]
        assert [way for way in ways if ways[way]["used"]] == ["once per rank"]
        assert ways["once per rank"]["seconds"] == pytest.approx(facts["terms"]["exchange"])
        assert (ways["per choice"]["fences"] > 0) == (name == "dear")
    assert found["dear"]["seconds"] > found["none"]["seconds"] + 1e-4
    out = " ".join(run(*words[:-1])[1].split())
    assert "ways to send: " in out
    assert "gather all no" in out


@pytest.mark.parametrize("verb", ["plan", "compare", "simulate", "sweep", "stats", "inspect", "validate"])
def test_verbs_take_a_run_where_they_take_a_trace(run, run_folder, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine" / "traces" / "step-00004").mkdir()  # not finished
    words = (verb, *CUT, "--balancer", "static")
    if verb in ("stats", "inspect", "validate"):
        words = ("trace", verb)
    code, out, err = run(*words, run_folder)
    assert code == 0
    assert "step 3 of run mine" in out + err


def test_without_a_model_seconds_are_of_the_policy_of_the_run(run, run_folder, tmp_path):
    folder = tmp_path / "runs" / "mine"
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text(json.dumps(CONFIG))
    plan = ("plan", "--balancer", "static", "-o", tmp_path / "p.safetensors")
    for words in (("simulate", "--balancer", "static"), plan):
        for source in (folder, folder / "traces" / "step-00003"):
            assert "(mine)" in json.loads(run(*words, *CUT, "--json", source)[1])["model"]
        named = run(*words, *CUT, "--json", "--model", folder / "policy", folder)[1]
        assert json.loads(named)["model"] == "mine"
    assert "64x32" in run("compare", *CUT, "--balancer", "static", "--model", "64x32", folder)[1]


def test_no_sample_is_cut_or_left_out_and_a_limit_is_per_rank(run, trace, routes, tmp_path):
    path = tmp_path / "p.safetensors"
    for ranks, tokens in ((4, 25), (2, 30), (8, 4), (1, 2048)):
        words = ("--ranks", ranks, "--micro-batch-tokens", tokens, "--balancer", "static", "-o", path)
        cut = json.loads(run("plan", trace, *words, "--json")[1])["cut"]
        demand = read_scheduled_demand(tmp_path / "p.demand.safetensors")
        assert demand.load_MLE.sum() == routes.num_rows * 2 * 2
        assert np.array_equal(demand.sample_ids, routes.sample_ids)
        assert (demand.micro_batch_S >= 0).all()
        assert demand.sum_per_rank(demand.length_S).max() <= max(5, tokens)
        assert cut["tokens_per_rank"] == tokens
        assert cut.get("samples_above_the_limit", 0) == (160 if tokens == 4 else 0)
        assert "rows_without_route" not in cut


def test_rows_without_a_route_are_named(run, routes, tmp_path):
    valid_T = routes.valid_T.copy()
    valid_T[routes.offsets[1:] - 1] = False
    write_trace(replace(routes, valid_T=valid_T), tmp_path / "last")
    facts = json.loads(run("simulate", tmp_path / "last", *CUT, "--balancer", "static", "--json")[1])
    assert facts["cut"]["rows_without_route"] == 160


def test_samples_without_ids_are_simulated(run, trace, routes, tmp_path):
    write_trace(replace(routes, sample_ids=np.full(routes.num_samples, -1)), tmp_path / "unknown")
    known, unknown = (
        json.loads(run("simulate", path, *CUT, "--balancer", "static", "--json")[1])
        for path in (trace, tmp_path / "unknown")
    )
    assert unknown["terms"] == known["terms"]


def test_the_limit_of_a_run_is_the_default(run, run_folder, tmp_path):
    (tmp_path / "runs" / "mine" / "config.json").write_text('{"update": {"micro_batch_tokens": 35}}')
    words = ("simulate", run_folder, "--ranks", "4", "--balancer", "static")
    assert "tokens per rank 35" in run(*words)[1]
    (tmp_path / "runs" / "mine" / "config.json").write_text("{}")
    assert "tokens per rank 2,048" in run(*words)[1]
    assert "tokens per rank 100" in run("compare", run_folder, "--ranks", "4", "--balancer", "static")[1]


def test_samples_are_drawn_again_until_a_step_is_full(run, trace):
    words = ("--ranks", "4", "--micro-batch-tokens", "250", "--micro-batches", "3", "--balancer", "static")
    facts = json.loads(run("simulate", trace, *words, "--json")[1])
    assert (facts["cut"]["samples"], facts["cut"]["micro_batches"], facts["tokens"]) == (600, 3, 3000)


def test_a_step_pays_its_part_of_the_moves(run, trace):
    found = {}
    for steps in (1, 4):
        words = ("simulate", trace, *CUT, "--balancer", "eplb", "--steps", steps)
        found[steps] = json.loads(run(*words, "--json")[1])
        assert found[steps]["steps_served"] == steps
    moving = found[1]["moving_seconds"]
    assert found[1]["terms"]["relocation"] == moving == found[4]["moving_seconds"] > 0
    assert found[4]["terms"]["relocation"] == moving / 4
    assert found[1]["seconds"] - found[4]["seconds"] == pytest.approx(0.75 * moving)


def test_limits_of_slots_and_memory_hold(run, trace, tmp_path):
    path, words = tmp_path / "p", ("plan", trace, *CUT, "--steps", "1000", "-o", tmp_path / "p")
    for memory in ("0", "0.14"):
        assert run(*words, "--slots", 4, "--memory-gib", memory)[0] == 0
        plan = read_plan(path)
        assert plan.slots <= 4
        assert not (plan.resident and memory == "0")
        assert all(choice.memory_gib <= 0.14 for choice in plan.considered if choice.resident)


def test_a_run_without_routes_says_what_to_do(run, tmp_path):
    settings = tmp_path / "run.toml"
    settings.write_text(f'[run]\nname = "other"\nfolder = "{tmp_path}"\n')
    assert "has no recorded routes" in run("simulate", settings, *CUT)[2]
    (tmp_path / "bare" / "traces").mkdir(parents=True)
    assert "without recorded routes" in run("simulate", tmp_path / "bare", *CUT)[2]


def test_of_all_runs_with_some_settings_the_last_one_is_read(routes, run_folder, tmp_path):
    for name in ("mine-2", "mine-9", "mine-10", "mine-11", "mine-from-python", "mine-12-old"):
        write_trace(routes, tmp_path / "runs" / name / "traces" / "step-00001")
    shutil.rmtree(tmp_path / "runs" / "mine-11" / "traces")  # it ended before its first step
    assert find_recording(run_folder).trace == tmp_path / "runs" / "mine-10" / "traces" / "step-00001"


def test_the_timeline_opens_in_perfetto(run, trace, tmp_path):
    path = tmp_path / "new" / "step.json"
    assert run("simulate", trace, *CUT, "--timeline", path)[0] == 0
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert any(name.startswith("dispatch") for name in names)


def test_a_balancer_that_keeps_the_static_layout_is_marked(run, trace):
    words = ("simulate", trace, *CUT, "--slots", "0", "--model", "64x4096", "--no-pack", "--steps", "1")
    assert json.loads(run(*words, "--json")[1])["kept_static"]
    assert "--take second-half" in run("simulate", trace, *CUT, "--balancer", "eplb_history")[2]
    found = json.loads(run("sweep", *words[1:], "--json")[1])
    assert [(row["kept_static"], row["ratio_to_static"]) for row in found["rows"]] == [(True, 1.0)]


@pytest.fixture
def schedules(tmp_path):
    """The same 8 micro-batches on 4 ranks: in one mini-batch, in four even and in four uneven ones."""
    borders = {"one": [0] * 8, "even": [0, 0, 1, 1, 2, 2, 3, 3], "uneven": [0, 0, 0, 0, 0, 1, 2, 3]}
    for name, mini_batch_M in borders.items():
        arrays = {"micro_batch_S": np.arange(160) // 20, "rank_S": np.arange(160) % 4, "mini_batch_M": mini_batch_M}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    return {name: tmp_path / f"{name}.npz" for name in borders}


def test_mini_batches_are_steps_on_the_same_ranks(run, trace, schedules):
    words = ("--ranks", "4", "--ranks-per-node", "2", "--no-pack", "--balancer", "static", "--model", "qwen3-30b-a3b")
    found = {}
    for name, path in schedules.items():
        found[name] = json.loads(run("simulate", trace, *words, "--schedule", path, "--json")[1])
        [row] = json.loads(run("sweep", trace, *words, "--schedule", path, "--json")[1])["rows"]
        assert (row["all_ranks"], row["seconds"]) == (4, found[name]["seconds"])
    one, even, uneven = found["one"], found["even"], found["uneven"]
    for several in (even, uneven):
        assert several["memory_bytes"] == one["memory_bytes"]
        assert several["terms"]["optimizer"] == pytest.approx(4 * one["terms"]["optimizer"])
        assert several["seconds"] > one["seconds"]
        assert several["terms"]["compute"] == pytest.approx(one["terms"]["compute"])


def test_pages_and_timelines_have_mini_batches_on_the_same_ranks(run, trace, schedules, tmp_path):
    words = ("--ranks", "4", "--balancer", "eplb", "--ranks-per-node", "2", "--schedule", schedules["uneven"])
    page, timeline = tmp_path / "p.html", tmp_path / "t.json"
    assert run("plan", trace, *words, "-o", tmp_path / "p", "--html", page)[0] == 0
    assert run("simulate", trace, *words, "--timeline", timeline)[0] == 0
    ranks = {event["pid"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert len(ranks) == 4
    demand = read_scheduled_demand(tmp_path / "p.demand.safetensors")
    compared = ComparedStep(
        before=compare_static(read_plan(tmp_path / "p"), demand),
        after=compare_plan("relibra", read_plan(tmp_path / "p"), demand),
        cluster=cluster_preset("h100x8", 4, 2),
        model=cut_model(model_shape("qwen3-30b-a3b"), demand),
    )
    assert [step.layout.num_ranks for step in simulate_plans(compared)] == [4, 4]


def test_a_sweep_leaves_out_ranks_that_a_schedule_does_not_fill(run, trace, schedules):
    words = ("--ranks-per-node", "2", "--balancer", "static", "--schedule", schedules["one"])
    found = json.loads(run("sweep", trace, "--ranks", "4,8", *words, "--json")[1])
    assert [row["ranks"] for row in found["rows"]] == [4]
    assert found["left_out"][0]["why"].startswith("the schedule is for 4 ranks, so 4 of 8 would have no samples")


def test_what_cannot_be_simulated_gets_a_sentence(run, trace, tmp_path):
    (tmp_path / "bad.toml").write_text("name = ")
    for words, message in (
        (("--balancer", "nobody"), "balancer 'nobody' is unknown"),
        (
            ("--balancer", "static,relibra"),
            "simulate takes one balancer; relibra compare and relibra sweep take several",
        ),
        (("--model", tmp_path / "config.json"), "config.json: give the path of a config.json"),
        (("--cluster", tmp_path / "bad.toml"), "is not valid TOML"),
        (("--pipeline-stages", "3"), "do not fill 3 pipeline stages"),
        (("--timeline", tmp_path), "is a folder"),
    ):
        code, out, err = run("simulate", trace, *CUT, *words)
        assert (code, out) == (1, ""), words
        assert message in err.strip().splitlines()[-1]


def test_sweep_has_a_row_for_each_combination_and_a_static_one(run, trace):
    lists = ("--ranks", "2,4", "--ranks-per-node", "2", "--slots", "0,1", "--balancer", "relibra,static")
    code, out, _ = run("sweep", trace, *lists, "--micro-batch-tokens", "25", "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found)[:2] == ["best", "overlap_ratio"]
    rows = found["rows"]
    assert [(row["ranks"], row["slots"], row["balancer"]) for row in rows] == [
        (ranks, slots, name) for ranks in (2, 4) for slots in (0, 1) for name in ("relibra", "static")
    ]
    assert all(row["ratio_to_static"] == 1 for row in rows if row["balancer"] == "static")
    one = json.loads(run("simulate", trace, *CUT, "--slots", "1", "--json")[1])
    same = next(row for row in rows if (row["ranks"], row["slots"], row["balancer"]) == (4, 1, "relibra"))
    assert same["seconds"] == one["seconds"]
    assert same["ratio_to_static"] == one["ratio_to_static"]


def test_points_that_cannot_be_are_named_and_the_others_computed(run, trace):
    words = ("sweep", trace, "--ranks", "2,3", "--pipeline-stages", "1,2,8", "--micro-batch-tokens", "25")
    code, out, _ = run(*words, "--balancer", "static", "--slots", "0,4", "--recompute", "--json")
    found = json.loads(out)
    assert code == 0
    rows = {(row["ranks"], row["pipeline_stages"], row["slots"]): row for row in found["rows"]}
    assert rows.keys() == {(2, 1, 0), (2, 1, 4), (2, 2, 0), (2, 2, 4)}
    assert rows[2, 1, 0]["memory_bytes"] == rows[2, 1, 4]["memory_bytes"]  # a static layout fills no slots
    for row in rows.values():
        even = row["terms"]["compute"] / row["expert_skew"]
        assert row["straggler_share"] == pytest.approx((row["terms"]["compute"] - even) / row["seconds"])
    why = {(point["ranks"], point["pipeline_stages"]): point["why"] for point in found["left_out"]}
    assert why.keys() == {(2, 8), (3, 1), (3, 2), (3, 8)}
    assert "2 expert layers of 'qwen3-30b-a3b' do not fill 8 pipeline stages" in why[2, 8]
    out = run(*words, "--balancer", "static")[1]
    assert "layout EP 2 x PP 8" in out[out.index("left out:") :]


def test_a_sweep_compares_steps_with_their_part_of_the_moves(run, trace):
    words = ("sweep", trace, *CUT, "--balancer", "static,eplb", "--steps", "2")
    static, eplb = json.loads(run(*words, "--json")[1])["rows"]
    assert eplb["terms"]["relocation"] == eplb["moving_seconds"] / 2 > 0
    assert eplb["ratio_to_static"] == pytest.approx(static["seconds"] / eplb["seconds"])
    assert eplb["relocation_share"] == eplb["terms"]["relocation"] / eplb["seconds"] > 0.01
    told = " ".join(run(*words)[1].split())
    assert f"{eplb['ratio_to_static']:.4g}" in told
    assert f"{eplb['seconds']:.4g}" in told
    assert "steps served 2" in told


def test_a_sweep_that_is_stopped_shows_what_it_has(run, trace, monkeypatch):
    simulate, calls = simulated_step.simulate_balancer, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return simulate(*arguments)

    monkeypatch.setattr("relibra.cli.sweep.simulate_balancer", interrupted)
    code, out, _ = run("sweep", trace, "--ranks", "2,4,8", "--balancer", "static", "--json")
    found = json.loads(out)
    assert code == 130
    assert [row["ranks"] for row in found["rows"]] == [2, 4]
    assert [(point["ranks"], point["why"]) for point in found["left_out"]] == [(8, "stopped by Ctrl-C")]


def test_stages_count_as_ranks_and_other_models_are_named(run, trace):
    told = run("simulate", trace, *CUT, "--pipeline-stages", "2", "--balancer", "static")[2]
    assert "the routes are of another model than qwen3-30b-a3b" in told
    facts = json.loads(run("simulate", trace, *CUT, "--pipeline-stages", "2", "--balancer", "static", "--json")[1])
    assert (facts["pipeline_stages"], facts["layout"]) == (2, "EP 4 x PP 2 x DP 1")
    assert facts["tokens_per_second_per_rank"] == facts["tokens_per_second"] / 8
    assert "of another model" not in run("simulate", trace, *CUT, "--model", "256x64", "--balancer", "static")[2]


def test_impossible_lists_get_a_sentence(run, trace):
    for words, message in (
        (("--ranks", "2,x"), "--ranks '2,x' has 'x'"),
        (("--ranks", "2,"), "has an empty item"),
        (("--ranks", "2", "--slots", "-1"), "--slots '-1' has '-1'"),
        (("--ranks", "2", "--balancer", "eplb,nobody"), "balancer 'nobody' is unknown"),
        (("--ranks", "3,6", "--ranks-per-node", "4"), "--ranks 3 does not divide 8 experts"),
        (("--ranks", "2", "--plot", "x.pdf"), "is neither a .png nor a .html file"),
        (("--ranks", "2", "--micro-batch-tokens", ",".join(map(str, range(1, 601)))), "600 combinations"),
        (("--ranks", "2", "--slots", "1,65"), "--slots '1,65' has '65'"),
    ):
        code, out, err = run("sweep", trace, *words)
        assert (code, out) == (1, ""), words
        assert message in err


def test_a_missing_plot_package_names_what_to_install(run, trace, monkeypatch):
    for package, file in (("matplotlib.figure", "a.png"), ("plotly.graph_objects", "a.html")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        code, out, err = run("sweep", trace, "--ranks", "2", "--plot", file)
        assert (code, out) == (1, "")
        assert "pip install -e '.[report]'" in err


def test_plots_are_written_over_numbers_and_over_names(run, trace, tmp_path):
    for words, file in (
        (("--ranks", "2,4", "--balancer", "static,eplb"), "a.png"),
        (("--ranks", "2", "--balancer", "static,eplb"), "b.html"),
    ):
        assert run("sweep", trace, *words, "--plot", tmp_path / file)[0] == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "eplb" in (tmp_path / "b.html").read_text()


def test_an_iteration_has_stages_as_measured_and_levers(run, routes, tmp_path):
    groups = replace(routes, group_ids=np.arange(160) // 8, prompt_lengths=np.full(160, 2))
    folder = tmp_path / "runs" / "mine"
    write_trace(groups, folder / "traces" / "step-00003")
    config = {
        "update": {"micro_batch_tokens": 40, "mini_batches": 2},
        "algorithm": {"preset": "grpo", "old_log_probs": "skip_first"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    seconds = {"rollout": 4.0, "reward": 0.5, "recompute": 1.0, "update": 3.0, "other": 1.5}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "idle_share": 0.25, "seconds": seconds}) + "\n")
    words = ("simulate", folder, "--ranks", "2", "--slots", "1", "--no-pack", "--model", "qwen3-30b-a3b")
    facts = json.loads(run(*words, "--iteration", "--json")[1])
    stages, levers = facts["iteration"], facts["levers"]
    assert stages["rollout"]["measured_seconds"] == 3.0
    assert stages["tail"]["measured_seconds"] == 1.0
    assert stages["other"] == {
        "predicted_seconds": None, "predicted_share": None, "measured_seconds": 1.5, "measured_share": 0.15
    }  # fmt: skip
    assert stages["reward"]["predicted_seconds"] == 0.5, "as measured: nothing predicts it"
    told = [row["predicted_seconds"] for row in stages.values() if row["predicted_seconds"] is not None]
    assert sum(told) == pytest.approx(levers["as it is"]["seconds"])
    training = {name: row["training"] for name, row in levers.items()}
    now = training["as it is"]
    assert training["old log-probs: none"] < now == training["old log-probs: first mini-batch free"]
    assert now < training["old log-probs: all"]
    assert training["activations: kept where they fit"] < now
    assert training["prompts: once"] < training["prompts: repeated"] == now, "this run repeats them"
    assert training["rollout: ahead by 1"] == now
    assert levers["rollout: ahead by 1"]["seconds"] < levers["as it is"]["seconds"]
    exact = ("as it is", "activations: chosen", "prompts: once")
    assert training["all together"] < min(training[name] for name in exact)


def test_an_iteration_of_bare_routes_has_no_shared_prompts(run, trace):
    code, out, err = run("simulate", trace, *CUT, "--balancer", "static", "--iteration")
    assert code == 0
    assert "all together" in out
    assert "prompts: once" not in out
    assert "prompts once: left out" in err
    assert "leave one out" in run("simulate", trace, *CUT, "--iteration", "--pipeline-stages", "2")[2]


def test_policies_after_a_loss_are_scored_over_the_horizon(run, trace):
    words = ("simulate", trace, "--micro-batch-tokens", "25", "--json", "--balancer", "static")
    found = json.loads(run(*words, "--ranks", "4", "--faults", "--restart-seconds", "5", "--checkpoint-every", "4")[1])
    rows = {row["policy"]: row for row in found["policies"]}
    assert set(rows) == {
        *(f"take over, {name}" for name in ("plan", "1 slots", "2 slots", "4 slots")),
        *("fetch and re-place", "shrink", "spare"),
    }
    assert found["cover"]["plan"]["mean"] == pytest.approx(0.75)
    worst = [row["worst_rank"] for row in found["cover"].values()]
    assert worst == sorted(worst)
    assert worst[-1] == 1.0, "16 slots hold all 8 experts again"
    assert rows["take over, 4 slots"]["pause_seconds"] == 0.0
    assert 0.0 < rows["take over, plan"]["pause_seconds"] <= rows["fetch and re-place"]["pause_seconds"]
    spare, shrink = rows["spare"], rows["shrink"]
    assert spare["step_seconds"] == pytest.approx(found["seconds"])
    assert spare["pause_seconds"] == pytest.approx(5 + 2 * found["seconds"])
    fewer = json.loads(run(*words, "--ranks", "2")[1])
    assert (spare["ranks"], shrink["ranks"]) == (5, 2)
    assert shrink["step_seconds"] == pytest.approx(fewer["seconds"])
    for row in found["curve"]:
        lasts = max(0.0, 1 - spare["pause_seconds"] / row["horizon"])
        assert row["spare"] == pytest.approx(spare["samples"] / spare["step_seconds"] * lasts)
    starts = [row["horizon"] for row in found["best_from"]]
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    peers = json.loads(run(*words, "--ranks", "4", "--faults", "--groups", "3")[1])["policies"][-1]
    assert (peers["policy"], peers["ranks"], peers["samples"]) == ("peers take over", 12, 3 * spare["samples"])
    assert peers["step_seconds"] == pytest.approx(1.5 * found["seconds"])
    code, _, err = run("simulate", trace, "--ranks", "1", "--micro-batch-tokens", "25", "--faults")
    assert code == 1
    assert "choose 2 or more" in err


def test_steps_of_a_run_count_as_long_as_it_measured_them(run, run_folder, tmp_path):
    folder = tmp_path / "runs" / "mine"
    (folder / "config.json").write_text(json.dumps({"parallel": {"ranks": 4}, "checkpoint": {"every": 6}}))
    lines = [json.dumps({"step": step, "seconds": {"rollout": 1.0, "update": 2.0 + step}}) for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    words = ("simulate", run_folder, *CUT, "--balancer", "static", "--faults", "--json")
    found = json.loads(run(*words)[1])
    spare = next(row for row in found["policies"] if row["policy"] == "spare")
    assert found["step_seconds_before"] == spare["step_seconds"] == pytest.approx(4.0)
    assert spare["pause_seconds"] == pytest.approx(60 + 3 * 4.0)
    other = json.loads(run(*words, "--ranks", "2", "--ranks-per-node", "2")[1])
    assert other["step_seconds_before"] == other["seconds"], "measured on other ranks"


def test_stages_are_cut_and_take_turns_as_asked(run, trace):
    words = ("sweep", trace, *CUT, "--balancer", "static", "--pipeline-stages", "1,2")
    found = json.loads(run(*words, "--stage-cut", "even,best", "--pipeline", "1f1b,round", "--json")[1])
    rows = {(row["pipeline_stages"], row["pipeline"], row["stage_cut"]): row for row in found["rows"]}
    assert len(rows) == 8
    for kind in ("1f1b", "round"):
        for cut in ("even", "best"):
            assert rows[1, kind, cut]["seconds"] == pytest.approx(rows[1, "1f1b", "even"]["seconds"], rel=1e-9)
        assert rows[2, kind, "best"]["seconds"] <= rows[2, kind, "even"]["seconds"]
    assert rows[2, "1f1b", "even"]["stage_layers"] == "1+1"
    assert rows[2, "round", "even"]["stage_layers"].startswith("1 | 1 | 1 x ")
    one = run(
        "simulate", trace, *CUT, "--balancer", "static", "--pipeline-stages", "2", "--pipeline", "round", "--json"
    )
    assert json.loads(one[1])["seconds"] == rows[2, "round", "even"]["seconds"]
    told = run("sweep", trace, *CUT, "--stage-cut", "odd")[2]
    assert "--stage-cut 'odd' has 'odd': choose from even, best" in told


def test_a_timeline_of_stages_that_take_turns_has_all_ranks(run, trace, tmp_path):
    path = tmp_path / "step.json"
    words = ("--balancer", "static", "--pipeline-stages", "2", "--pipeline", "round", "--timeline", path)
    assert run("simulate", trace, *CUT, *words)[0] == 0
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} | {event["tid"] for event in events} >= set(range(8))
