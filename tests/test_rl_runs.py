"""What the benchmarks of whole runs make of metrics: costs up to a reward, ratios, shares."""

from pathlib import Path

import pytest

from relibra.rl.config import load_config

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def rows_of(rewards, *, decode_steps, seconds, every=2):
    """Metrics of a run that evaluates every so many steps."""
    return [
        {
            "step": step,
            "decode_steps": decode_steps,
            "seconds": {"rollout": 0.75 * seconds, "update": 0.125 * seconds, "plan": 0.125 * seconds},
            "idle_share": 0.5,
            "unfinished_share": 0.25,
            "prefilled_tokens": 30,
            "sampled_tokens": 20,
            "evaluation": {"reward": rewards[step // every]} if step % every == every - 1 else None,
        }
        for step in range(every * len(rewards))
    ]


def test_costs_add_up_to_each_evaluation():
    import rl_runs

    rows = rows_of([0.1, 0.3, 0.5, 0.5], decode_steps=10, seconds=2.0)
    curve = rl_runs.points(rows)
    assert [(one.updates, one.decode_steps, one.seconds, one.reward) for one in curve] == [
        (2, 20, 4.0, 0.1),
        (4, 40, 8.0, 0.3),
        (6, 60, 12.0, 0.5),
        (8, 80, 16.0, 0.5),
    ]
    assert rl_runs.first_at(curve, 0.3, last=1) == curve[1]
    assert rl_runs.first_at(curve, 0.3, last=2) == curve[2], "one lucky evaluation is not enough"
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
    import rl_runs

    steps = [{"decode_steps": 30, "idle_share": 0.9}, {"decode_steps": 10, "idle_share": 0.1}]
    assert rl_runs.idle_share(steps) == pytest.approx(0.7)


def test_all_algorithms_are_measured_to_the_reward_that_ppo_ends_with(capsys):
    import tppo

    waiting = rows_of([0.2, 0.4, 0.6, 0.6, 0.6], decode_steps=100, seconds=2.0)
    windowed = rows_of([0.2, 0.4, 0.5, 0.6, 0.6, 0.6, 0.7], decode_steps=20, seconds=0.5)
    refilled = rows_of([0.2, 0.5, 0.6, 0.6, 0.6], decode_steps=20, seconds=1.0)
    race = tppo.Race(seed=1, rows={"PPO": waiting, "T-PPO": windowed, "T-PPO, refill": refilled})
    ppo, other, third = tppo.result_rows(race)
    assert third["decode_ratio"] == pytest.approx(1000 / 200)
    assert third["wall_ratio"] == pytest.approx(20 / 10)
    assert 0.56 < ppo["target"] == other["target"] < 0.6
    assert (ppo["updates"], ppo["decode_steps"], ppo["wall_seconds"]) == (10, 1000, 20.0)
    assert (other["updates"], other["decode_steps"], other["wall_seconds"]) == (12, 240, 6.0)
    assert other["decode_ratio"] == pytest.approx(1000 / 240)
    assert other["wall_ratio"] == pytest.approx(20 / 6)
    assert [ppo[f"{name}_ratio"] for name in ("updates", "decode", "wall")] == [1, 1, 1]
    lines = tppo.summary([ppo, other, third])
    assert lines[0] == "decode ratio: PPO / T-PPO 4.17; PPO / T-PPO, refill 5.00; target 2.5 by T-PPO: reached"
    assert lines[1].endswith("PPO / T-PPO 3.33; PPO / T-PPO, refill 2.00; target 1.8 by T-PPO: reached")
    # Per token a step costs a quarter in rollout and in the rest, so equal tokens would give 4, whatever the share.
    assert "4.00 times cheaper" in lines[2]
    assert "equal tokens give 4.00" in lines[2]
    assert lines[3].startswith("T-PPO, refill: per sampled token rollout is 2.00 times cheaper")
    tppo.print_rows([ppo, other, third])
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines() if "T-PPO" in line[:20])


def test_who_goes_first_takes_turns(monkeypatch, tmp_path):
    import tppo

    order = []
    monkeypatch.setattr(tppo, "warmed_up", lambda *_: tmp_path)
    monkeypatch.setattr(tppo, "trained", lambda settings, _policy, _folder, name: order.append((name, settings)) or [])
    races = list(tppo.races(3, tmp_path, quick=False))
    assert [list(race.rows) for race in races] == [
        ["PPO", "T-PPO", "T-PPO, refill"],
        ["T-PPO", "T-PPO, refill", "PPO"],
        ["T-PPO, refill", "PPO", "T-PPO"],
    ]
    assert [name for name, _ in order][:3] == ["PPO-0", "T-PPO-0", "T-PPO-refill-0"]
    for _, settings in order:
        load_config(None, settings)


def test_a_reward_that_is_never_reached_is_no_ratio_and_misses_the_target(capsys):
    import tppo

    waiting = rows_of([0.2, 0.6, 0.6, 0.6], decode_steps=100, seconds=2.0)
    windowed = rows_of([0.2, 0.2], decode_steps=20, seconds=0.5)
    runs = {"PPO": waiting, "T-PPO": windowed, "T-PPO, refill": windowed}
    rows = tppo.result_rows(tppo.Race(seed=0, rows=runs))
    assert rows[1]["decode_steps"] is rows[1]["wall_ratio"] is None
    assert all("MISSED" in line for line in tppo.summary(rows)[: len(tppo.TARGETS)])
    tppo.print_rows(rows)
    assert "never" in capsys.readouterr().out


def test_balancers_are_held_against_static_with_the_same_sums(capsys):
    import rl

    def run(seconds, planned, reward=0.5):
        stages = {"rollout": seconds - 0.01, "plan": 0.01}
        row = {"reward": reward, "response_length": 9.0, "loss": 0.1, "rank_skew": 1.5, "moved_experts": 1}
        return [{**row, "planned_skew": planned, "seconds": stages} for _ in range(3)]

    rows = rl.result_rows(
        [
            ("static", "fast", run(2.0, None)),
            ("relibra", "fast", run(1.0, 1.1, reward=0.6)),
            ("static", "canonical", run(3.0, 1.5)),
            ("relibra", "canonical", run(2.0, 1.1)),
        ]
    )
    assert [row["ratio_to_static"] for row in rows] == [1, 2, 1, 1.5]
    assert [row["planned_skew"] for row in rows] == [1.5, 1.1, 1.5, 1.1]
    assert [row["same_as_static"] for row in rows] == [True, False, True, True]
    assert rows[1]["plan_share"] == pytest.approx(0.01)
    lines = rl.summary(rows)
    assert "1.0%" in lines[0]
    assert "reached" in lines[0]
    assert lines[1].endswith("are the same")
    rl.print_rows(rows)
    assert "relibra, fast sums" in capsys.readouterr().out
