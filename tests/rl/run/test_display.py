"""What a person sees: plain lines where there is no terminal, a table where there is one."""

import io

import pytest
from numba import njit
from rich.console import Console

from relibra.rl.run.display import LINE_EVERY_WARMUP_STEPS, TrainingDisplay, curve, metrics_table


def metrics(step, **more):
    return {
        "step": step,
        "reward": 0.5,
        "response_length": 7.6,
        "response_length_max": 12,
        "unfinished_share": 0.0,
        "idle_share": 0.2,
        "rank_skew": 1.25,
        "planned_skew": 1.01,
        "k3_kl": 1.5e-14,
        "loss": 0.125,
        "entropy": 2.0,
        "equal_groups": 0.0,
        "tokens": 900,
        "clip_fraction": 0.01,
        "explained_variance": None,
        "evaluation": None,
        "alarms": [],
        "seconds": {"rollout": 0.5, "update": 0.25},
        **more,
    }


@pytest.fixture
def plain(capsys):
    """Return a display that writes to no terminal, and what it wrote."""

    def make(enabled=True, warmup_steps=0, rl_steps=9):
        return TrainingDisplay(warmup_steps=warmup_steps, rl_steps=rl_steps, enabled=enabled)

    return make, lambda: capsys.readouterr().err.splitlines()


def test_a_step_is_a_line(plain):
    make, lines = plain
    with make() as display:
        display.rl_step(metrics(0))
        display.rl_step(metrics(1, unfinished_share=0.5, explained_variance=0.25, equal_groups=0.75))
        display.rl_step(metrics(2, equal_groups=1.0, untrained_steps=1))
    *steps, untrained = lines()
    assert "groups without signal 100%  nothing trained: equal rewards  k3" in untrained
    assert steps == [
        "step 0 (1/9)  reward 0.50  length 8 (max 12)  rank skew 1.25 -> 1.01  loss 0.12  entropy 2.00  k3 1.5e-14  "
        "1,200 tokens/s  0.8 s  left 6 s",
        "step 1 (2/9)  reward 0.50  length 8 (max 12)  unfinished 50%  rank skew 1.25 -> 1.01  loss 0.12  "
        "entropy 2.00  groups without signal 75%  k3 1.5e-14  explained 0.25  1,200 tokens/s  0.8 s  left 5 s",
    ]


def test_what_is_not_known_is_a_dash_or_left_out(plain):
    make, lines = plain
    with make() as display:
        display.rl_step(
            metrics(
                0,
                reward=None,
                response_length=None,
                response_length_max=None,
                rank_skew=None,
                k3_kl=None,
                loss=None,
                entropy=None,
            )
        )
        display.rl_step(metrics(1, planned_skew=None, evaluation={"reward": 0.75}))
    first, second = lines()
    assert first == "step 0 (1/9)  reward -  length -  entropy -  k3 -  1,200 tokens/s  0.8 s  left 6 s"
    assert "rank skew 1.25  loss" in second
    assert "evaluation 0.75" in second


def test_kernels_are_told_when_they_are_compiled_and_only_then(plain):
    make, lines = plain
    kernel = njit(lambda number: number + 1)
    with make() as display:
        for _ in range(2):
            with display.compiling():
                kernel(1)
    assert lines() == ["compiling kernels, which are cached for later runs"]


def test_a_warm_up_is_told_now_and_then_and_at_its_end(plain):
    make, lines = plain
    steps = LINE_EVERY_WARMUP_STEPS + 3
    with make(warmup_steps=steps) as display:
        for step in range(steps):
            display.warmup_step(step, 1.5)
    assert lines() == [f"warm-up {step}/{steps}  loss 1.500" for step in (1, LINE_EVERY_WARMUP_STEPS + 1, steps)]


def test_lines_around_a_step_say_where_a_run_is(plain):
    make, lines = plain
    with make(warmup_steps=3) as display:
        display.baseline({"reward": 0.125, "response_length": 40.4})
        display.resumed(4)
        display.rl_step(metrics(4, alarms=["k3_kl is 0.2, harmless is 0 to 0.1: the sampler is another policy"]))
        display.resumed(9)
    baseline, *others, done = lines()
    assert baseline == "before step 0  evaluation 0.12  length 40"
    assert [line.partition("  ")[0] for line in others] == [
        "resuming from the checkpoint after 4 steps, with step 4",
        "step 4 (5/9)",
        "step 4: k3_kl is 0.2, harmless is 0 to 0.1: the sampler is another policy",
    ]
    assert "all are done" in done


def test_the_first_prompt_is_shown_with_its_special_tokens(plain):
    make, lines = plain
    with make() as display:
        display.first_prompt("rows.jsonl, line 3", 5, "<|user|>\n[bold]\x1b[31m 17 + 25?<|end|>")
        display.first_prompt("", 1, "x" * 9_000, ["level", "a\nb"])
    head, *text, second, long, columns = lines()
    assert columns.endswith(r": 'level', 'a\nb'")
    assert head.endswith("(rows.jsonl, line 3, 5 tokens):")
    assert text == ["<|user|>", r"[bold]\x1b[31m 17 + 25?<|end|>"]
    assert second.endswith("(1 token):")
    assert 1000 < len(long) < 3000


def test_ranks_that_are_not_asked_say_nothing(plain):
    make, lines = plain
    with make(enabled=False, warmup_steps=1) as display:
        display.warmup_step(0, 1.0)
        display.rl_step(metrics(0, alarms=["something"]))
        display.stopping()
    assert lines() == []


def shown(rows, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(metrics_table(rows, wide=width >= 100))
    return console.file.getvalue()


def test_table_shows_the_latest_step_with_curves_if_room_is_left():
    rows = [metrics(step, reward=0.1 * step) for step in range(5)]
    wide, narrow = shown(rows, 140), shown(rows, 70)
    assert "reward" in wide
    assert "0.400" in wide
    assert "▁▃▅▆█" in wide
    assert "▁" not in narrow
    assert "rollout 67%  update 33%" in wide
    assert "explained" not in wide, "a column without a number is left out"


def test_the_table_leaves_gaps_where_a_step_has_no_number():
    rows = [
        metrics(0, reward=None, explained_variance=None, evaluation={"reward": 0.5}),
        metrics(1, reward=0.25, explained_variance=0.1),
        metrics(2, reward=None, explained_variance=None),
    ]
    table = shown(rows, 140)
    assert "evaluation" in table
    assert "0.500" in table
    assert "0.250" not in table, "the latest step has no reward"


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([None, None], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, None, 1.0, 0.5], "▁ █▅")],
)
def test_curves(values, drawn):
    assert curve(values) == drawn
