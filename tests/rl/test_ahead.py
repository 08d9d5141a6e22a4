"""Whole runs whose responses are sampled while the steps before them train."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from itertools import count, pairwise

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from relibra.errors import ConfigError, EngineError
from relibra.rl.config.run_config import describe_training, load_config
from relibra.rl.rollout.response import new_response
from relibra.rl.rollout.served.sampler import request_seed
from relibra.rl.run.checkpoints.policy_folder import write_start_folder
from relibra.routing.trace_files import read_trace
from tests.rl.ranks_at_work import (
    assert_same_bits,
    assert_trained,
    comparable,
    outcome_of,
    run_alone,
    run_on_ranks,
    tiny_config,
)
from tests.rl.rollout.stand_in_server import running
from tests.rl.rollout.test_engines import small_canary as small_canary
from tests.rl.runs import LongRun, check_samples, check_whole
from tests.rl.test_resume import rewound

SERVED = ("rollout.engine=vllm", "rollout.url=http://h:1", "rollout.server_weights=weights")
FROZEN = ("update.learning_rate=1e-30", "algorithm.group_filter=off", "trace.keep=99", "checkpoint.every=0")
TPPO = ("algorithm.preset=tppo", "rollout.window=4", "algorithm.tail_drop=1", "critic.min_finished=2")
PER_STEP = 8


@contextmanager
def served(folder, *settings, dialect="vllm", pace=None):
    """Yield a server of the first weights of a run, and the settings of a run that samples from it."""
    settings = (f"rollout.engine={dialect}", f"rollout.server_weights={folder / 'weights'}", *settings)
    write_start_folder(tiny_config(*settings, "rollout.url=http://h:1", ranks=1), folder / "start")
    with running(AutoModelForCausalLM.from_pretrained(folder / "start").eval(), dialect) as server:
        server.pace = pace
        yield server, (*settings, f"rollout.url={server.url}")


def held_until_cut():
    """Return the pace of a server that holds an answer of each step but the first until an update cuts it."""
    begun, answer = count(), threading.local()

    def pace(tokens):
        if tokens == 0:
            answer.number = next(begun)
        return 2.0 if tokens == 1 and answer.number and answer.number % PER_STEP == 0 else 0.0

    return pace


def hold_until_update(server, steps):
    """Hold answers that begin before the weights of their step: they have no token when these come."""
    samples = [new_response(sample, sample, [1]) for sample in range(PER_STEP * steps)]
    step_of = {request_seed(0, one): one.sample_id // PER_STEP for one in samples}
    sample, answer = server.sample, threading.local()

    def sample_or_hold(tokens, *, seed, **options):
        answer.waits = seed in step_of and step_of[seed] > int(server.version)
        return sample(tokens, seed=seed, **options)

    server.sample, server.pace = sample_or_hold, lambda tokens: 20.0 if answer.waits and tokens == 0 else 0.0


def traces_of(run, steps):
    return [read_trace(run / "traces" / f"step-{step:05d}") for step in range(steps)]


def check_counts(run, steps, *, windows=False):
    """Every sample was trained once, or once per window, and none was passed over."""
    traces = traces_of(run, steps)
    ids = [trace.sample_ids.tolist() for trace in traces]
    assert not list((run / "traces").glob(f"step-{steps:05d}")), "what was begun ahead is gone"
    if windows:
        for (earlier, _), (later, trace) in pairwise(zip(ids, traces, strict=True)):
            lengths = dict(zip(later, np.diff(trace.offsets) - trace.prompt_lengths, strict=True))
            assert all(lengths[sample] > 4 for sample in set(earlier) & set(later)), "it went on"
        assert set().union(*ids) == set(range(max(map(max, ids)) + 1))
    else:
        assert list(map(sorted, ids)) == [list(range(PER_STEP * step, PER_STEP * (step + 1))) for step in range(steps)]


@pytest.mark.parametrize("preset", [("algorithm.preset=grpo",), pytest.param(TPPO, marks=pytest.mark.slow)])
def test_with_weights_that_stay_a_run_ahead_is_one_that_waits(tmp_path, small_canary, preset):
    found = {}
    for ahead in (0, 2):
        folder = tmp_path / f"ahead-{ahead}"
        with served(folder, *FROZEN, *preset, "run.steps=4", f"rollout.ahead={ahead}") as (server, settings):
            found[ahead] = run_alone(settings, folder / "run")
        assert server.version == "4"
        check_counts(folder / "run", 4, windows=preset is TPPO)
    for one, other in zip(
        *(comparable(found[ahead], "canary", "ahead", "sampler_check") for ahead in (0, 2)), strict=True
    ):
        assert one == other
    assert found[0][0]["ahead"] is None
    assert all(row["k3_kl"] < 1e-9 and row["router_disagreement"] == 0.0 for row in found[2])
    ages = [row["ahead"]["age_max"] for row in found[2]]
    assert ages[0] == 0
    assert max(ages) <= 2
    for row in found[2]:
        assert 0 <= row["ahead"]["waited_plan"] <= sum(row["seconds"].values())
        assert row["ahead"]["begun"] <= 2 * PER_STEP
    assert found[2][-1]["ahead"]["begun"] == 0, "nothing begins that no step trains"


@pytest.mark.parametrize(("preset", "dialect"), [pytest.param((), "vllm", marks=pytest.mark.slow), (TPPO, "sglang")])
def test_answers_cut_by_updates_are_trained_by_age(tmp_path, small_canary, preset, dialect):
    settings = (*preset, "rollout.ahead=1", "algorithm.group_filter=off", "trace.keep=99", "run.steps=4")
    pace, fast = held_until_cut(), "update.learning_rate=1e-2"
    with served(tmp_path, *settings, fast, dialect=dialect, pace=pace) as (server, run):
        rows = run_alone(run, tmp_path / "run")
    check_counts(tmp_path / "run", 4, windows=bool(preset))
    assert server.version == "4"
    assert not server.paused.is_set()
    assert max(row["ahead"]["age_max"] for row in rows) == 1
    assert max(row["ahead"]["mixed_share"] for row in rows) > 0, "no answer was cut"
    assert all(row["trained_tokens"] > 0 for row in rows)
    for step, trace in enumerate(traces_of(tmp_path / "run", 4)):
        assert set(trace.weight_versions.tolist()) <= {max(0, step - 1), step}


def test_masked_tokens_of_mixed_routes_do_not_train(tmp_path, small_canary):
    settings = ("rollout.ahead=1", "rollout.mixed_routes=mask", "algorithm.group_filter=off", "run.steps=3")
    with served(tmp_path, *settings, pace=held_until_cut()) as (_, run):
        rows = run_alone(run, tmp_path / "run")
    assert max(row["ahead"]["mixed_share"] for row in rows) > 0
    for row in rows:
        mixed = round(row["ahead"]["mixed_share"] * row["sampled_tokens"])
        assert row["trained_tokens"] == row["sampled_tokens"] - mixed


def test_a_cut_answer_is_rescored_where_it_goes_on(tmp_path, small_canary):
    settings = ("rollout.ahead=1", "algorithm.group_filter=off", "run.steps=3", "update.learning_rate=1e-2")
    for choice in ("replay", "rescore"):
        folder = tmp_path / choice
        with served(folder, *settings, f"rollout.mixed_routes={choice}", pace=held_until_cut()) as (server, run):
            rows = run_alone(run, folder / "run")
        asked = [body["sampling_params"] for _, body in server.asked if "seed" in body.get("sampling_params", {})]
        assert any("prompt_logprobs" in one for one in asked) == (choice == "rescore")
        assert max(row["ahead"]["mixed_share"] for row in rows) > 0
        assert all(row["trained_tokens"] == row["sampled_tokens"] for row in rows)


@pytest.mark.parametrize("dialect", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_answers_that_servers_keep_are_trained_as_mixed(tmp_path, small_canary, dialect):
    settings = ("rollout.ahead=1", "rollout.on_update=keep", "algorithm.group_filter=off", "trace.keep=99")
    fast, pace = ("update.learning_rate=1e-2", "run.steps=3"), held_until_cut()
    with served(tmp_path, *settings, *fast, dialect=dialect, pace=pace) as (server, run):
        rows = run_alone(run, tmp_path / "run")
    check_counts(tmp_path / "run", 3)
    assert server.version == "3"
    assert max(row["ahead"]["mixed_share"] for row in rows) > 0, "no answer was kept"
    assert max(row["ahead"]["age_max"] for row in rows) == 1


def test_a_resumed_run_loses_no_sample_and_doubles_none(tmp_path, small_canary):
    settings = ("rollout.ahead=2", "algorithm.group_filter=off", "trace.keep=99", "run.steps=4", "checkpoint.every=1")
    with served(tmp_path, *settings, "checkpoint.keep=9") as (server, run):
        run_alone(run, tmp_path / "run")
        rewound(tmp_path / "run", 2)
        server.pause(paused=True)  # as a run that was killed between load and resume leaves it
        rows = run_alone(run, tmp_path / "run")
    assert [row["step"] for row in rows] == [2, 3]
    assert server.version == "4", "versions go on"
    check_counts(tmp_path / "run", 4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for step, trace in enumerate(traces_of(tmp_path / "run", 4)):
        assert max(0, step - 2) <= trace.weight_versions.min() <= trace.weight_versions.max() <= step
        assert step < 2 or trace.weight_versions.min() >= 2, "what was under way was sampled again"


def test_a_resume_with_no_token_under_way_changes_no_bit(tmp_path, small_canary):
    run, settings = tmp_path / "run", ("rollout.ahead=1", "run.steps=4", "checkpoint.every=2", "checkpoint.keep=9")
    with served(tmp_path, *settings, "update.learning_rate=1e-2", "algorithm.group_filter=off") as (server, settings):
        hold_until_update(server, steps=4)
        whole = outcome_of(run, [run_alone(settings, run)])
        assert_trained(whole)
        assert [row["ahead"]["age_max"] for row in whole.rows] == [0] * 4
        assert whole.rows[0]["ahead"]["begun"] == PER_STEP
        rewound(run, 2)
        again = outcome_of(run, [run_alone(settings, run)])
    assert len(again.of_ranks[0]) == 2
    assert_same_bits(whole, again, "ahead", "canary", "prefilled_tokens")  # held requests are sent twice


def test_few_steps_with_a_large_lead_end(tmp_path, small_canary):
    with served(tmp_path, "rollout.ahead=8", "trace.keep=99", "run.steps=2") as (_, run):
        rows = run_alone(run, tmp_path / "run")
    assert [row["ahead"]["begun"] for row in rows] == [PER_STEP, 0]
    check_counts(tmp_path / "run", 2)


@pytest.mark.usefixtures("_leave_group")
def test_a_dead_server_is_an_error(tmp_path, small_canary):
    with served(tmp_path, "rollout.ahead=1", "run.steps=9", "rollout.start_seconds=0") as (server, run):
        server.die(looks=1 << 30, after=20)
        with pytest.raises(EngineError, match="the server did not answer"):
            run_alone(run, tmp_path / "run")


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.engine=embedded",),
        (*SERVED, "rollout.sleep=true"),
        (*SERVED, "update.offload=all"),
    ],
)
def test_what_cannot_sample_meanwhile_is_refused(settings):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["rollout.ahead=1", *settings])
    assert caught.value.what == "rollout.ahead"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ((*SERVED, "rollout.ahead=0"), "rollout.on_update"),
        (("rollout.engine=serve",), "rollout.on_update"),
        ((*SERVED, "rollout.transfer=gloo"), "rollout.on_update"),
        ((*SERVED, "rollout.mixed_routes=rescore"), "rollout.mixed_routes"),
    ],
)
def test_where_answers_cannot_be_kept_is_refused(settings, what):
    load_config(None, ["rollout.ahead=1", *SERVED, "rollout.on_update=keep"])
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["rollout.ahead=1", "rollout.on_update=keep", *settings])
    assert caught.value.what == what


def test_the_first_lines_say_what_corrects_older_tokens():
    for given, says in (((), "correction is 'tis'"), (("algorithm.correction=off",), "warning: rollout.ahead 1")):
        config = load_config(None, ["rollout.ahead=1", *SERVED, *given])
        assert any(says in line for line in describe_training(config))


@pytest.mark.slow
@pytest.mark.parametrize("preset", [("algorithm.preset=ppo",), TPPO, ("algorithm.replay=R2",)])
def test_two_ranks_run_ahead_and_resume(tmp_path, small_canary, preset):
    settings = (*preset, "rollout.ahead=2", "algorithm.group_filter=off", "trace.keep=99", "run.steps=5")
    pace = lambda n: 0.02 if n % 4 == 3 else 0.0  # noqa: E731
    with served(tmp_path, *settings, "checkpoint.every=2", "checkpoint.keep=9", pace=pace) as (_, run):
        run_on_ranks(2, {"run": run}, tmp_path / "runs")
        rewound(tmp_path / "runs" / "run", 2)
        outcome = run_on_ranks(2, {"run": run}, tmp_path / "runs")["run"]
    assert [row["step"] for row in outcome.rows] == list(range(5))
    if "algorithm.replay=R2" not in preset:
        check_counts(tmp_path / "runs" / "run", 5, windows=preset is TPPO)
    assert max(row["ahead"]["age_max"] for row in outcome.rows) in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_while_answers_are_under_way_resumes(tmp_path, seed):
    rng, hold, begun = np.random.default_rng(seed), held_until_cut(), []
    settings = ("rollout.ahead=1", "algorithm.group_filter=off", "trace.keep=99", "run.steps=6", "checkpoint.every=1")

    def pace(tokens):
        begun.extend([tokens] * (tokens == 0))
        return hold(tokens)

    with served(tmp_path, *settings, "parallel.ranks=2", pace=pace) as (server, run):
        with LongRun(tmp_path, *run) as going:
            going.wait_for(f"({rng.integers(1, 5)}/")
            time.sleep(rng.uniform(0.0, 0.5))
            while len(begun) == len(server.sampled):
                time.sleep(0.01)
            os.kill(going.workers()[rng.integers(2)], signal.SIGKILL)
            assert going.exit_code() == 1
        with LongRun(tmp_path, resume=True) as going:
            assert going.exit_code() == 0
    assert server.version == "6"
    check_counts(tmp_path / "run", 6)
    assert check_whole(tmp_path / "run") == 6
    check_samples(tmp_path / "run", 6)
