"""What the benchmarks of whole runs make of metrics: costs up to a reward, ratios, shares."""

import pytest

from relibra.rl.config.run_config import load_config


def rows_of(rewards, *, decode_steps, seconds, every=2):
    """Metrics of a run that evaluates every so many steps."""
    return [
        {
            "step": step,
            "decode_steps": decode_steps,
            "passes": decode_steps + 5,
            "seconds": {"rollout": 0.75 * seconds, "update": 0.125 * seconds, "plan": 0.125 * seconds},
            "idle_share": 0.5,
            "unfinished_share": 0.25,
            "prefilled_tokens": 30,
            "mixed_tokens": 5,
            "tokens": 50,
            "sampled_tokens": 20,
            "evaluation": {"reward": rewards[step // every]} if step % every == every - 1 else None,
        }
        for step in range(every * len(rewards))
    ]


def test_costs_add_up_to_each_evaluation():
    from benchmarks.rl import runs as rl_runs

    rows = rows_of([0.1, 0.3, 0.5, 0.5], decode_steps=10, seconds=2.0)
    curve = rl_runs.points(rows)
    assert [(one.updates, one.decode_steps, one.passes, one.seconds, one.reward) for one in curve] == [
        (2, 20, 30, 4.0, 0.1),
        (4, 40, 60, 8.0, 0.3),
        (6, 60, 90, 12.0, 0.5),
        (8, 80, 120, 16.0, 0.5),
    ]
    assert rl_runs.first_at(curve, 0.3, last=1) == curve[1]
    assert rl_runs.first_at(curve, 0.3, last=2) == curve[2], "one lucky evaluation is not enough"
    assert rl_runs.first_at(curve, 0.1, last=3) == curve[2], "fewer than three are no mean of three"
    assert rl_runs.first_at(curve, 0.6, last=1) is None
    assert rl_runs.stage_seconds(rows) == {
        "rollout": 12.0,
        "recompute": 0.0,
        "values": 0.0,
        "update values": 0.0,
        "update": 2.0,
        "other": 2.0,
    }


def test_idle_places_weigh_as_long_as_the_step_decodes():
    from benchmarks.rl import runs as rl_runs

    steps = [{"decode_steps": 30, "idle_share": 0.9}, {"decode_steps": 10, "idle_share": 0.1}]
    assert rl_runs.idle_share(steps) == pytest.approx(0.7)


def test_all_algorithms_are_measured_to_the_plateau_of_ppo(capsys):
    from benchmarks.rl import tppo

    waiting = rows_of([0.2, 0.4, 0.6, 0.6, 0.6, 0.6], decode_steps=100, seconds=2.0)
    queued = rows_of([0.3, 0.6, 0.6, 0.6], decode_steps=95, seconds=2.0)
    windowed = rows_of([0.2, 0.4, 0.5, 0.6, 0.6, 0.6, 0.7], decode_steps=20, seconds=0.5)
    refilled = rows_of([0.2, 0.5, 0.6, 0.6, 0.6], decode_steps=20, seconds=1.0)
    runs = {"PPO": waiting, "PPO, queued": queued, "T-PPO": windowed, "T-PPO, refill": refilled}
    runs |= {"T-PPO, keep": windowed, "T-PPO, refill, keep": refilled}
    rows = tppo.result_rows(tppo.Race(seed=1, rows=runs))
    ppo, queue, other, third = rows[:4]
    assert [row["algorithm"] for row in rows] == list(runs)
    assert 0.56 < ppo["target"] == other["target"] < 0.6
    assert (ppo["updates"], ppo["decode_steps"], ppo["passes"], ppo["wall_seconds"]) == (10, 1000, 1050, 20.0)
    assert (other["updates"], other["decode_steps"], other["passes"], other["wall_seconds"]) == (12, 240, 300, 6.0)
    assert queue["decode_ratio"] == pytest.approx(1000 / (8 * 95))
    assert other["decode_ratio"] == pytest.approx(1000 / 240)
    assert other["passes_ratio"] == pytest.approx(1050 / 300)
    assert other["wall_ratio"] == pytest.approx(20 / 6)
    assert third["decode_ratio"] == pytest.approx(1000 / 200)
    assert third["wall_ratio"] == pytest.approx(20 / 10)
    assert (other["queued_ratio"], queue["queued_ratio"]) == pytest.approx((16 / 6, 1))
    assert (other["fed_again"], other["mixed_share"], other["rows_per_token"]) == (1.5, 0.25, 2.5)
    assert [ppo[f"{name}_ratio"] for name in tppo.RATIOS] == [1, 1, 1, 1]
    lines = tppo.summary(rows)
    assert lines[0].startswith("decode ratio: PPO / PPO, queued 1.32; PPO / T-PPO 4.17; PPO / T-PPO, refill 5.00; ")
    assert lines[0].endswith("PPO / T-PPO, keep 4.17; PPO / T-PPO, refill, keep 5.00; target 2.5 by T-PPO: reached")
    assert "PPO / T-PPO 3.33; PPO / T-PPO, refill 2.00; " in lines[1]
    assert lines[1].endswith("target 1.8 by T-PPO: reached")
    assert lines[2].startswith("queued ratio: PPO, queued / T-PPO 2.67; ")
    assert lines[2].endswith("target 1.0 by T-PPO: reached")
    assert "PPO / T-PPO 3.50; PPO / T-PPO, refill 4.20" in lines[3]
    lines = lines[1:]
    assert lines[3].startswith("PPO's reward still moved at its end by +0.000")
    # Per token a step costs a quarter in rollout and in the rest, so equal tokens would give 4, whatever the share.
    assert "4.00 times cheaper" in lines[4]
    assert "equal tokens give 4.00" in lines[4]
    assert lines[5].startswith("T-PPO, refill: per sampled token rollout is 2.00 times cheaper")
    tppo.print_rows(rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "PPO" in line[:20] and len(line) <= 96]
    final = ("0.60", "0.60", "0.63", "0.60", "0.63", "0.60")
    assert [line[-2:] for line in lines[:6]] == [[reward, "0.58"] for reward in final]


def test_the_plateau_is_the_best_of_the_last_third():
    from benchmarks.rl import tppo

    falling = rows_of([0.9, 0.9, 0.9, 0.2, 0.2, 0.5, 0.5, 0.5, 0.2], decode_steps=1, seconds=1.0)
    error = (0.5 * 0.5 / (192 * 3)) ** 0.5
    assert tppo.reward_to_reach(falling) == pytest.approx(0.5 - error), "what came early and went is no plateau"
    assert tppo.last_move(falling) == pytest.approx(-0.1)
    rising = rows_of([0.1 * i for i in range(1, 10)], decode_steps=1, seconds=1.0)
    assert tppo.last_move(rising) == pytest.approx(0.1)


def test_rows_hold_settings_of_warm_up_and_run_apart():
    from benchmarks.rl import tppo

    runs = {name: rows_of([0.2, 0.6, 0.6, 0.6], decode_steps=9, seconds=1.0) for name in tppo.MORE}
    for row in tppo.result_rows(tppo.Race(seed=2, rows=runs)):
        warm_up, run = (load_config(None, row[name]) for name in ("warm_up_settings", "settings"))
        assert (warm_up.parallel.ranks, run.parallel.ranks, run.run.seed) == (2, 1, 2)
        places = min(run.rollout.max_batch, run.rollout.responses_per_step)
        assert places == 32, "all decode in the same places"
        assert run.rollout.responses_per_step / run.update.mini_batches == 32, (
            "and learn from as many responses at once"
        )


def test_who_goes_first_takes_turns(monkeypatch, tmp_path):
    from benchmarks.rl import tppo

    order = []
    monkeypatch.setattr(tppo, "warmed_up", lambda *_: tmp_path)
    monkeypatch.setattr(tppo, "trained", lambda settings, _policy, _folder, name: order.append((name, settings)) or [])
    races = list(tppo.races(3, tmp_path, quick=False))
    all_six = ["PPO", "PPO, queued", "T-PPO", "T-PPO, refill", "T-PPO, keep", "T-PPO, refill, keep"]
    assert [list(race.rows) for race in races] == [[*all_six[n:], *all_six[:n]] for n in range(3)]
    assert [name for name, _ in order][:4] == ["PPO-0", "PPO-queued-0", "T-PPO-0", "T-PPO-refill-0"]
    for _, settings in order:
        load_config(None, settings)


def test_a_reward_that_is_never_reached_misses_the_target(capsys):
    from benchmarks.rl import tppo

    waiting = rows_of([0.2, 0.6, 0.6, 0.6], decode_steps=100, seconds=2.0)
    windowed = rows_of([0.2, 0.2], decode_steps=20, seconds=0.5)
    runs = {"PPO": waiting} | {name: windowed for name in tppo.MORE if name != "PPO"}
    rows = tppo.result_rows(tppo.Race(seed=0, rows=runs))
    assert rows[2]["decode_steps"] is rows[2]["wall_ratio"] is None
    assert all("MISSED" in line for line in tppo.summary(rows)[: len(tppo.TARGETS)])
    tppo.print_rows(rows)
    assert "never" in capsys.readouterr().out


def test_balancers_are_held_against_static_with_the_same_sums(capsys):
    from benchmarks.rl import rl

    def run(seconds, planned, reward=0.5):
        stages = {"rollout": seconds / 2 - 0.01, "plan": 0.01, "recompute": 0.0, "update": seconds / 2}
        row = {"reward": reward, "response_length": 9.0, "loss": 0.1, "rank_skew": 1.5, "moved_experts": 1, "pushes": 4}
        return [[{**row, "planned_skew": planned, "seconds": stages} for _ in range(3)]]

    def case(balancer, kind, turns):
        return rl.Case(balancer=balancer, kind=kind, turns=turns, expert_seconds=0.6)

    def of_values(turns, seconds):
        stages = {"values": seconds / 4, "update values": 3 * seconds / 4}
        skews = {"pass_skews": {"update values": [1.5, 1.2]}}
        return [[{**row, **skews, "seconds": {**row["seconds"], **stages}} for row in rows] for rows in turns]

    rows = rl.result_rows(
        [
            case("static", "fast sums", run(2.0, None)),
            case(rl.EXECUTOR, "fast sums", run(2.0, None)),
            case("relibra", "fast sums", run(1.0, 1.1, reward=0.6)),
            case("static", "canonical sums", run(3.0, 1.5)),
            case(rl.EXECUTOR, "canonical sums", run(3.0, 1.5)),
            case("relibra", "canonical sums", run(2.0, 1.1)),
            case("static", "PPO", of_values(run(2.0, None), 3.0)),
            case(rl.EXECUTOR, "PPO", of_values(run(2.0, None), 3.0)),
            case("relibra", "PPO", of_values(run(1.0, 1.1), 2.0)),
        ]
    )
    *rows, static, _, balanced = rows
    assert static["ratio_values"] == 1
    assert balanced["ratio_values"] == pytest.approx(1.5)
    assert (balanced["values_skew"], balanced["values_skew_balanced"]) == (1.5, 1.2)
    rows.append(balanced)
    assert [row["ratio_train"] for row in rows[:6]] == [1, 1, 2, 1, 1, 1.5]
    assert rows[0]["expert_share"] == pytest.approx(0.6)
    assert [row["ratio_to_static"] for row in rows[:6]] == [1, 1, 2, 1, 1, 1.5]
    assert [row["planned_skew"] for row in rows[:6]] == [1.5, 1.5, 1.1, 1.5, 1.5, 1.1]
    assert [row["same_as_static"] for row in rows[:6]] == [True, True, False, True, True, True]
    assert rows[2]["plan_share"] == pytest.approx(0.01)
    lines = rl.summary(rows)
    assert "60%" in lines[0]
    assert lines[1].endswith("reached")
    assert lines[3].endswith("reached")
    assert lines[4].endswith("reached")
    assert "1.0%" in lines[5]
    assert lines[7].endswith("are the same")
    rl.print_rows(rows)
    assert "relibra, fast sums" in capsys.readouterr().out


def test_shares_of_executor_and_balance_multiply_to_the_whole():
    from benchmarks.rl import rl

    def steps(update):
        common = {"reward": 0.5, "response_length": 9, "loss": 0.1, "rank_skew": 1.5, "planned_skew": None}
        common |= {"pushes": 0, "moved_experts": 0}
        return [
            {**common, "seconds": {"rollout": 1.0, "recompute": 0.5, "update": one}} for one in (9.0, update, update)
        ]

    updates = {"static": (2.5, 2.9), rl.EXECUTOR: (1.9, 2.1), "relibra": (1.3, 1.7)}
    cases = [
        rl.Case(balancer=name, kind="fast sums", turns=[steps(update) for update in of_turns], expert_seconds=1.0)
        for name, of_turns in updates.items()
    ]
    native, executed, planned = rl.result_rows(cases)
    assert (native["executor_ratio"], native["balance_ratio"]) == (1, 1)
    assert executed["executor_ratio"] == executed["ratio_train"] == pytest.approx(3.2 / 2.5)
    assert executed["balance_ratio"] == 1
    assert planned["executor_ratio"] == executed["executor_ratio"]
    assert planned["balance_ratio"] == pytest.approx(2.5 / 2.0)
    assert planned["ratio_train"] == pytest.approx(planned["executor_ratio"] * planned["balance_ratio"])
    assert planned["ratio_train low"] == pytest.approx((3.4 / 2.2) + (3.0 / 1.8 - 3.4 / 2.2) / 4)


def test_throughput_over_all_to_all_is_executor_times_balance():
    from benchmarks.runtime.runtime import with_shares

    seconds = {"all_to_all": 3.0, "relibra": 2.0, "balanced routes": 1.8, "balanced routes, all_to_all": 1.98}
    rows = [
        {"case_skew": 1.5, "balancer": name, "seconds": [one], "ratio_to_all_to_all": 3.0 / one}
        for name, one in seconds.items()
    ]
    of = {row["balancer"]: row for row in with_shares([*rows, {**rows[0], "case_skew": 1.2}])}
    assert of["relibra"]["executor_ratio"] == pytest.approx(1.1)
    assert of["relibra"]["balance_ratio"] == pytest.approx(1.5 / 1.1)
    assert (of["all_to_all"]["executor_ratio"], of["all_to_all"]["balance_ratio"]) == (1, 1)


def test_runs_ahead_are_held_against_those_that_wait(capsys):
    from benchmarks.rl import ahead as bench

    def run(ahead, seed, seconds, rewards):
        waits = {"rollout": 0.0 if ahead else 0.9, "plan": 0.01, "update": seconds - 1.0}
        ages = {"age_mean": 1.0, "age_max": 1, "mixed_share": 0.0, "waited_rollout": 0.0, "waited_plan": 0.005}
        row = {"sampled_tokens": 300, "ahead": ages if ahead else None, "seconds": waits}
        rows = [{**row, "reward": reward} for reward in rewards]
        return bench.Run(ahead=ahead, seed=seed, rows=rows, ends=[9.0 + seconds * step for step in range(len(rows))])

    waiting = [run(0, seed, 2.0, [0.1, 0.2, 0.3, 0.5 + 0.01 * seed]) for seed in range(3)]
    ahead = [run(1, seed, 1.25 + 0.01 * seed, [0.1, 0.2, 0.3, 0.52 - 0.01 * seed]) for seed in range(3)]
    *rows, whole = bench.result_rows([*ahead, *waiting])
    assert [row["case"] for row in rows] == [f"ahead {a}, seed {s}" for s in range(3) for a in (0, 1)]
    assert [row["repetitions"] for row in rows] == [2] * 6, "neither the first step nor the last"
    assert [round(row["tokens_per_second"]) for row in rows] == [150, 240, 150, 238, 150, 236]
    assert (rows[0]["ratio"], rows[1]["ratio"], whole["ratio"]) == pytest.approx((1.0, 1.6, 2.0 / 1.26))
    assert (rows[0]["rollout_share"], whole["rollout_share"], rows[1]["rollout_share"]) == (0.45, 0.45, 0.0)
    assert whole["plan_share"] == pytest.approx(0.004)
    assert [row["reward"] for row in rows[:2]] == [0.5, 0.52]
    assert rows[1]["rewards"] == [0.1, 0.2, 0.3, 0.52]
    assert whole["reward_difference"] == pytest.approx(0.0)
    assert whole["reward_error"] == pytest.approx((2 * 0.01**2 / 3) ** 0.5)
    assert [row["age_max"] for row in (*rows[:2], whole)] == [0, 1, 1]
    assert whole["ok"]
    bench.print_rows([*rows, whole])
    assert capsys.readouterr().out.count("reached") == len(bench.goals(whole))
    slow = bench.result_rows([*waiting, *(run(1, seed, 1.6, [0.1, 0.2, 0.3, 0.4]) for seed in range(3))])[-1]
    assert [reached for _, reached in bench.goals(slow)] == [False, True, False, True]


def test_the_benchmark_of_rollouts_ahead_sets_what_a_run_takes(tmp_path):
    from benchmarks.rl import ahead as bench

    config = load_config(None, [*bench.SETTINGS, *bench.QUICK, "rollout.engine=serve", bench.SERVER])
    assert config.rollout.server_options == "--micro-batches 1"
    assert config.rollout.responses_per_step <= config.rollout.max_batch, "a server decodes a step at once"
