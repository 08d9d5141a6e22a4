"""Every algorithm through whole runs: what they train, that plans change nothing, that ranks change nothing."""

import math

import numpy as np
import pytest
import torch

from relibra.rl import step, trainer
from relibra.rl.config.defaults import PRESETS
from relibra.rl.rollout.collect import check_live_responses
from relibra.routing.trace_files import read_trace
from tests.rl.ranks_at_work import (
    PLAN_COLUMNS,
    assert_near,
    assert_same_bits,
    assert_trained,
    comparable,
    outcome_of,
    run_alone,
    run_on_ranks,
)

TPPO = ("algorithm.preset=tppo", "rollout.window=4", "algorithm.tail_drop=1", "run.steps=4")
EVEN = ("plan.balancer=relibra_paper_tokens",)
"""On processes that share cores, copies of experts this small never pay."""
IDLE = ("algorithm.preset=ppo", "algorithm.kl_coefficient=0.1", "plan.sums=canonical")
ON_HOST = ("update.offload=moments", "update.activations=host")
REFILL = (*TPPO, "rollout.window=12", "rollout.max_response=24", "rollout.refill=true")
SETTINGS_OF_PPO = {
    "lambda_policy": 0.95,
    "dual_clip": 0,
    "loss": "ppo",
    "clip_high": 0.2,
}
ALGORITHMS = {
    **{name: (f"algorithm.preset={name}",) for name in PRESETS if name != "tppo"},
    "tppo": TPPO,
    "r2": ("algorithm.replay=R2",),
    "replay_off": ("algorithm.replay=off",),
    "dense": ("model.num_experts=0", "algorithm.replay=off"),
    "dense_tppo": (*TPPO, "model.num_experts=0", "algorithm.replay=off"),
    "tppo_refill": REFILL,
    "r2_tppo": (*TPPO, "algorithm.replay=R2"),
    "bf16": ("model.dtype=bfloat16",),
    "checkpointing": ("update.activations=recompute",),
    "reference": ("algorithm.preset=grpo", "algorithm.kl_coefficient=0.1", "run.steps=3"),
    "idle": IDLE,
    "idle_on_host": (*IDLE, *ON_HOST),
    "two_epochs": ("update.epochs=2", "algorithm.entropy_coefficient=0.01"),
    "small_micro_batches": ("update.micro_batch_tokens=1",),
    "strings": ("algorithm.preset=ppo", "algorithm.correction=mis"),
}
"""One rank, in this process: half a second each."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Make a run on one rank once, when it is asked for."""
    folder, found = tmp_path_factory.mktemp("alone"), {}

    def of(name):
        if name not in found:
            found[name] = outcome_of(folder / name, [run_alone(ALGORITHMS[name], folder / name)])
        return found[name]

    return of


def check_rows(outcome, name):
    """Check what holds for the metrics of every algorithm."""
    assert len({frozenset(row) for row in outcome.rows}) == 1, "a row lacks what others have"
    for row in outcome.rows:
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(value) for value in numbers), row
        if row["k3_kl"] is None:
            continue
        native = name in ("replay_off", "dense", "dense_tppo")
        if "bf16" not in name:
            assert abs(row["k3_kl"]) < 1e-8, "trainer and sampler differ"
            assert row["alarms"] == []
            assert row["router_disagreement"] == (None if native or "r2" in name else 0)
        assert (row["rank_skew"] is None) == native
        assert row["trained_tokens"] <= (2 if name == "two_epochs" else 1) * row["sampled_tokens"]
    assert_trained(outcome)


QUICK = ("tppo", "dapo")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALGORITHMS]
)
def test_every_algorithm_trains(name, alone):
    outcome = alone(name)
    check_rows(outcome, name)
    assert all(torch.isfinite(weights).all() for weights in outcome.weights.values())
    gae = any(part in name for part in ("ppo", "strings", "idle"))
    assert all((row["value_loss"] is None) != gae for row in outcome.rows if row["finished"])


def test_t_ppo_goes_on_with_unfinished_responses(alone):
    rows = alone("tppo").rows
    assert any(row["unfinished_share"] > 0 for row in rows)
    assert all(row["decode_steps"] <= 4 for row in rows), "no step decodes more than a window"
    assert max(row["response_length_max"] or 0 for row in rows) > 4, "no response spans windows"


def test_lost_responses_are_checked_before_each_checkpoint(tmp_path, monkeypatch):
    events = []

    def check(live, *, cursor, finished, settings):
        events.append((cursor.started, finished, len(live)))
        check_live_responses(live, cursor=cursor, finished=finished, settings=settings)

    monkeypatch.setattr(step, "check_live_responses", check)
    monkeypatch.setattr(trainer.CheckpointWriter, "stage", lambda _self, number, **_: events.append(number))
    run_alone((*TPPO, "run.steps=2", "checkpoint.every=1"), tmp_path)
    before, (begun, ended, under_way), first, (begun_then, ended_then, under_way_then), last = events
    assert (before, first, last) == (0, 1, 2)
    assert begun == 8 == ended + under_way
    assert begun_then == 8 + ended == ended_then + under_way_then
    assert under_way_then > 0


@pytest.mark.slow
def test_refills_keep_places_busy_to_the_end_of_the_window(alone):
    rows, under_way = alone("tppo_refill").rows, []
    for row in rows:
        under_way.append(row["finished"] / (1 - row["unfinished_share"]))
        assert under_way[-1] == pytest.approx(round(under_way[-1]))
        assert 12 - 1 <= row["decode_steps"] <= 12, "it ends early only when no window of use fits any more"
        assert row["passes"] > row["decode_steps"], "prefills of other responses"
        assert round(under_way[-1]) - row["finished"] <= 8, "more are live than there are places"
        assert row["sampled_tokens"] >= round((1 - row["idle_share"]) * row["decode_steps"] * 8), (
            "a token per place that is taken"
        )
    assert max(under_way) > 8.5, "no place was refilled, so nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize(("windows", "ranks"), [(TPPO, 1), (REFILL, 1), (TPPO, 2)])
def test_kept_windows_train_as_those_that_are_fed_again(windows, ranks, tmp_path):
    """With weights that stay: the same routes, rewards, log-probs and gradients; an evaluation changes nothing."""
    stay = ("update.learning_rate=1e-30", "critic.learning_rate=1e-30", "algorithm.old_log_probs=recompute")
    settings = (*windows, *stay, "run.steps=5", "evaluation.every=2", "checkpoint.every=0", "trace.keep=9")
    cases = {"cut": settings, "keep": (*settings, "rollout.on_update=keep")}
    if ranks == 1:
        runs = {name: outcome_of(tmp_path / name, [run_alone(case, tmp_path / name)]) for name, case in cases.items()}
    else:
        runs = run_on_ranks(ranks, cases, tmp_path)
    lengths_before: dict[int, int] = {}
    for step_of, (cut, keep) in enumerate(zip(runs["cut"].rows, runs["keep"].rows, strict=True)):
        for name in ("sampled_tokens", "finished", "decode_steps", "tokens", "reward", "trained_tokens"):
            assert keep[name] == cut[name], name
        assert keep["log_ratio_mean_abs"] < 1e-6
        assert keep["grad_norm"] == pytest.approx(cut["grad_norm"], rel=1e-4, abs=1e-7)
        cut_routes, keep_routes = (
            routes_of(runs[name].run / "traces" / f"step-{step_of:05d}") for name in ("cut", "keep")
        )
        assert cut_routes.keys() == keep_routes.keys()
        assert all(np.array_equal(routes, keep_routes[sample]) for sample, routes in cut_routes.items())
        lengths = {sample: len(routes) + 1 for sample, routes in keep_routes.items()}
        went_on = sum(lengths_before[sample] for sample in lengths.keys() & lengths_before.keys())
        assert keep["prefilled_tokens"] == keep["tokens"] - keep["sampled_tokens"] - went_on, "only prompts are fed"
        lengths_before = lengths
    fed = {name: sum(row["prefilled_tokens"] for row in outcome.rows) for name, outcome in runs.items()}
    again = {name: sum(row["tokens"] - row["sampled_tokens"] for row in outcome.rows) for name, outcome in runs.items()}
    assert fed["cut"] == again["cut"] == again["keep"] > 1.2 * fed["keep"]
    assert sum(row["mixed_tokens"] for row in runs["keep"].rows) > 0


def routes_of(folder):
    """Return the routes of each sample of a step, without those of its last token, which was not fed."""
    trace = read_trace(folder)
    ends = zip(trace.sample_ids.tolist(), trace.offsets[:-1], trace.offsets[1:], strict=True)
    return {sample: trace.experts_TLK[begin : end - 1] for sample, begin, end in ends}


@pytest.mark.slow
def test_small_micro_batches_change_nothing_but_rounding(tmp_path):
    runs = []
    for tokens in (1, 60, 100_000):
        case = (f"update.micro_batch_tokens={tokens}", "update.max_grad_norm=0.05")
        folder = tmp_path / str(tokens)
        runs.append(outcome_of(folder, [run_alone(case, folder, descent=True)]))
    assert_trained(runs[0])
    for other in runs[1:]:
        assert_near(runs[0], other, 1e-5)
        losses = [[row["loss"] for row in run.rows] for run in (runs[0], other)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.slow
def test_activation_checkpointing_changes_no_bit(alone):
    assert_same_bits(alone("dapo"), alone("checkpointing"))


@pytest.mark.slow
def test_what_waits_on_the_host_changes_no_bit(alone):
    assert_same_bits(alone("idle"), alone("idle_on_host"))


@pytest.mark.slow
def test_windows_as_long_as_the_longest_response_are_no_windows(tmp_path):
    """U8 of the T-PPO checks: with a window of max_response T-PPO is the synchronous algorithm, bit for bit."""
    as_ppo = [f"algorithm.{name}={value}" for name, value in SETTINGS_OF_PPO.items()]
    cases = {
        "no_window": ("algorithm.preset=tppo", "rollout.window=0", "run.steps=3"),
        "whole_window": ("algorithm.preset=tppo", "rollout.window=12", "run.steps=3"),
        "tppo_as_ppo": ("algorithm.preset=tppo", "rollout.window=12", "run.steps=3", *as_ppo),
        "ppo": ("algorithm.preset=ppo", "run.steps=3"),
    }
    found = {name: outcome_of(tmp_path / name, [run_alone(case, tmp_path / name)]) for name, case in cases.items()}
    assert_trained(found["ppo"])
    assert_same_bits(found["no_window"], found["whole_window"])
    assert_same_bits(found["tppo_as_ppo"], found["ppo"])
    assert found["ppo"].rows != found["no_window"].rows, "the presets differ, so the comparison says something"


@pytest.mark.slow
def test_a_reference_policy_is_kept_and_measured(alone):
    outcome = alone("reference")
    assert (outcome.run / "reference" / "model.safetensors").is_file()
    assert outcome.rows[0]["reference_kl"] < outcome.rows[-1]["reference_kl"]
    assert outcome.rows[0]["reference_kl"] < 1e-2
    assert all(row["reference_kl"] is None for row in alone("grpo").rows), "nothing was measured"


def test_r2_replays_in_the_update_what_the_recompute_pass_took(tmp_path):
    seen = []

    def note(model, batch):
        for micro_batch in batch.micro_batches:
            with torch.no_grad():
                native = []
                hooks = [
                    module.register_forward_hook(lambda _m, _a, output, kept=native: kept.append(output[2]))
                    for name, module in model.named_modules()
                    if name.endswith("mlp.gate")
                ]
                model(input_ids=micro_batch.tokens_1T, position_ids=micro_batch.position_1T, use_cache=False)
                for hook in hooks:
                    hook.remove()
            seen.append(torch.equal(torch.stack(native, dim=1).sort(-1)[0], micro_batch.routes.experts_TLK.sort(-1)[0]))

    run_alone(("algorithm.replay=R2", "run.steps=1"), tmp_path / "run", note=note)
    assert seen
    assert all(seen), "before the first update the router still takes what was recorded"


def test_an_evaluation_is_reported(tmp_path):
    rows = run_alone(("run.steps=2", "evaluation.every=2", "evaluation.prompts=5"), tmp_path / "run")
    assert [row["evaluation"] is None for row in rows] == [True, False]
    assert 0 <= rows[1]["evaluation"]["reward"] <= 1
    assert 1 <= rows[1]["evaluation"]["response_length"] <= 12


BALANCED = {
    "canonical_static": ("plan.sums=canonical", "plan.balancer=static"),
    "canonical_relibra": ("plan.sums=canonical", "plan.balancer=relibra", *EVEN),
    "canonical_tppo_static": (*TPPO, "plan.sums=canonical", "plan.balancer=static"),
    "canonical_tppo_relibra": (*TPPO, "plan.sums=canonical", "plan.balancer=relibra", *EVEN),
    "canonical_r2_static": ("algorithm.replay=R2", "plan.sums=canonical", "plan.balancer=static"),
    "canonical_r2_relibra": ("algorithm.replay=R2", "plan.sums=canonical", "plan.balancer=relibra", *EVEN),
    "canonical_live_static": ("algorithm.replay=off", "plan.sums=canonical", "plan.balancer=live", "plan.slots=0"),
    "canonical_live_relibra": ("algorithm.replay=off", "plan.sums=canonical", "plan.balancer=live"),
    "fast_live": ("plan.balancer=live",),
    "fast_static": ("plan.balancer=static",),
    "fast_relibra": (),
    "r2_relibra": ("algorithm.replay=R2",),
    "tppo": TPPO,
    "tppo_refill": REFILL,
    "reference": ("algorithm.preset=gspo", "algorithm.kl_coefficient=0.1"),
    "checkpointing": ("update.activations=recompute",),
    "bf16": ("model.dtype=bfloat16",),
    "idle": IDLE,
    "idle_on_host": (*IDLE, *ON_HOST),
    "dense_ppo": ("algorithm.preset=ppo", "model.num_experts=0", "algorithm.replay=off"),
    "more_ranks_than_responses": (
        "algorithm.preset=ppo",
        "rollout.prompts_per_step=1",
        "rollout.responses_per_prompt=1",
        "update.mini_batches=1",
    ),
    "evaluation": ("evaluation.every=1", "evaluation.prompts=3"),
}
"""Two ranks, all in the same two processes."""


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run_on_ranks(2, BALANCED, tmp_path_factory.mktemp("together"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCED)
def test_every_rank_tells_the_same_of_a_step(name, together):
    outcome = together[name]
    first, second = (comparable(rows) for rows in outcome.of_ranks)
    assert first == second
    assert [row["step"] for row in outcome.rows] == list(range(len(outcome.rows)))
    if name != "bf16":
        assert all(abs(row["k3_kl"] or 0) < 1e-8 for row in outcome.rows)
    assert_trained(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["canonical", "canonical_tppo", "canonical_r2"])
def test_in_canonical_sums_a_plan_changes_no_bit(algorithm, together):
    static, planned = together[f"{algorithm}_static"], together[f"{algorithm}_relibra"]
    assert_same_bits(static, planned, *PLAN_COLUMNS)
    assert sum(row["replicas"] or 0 for row in planned.rows) > 0, "the plan has copied nothing, so nothing was tested"
    assert all(not row["replicas"] for row in static.rows)


@pytest.mark.slow
def test_what_waits_on_the_host_of_two_ranks_changes_no_bit(together):
    assert_same_bits(together["idle"], together["idle_on_host"])


@pytest.mark.slow
def test_in_canonical_sums_live_balancing_changes_no_bit(together):
    assert_same_bits(together["canonical_live_static"], together["canonical_live_relibra"], *PLAN_COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fast_relibra", "fast_live"])
def test_in_fast_sums_a_plan_changes_rounding_only(name, together):
    static, planned = together["fast_static"], together[name]
    for a, b in zip(static.rows, planned.rows, strict=True):
        assert b["reward"] == pytest.approx(a["reward"], abs=0.2)
    assert static.rows[0]["reward"] == planned.rows[0]["reward"]
    assert planned.rows[0]["loss"] == pytest.approx(static.rows[0]["loss"], abs=1e-4)


@pytest.mark.slow
def test_live_balancing_says_what_it_reached(together):
    """Also without replay; the same skew before as in the run without balancing, which has the same first step."""
    for row in together["fast_live"].rows:
        assert row["replicas"] > 0
        assert 1 <= row["planned_skew"] < row["rank_skew"]
    for row in together["canonical_live_relibra"].rows:  # whole chunks of rows move: in so small a run few do
        assert 1 <= row["planned_skew"] <= row["rank_skew"]
        assert row["replicas"] > 0 or row["planned_skew"] == row["rank_skew"]
    first, static = together["fast_live"].rows[0], together["fast_static"].rows[0]
    assert first["rank_skew"] == pytest.approx(static["rank_skew"])


@pytest.mark.slow
def test_plans_are_made_where_experts_can_follow_them(together):
    for name, outcome in together.items():
        for row in outcome.rows:
            balanced = name not in ("fast_static", "dense_ppo")
            wanted = balanced and "live" not in name and row["trained_tokens"] > 0
            assert (row["planned_skew"] is not None) == (balanced and row["trained_tokens"] > 0), name
            assert (row["plan_bound"] is not None) == wanted, name
            if wanted:
                assert row["plan_bound"] - 1e-9 <= row["planned_skew"] <= row["rank_skew"] + 1e-9
            assert row["ran_at_home"] == (0 if wanted else None)
            if row["trained_tokens"] > 0:
                assert_addresses(row, wanted, balanced)


def assert_addresses(row, planned, balanced):
    """A plan knows where all rows go before the step; passes that balance live know none, and wait in each layer."""
    waits = row["wait_seconds"]
    assert (waits is not None) == (balanced and (row["known_rows"] or 0) < 1)
    assert waits is None or (waits["counts"] > 0 and waits["solve"] > 0)
    if planned:
        assert 0.2 < row["known_rows"] <= 1
    else:
        assert row["known_rows"] == (0 if balanced else None)


RANKS = {
    "replayed": ("update.micro_batch_tokens=40",),
    "routed_anew": ("algorithm.replay=off", "update.mini_batches=1"),
    # a mini-batch is one group here, so one of the ranks has little to do in each
    "one_rank_idle": ("rollout.prompts_per_step=3", "update.mini_batches=3"),
    # one response per step: a rank has no prompt, no response and no trace at all
    "one_rank_empty": (
        "algorithm.preset=ppo",
        "algorithm.whiten=false",  # which leaves nothing of the advantages of one response that are all alike
        "run.steps=5",
        "rollout.prompts_per_step=1",
        "rollout.responses_per_prompt=1",
        "update.mini_batches=1",
    ),
    "windows": TPPO,
    "r2": ("algorithm.replay=R2",),
}
ALIKE = ("warmup.steps=0", "update.max_grad_norm=0.05")
"""The warm-up weighs ranks and not tokens alike, so it is left out; at this norm clipping is always at work."""


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    cases = {name: (*case, *ALIKE) for name, case in RANKS.items()}
    return run_on_ranks(2, cases, tmp_path_factory.mktemp("two-ranks"), descent=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_train_what_one_trains(name, on_two_ranks, tmp_path):
    folder = tmp_path / name
    single = outcome_of(folder, [run_alone((*RANKS[name], *ALIKE), folder, descent=True)])
    assert_trained(single)
    assert_near(single, on_two_ranks[name], 1e-5)
    about_ranks = {
        *PLAN_COLUMNS,
        "ran_at_home",
        "pass_skews",
        "fed_tokens",  # ranks that have too few responses share no prompt
        "prompt_routes_differing",
        "k3_kl",
        "idle_share",
        "decode_steps",
        "passes",
        "log_ratio_p99",
        "log_ratio_max",
        "sampler_check",
        "seconds",
    }
    for one, other in zip(single.rows, on_two_ranks[name].rows, strict=True):
        # each rank cuts its own finished responses into mini-batches for the value model
        about_values = {"value_loss", "explained_variance"}
        for key in one.keys() - about_ranks - about_values - {"plan_seconds", "alarms", "evaluation"}:
            assert other[key] == (None if one[key] is None else pytest.approx(one[key], abs=1e-5)), key
