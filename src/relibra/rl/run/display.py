"""Progress of a run on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from relibra.planning.analysis.explanation import SlotMemory
from relibra.printable import cut_middle, plural, printable, printable_lines
from relibra.routing.compiled import watch_compilation

LINE_EVERY_WARMUP_STEPS = 40
NARROW = 100
"""Columns of a terminal below which the table has no curves."""
CURVE_STEPS = 40
LONGEST_PROMPT = 2000
"""Characters of the first prompt that are shown."""
RECENT_STEPS = 8
"""Steps whose speed tells the time that is left."""
_BLOCKS = "▁▂▃▄▅▆▇█"


class TrainingDisplay:
    """Shows warm-up and RL steps; only that of rank 0 is `enabled`."""

    def __init__(self, *, warmup_steps: int, rl_steps: int, enabled: bool) -> None:
        self.console = Console(stderr=True, quiet=not enabled)
        self._totals = {"warm-up": warmup_steps, "RL": rl_steps}
        self._bars = Progress(
            TextColumn("[bold]{task.description:>8}", table_column=_fixed()),
            BarColumn(bar_width=24),
            MofNCompleteColumn(table_column=_fixed()),
            TimeRemainingColumn(compact=True, table_column=_fixed()),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._live = Live(console=self.console, auto_refresh=True, refresh_per_second=4, transient=False)
        self._tasks: dict[str, TaskID] = {}
        self._rows: deque[dict[str, Any]] = deque(maxlen=CURVE_STEPS)

    def __enter__(self) -> TrainingDisplay:
        self._tasks = {
            name: self._bars.add_task(name, total=total, note="", start=False)
            for name, total in self._totals.items()
            if total
        }
        if self.console.is_terminal:
            self._live.update(self._bars)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def resumed(self, step: int) -> None:
        """Show that a run resumes after `step` finished steps."""
        done = step >= self._totals["RL"]
        what = "all are done: the policy is written again; raise run.steps to go on" if done else f"with step {step}"
        self._print(f"resuming from the checkpoint after {step} steps, {what}")
        completed = {**self._totals, "RL": step}
        for name, task in self._tasks.items():
            self._bars.update(task, completed=completed[name])

    def first_prompt(self, origin: str, num_tokens: int, text: str, other_columns: Sequence[str] = ()) -> None:
        """Show a prompt as the model gets it, special tokens included, and which columns do not change prompts.

        origin   file and line; empty for a built-in task
        """
        where = f"{origin}, " if origin else ""
        self._print(f"the first prompt, as the model gets it ({where}{plural(num_tokens, 'token')}):")
        self._print(printable_lines(cut_middle(text, LONGEST_PROMPT)), style="cyan")
        if other_columns:
            names = cut_middle(", ".join(map(repr, other_columns)), LONGEST_PROMPT)
            self._print(printable(f"columns that no setting reads, and only a reward function of yours sees: {names}"))

    def baseline(self, evaluation: Mapping[str, float]) -> None:
        """Show the evaluation before the first RL step."""
        reward, length = evaluation["reward"], evaluation["response_length"]
        self._print(f"before step 0  evaluation {reward:.2f}  length {length:.0f}")

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Show the kernels that are compiled in this context; they are cached for later runs."""
        names = list[str]()
        bar = self._bars.add_task("kernels", total=None, note="", visible=False)

        def begin(name: str) -> None:
            if not names:
                self._print("compiling kernels, which are cached for later runs")
            names.append(name)
            self._bars.update(bar, completed=len(names), note=name, visible=True)

        try:
            with watch_compilation(begin):
                yield
        finally:
            self._bars.remove_task(bar)

    def warmup_step(self, step: int, loss: float) -> None:
        """Show a finished warm-up step."""
        self._advance("warm-up", f"loss {loss:.3f}")
        last = step + 1 == self._totals["warm-up"]
        if not self.console.is_terminal and (step % LINE_EVERY_WARMUP_STEPS == 0 or last):
            self._print(f"warm-up {step + 1}/{self._totals['warm-up']}  loss {loss:.3f}")

    def rl_step(self, metrics: dict[str, Any]) -> None:
        """Show a finished RL step."""
        self._rows.append(metrics)
        seconds_of_steps = [sum(row["seconds"].values()) for row in self._rows]
        seconds, usual = seconds_of_steps[-1], statistics.median(seconds_of_steps[-RECENT_STEPS:])
        left = (self._totals["RL"] - metrics["step"] - 1) * usual
        self._advance("RL", f"{seconds:.1f} s per step")
        if self.console.is_terminal:
            self._live.update(Group(self._bars, metrics_table(self._rows, wide=self.console.width >= NARROW)))
        else:
            done = f"step {metrics['step']} ({metrics['step'] + 1}/{self._totals['RL']})"
            self._print(f"{done}  {_note(metrics)}  {seconds:.1f} s" + (f"  left {_long(left)}" if left else ""))
            if metrics.get("expected_seconds") is not None:
                self._print(f"plan  {describe_plan(metrics)}")
        for sentence in metrics["alarms"]:
            self._print(printable(f"step {metrics['step']}: {sentence}"), style="yellow")

    def memory(self, compared: str | None) -> None:
        """Show estimated and measured memory, if there is an estimate."""
        if compared:
            self._print(compared)

    def stopping(self) -> None:
        """Confirm Ctrl-C above the table, which would overwrite lines printed by others."""
        if self.console.is_terminal:
            self._print("stopping after this step; press Ctrl-C again to stop at once")

    def _print(self, text: str, style: str | None = None) -> None:
        """Print a line as it is, however wide the terminal."""
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _advance(self, name: str, note: str) -> None:
        task = self._tasks[name]
        self._bars.start_task(task)
        self._bars.update(task, advance=1, note=note)


def curve(values: Sequence[float | None]) -> str:
    """Return a sparkline: the smallest number is the lowest block, None a gap.

    >>> curve([0.0, None, 1.0, 0.5])
    '▁ █▅'
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(" " if v is None else _BLOCKS[int((v - low) / span * top + 0.5)] for v in values)


def _note(metrics: dict[str, Any]) -> str:
    """Return the metrics of a step as one line."""
    longest, skew, planned = metrics["response_length_max"], metrics["rank_skew"], metrics.get("planned_skew")
    loss, explained = metrics["loss"], metrics["explained_variance"]
    parts = [
        _part("reward", metrics["reward"], "{:.2f}"),
        _part("length", metrics["response_length"], "{:.0f}") + ("" if longest is None else f" (max {longest})"),
        metrics["unfinished_share"] and f"unfinished {metrics['unfinished_share']:.0%}",
        skew is not None and f"rank skew {skew:.2f}" + ("" if planned is None else f" -> {planned:.2f}"),
        loss is not None and f"loss {loss:.2g}",
        _part("entropy", metrics["entropy"], "{:.2f}"),
        metrics["equal_groups"] and f"groups without signal {metrics['equal_groups']:.0%}",
        metrics.get("untrained_steps") and "nothing trained" + ": equal rewards" * (metrics["equal_groups"] == 1),
        _part("k3", metrics["k3_kl"], "{:.1e}"),
        explained is not None and f"explained {explained:.2f}",
        metrics["evaluation"] and f"evaluation {metrics['evaluation']['reward']:.2f}",
        f"{tokens_per_second(metrics):,.0f} tokens/s",
    ]
    return "  ".join(part for part in parts if part)


def tokens_per_second(metrics: dict[str, Any]) -> float:
    """Return the tokens of prompts and responses that a second of a step worked on, over all ranks."""
    return float(metrics["tokens"] / max(sum(metrics["seconds"].values()), 1e-9))


def _long(seconds: float) -> str:
    """Return a long duration in its two largest units.

    >>> _long(59.4), _long(3599.0), _long(90061.0)
    ('59 s', '60 min', '1 d 1 h')
    """
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes <= 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def describe_plan(metrics: dict[str, Any]) -> str:
    """Return what the plan of a step expects, and what was measured, as one line."""
    seconds = metrics["seconds"]
    measured = "  ".join(f"{stage} {seconds[stage]:.2f} s" for stage in ("recompute", "update") if stage in seconds)
    moving = f" in {_duration(metrics['expected_moving_seconds'])}" if metrics["moved_experts"] else ""
    slots = "" if metrics["slots"] is None else f"; slots {SlotMemory(**metrics['slots'])}"
    return (
        f"MoE layers {_duration(metrics['expected_seconds'])}, static "
        f"{_duration(metrics['expected_static_seconds'])} expected; {metrics['pushes']} pushes, "
        f"{metrics['moved_experts']} experts moved{moving}{slots}; measured, whole stages: {measured}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _part(name: str, value: float | None, form: str) -> str:
    return f"{name} " + ("-" if value is None else form.format(value))


_SHOWN = (
    ("reward", "reward", "{:.3f}"),
    ("response length", "response_length", "{:.1f}"),
    ("unfinished", "unfinished_share", "{:.1%}"),
    ("idle slots in rollout", "idle_share", "{:.1%}"),
    ("k3, trainer to sampler", "k3_kl", "{:.1e}"),
    ("loss", "loss", "{:.3g}"),
    ("entropy", "entropy", "{:.3f}"),
    ("groups without signal", "equal_groups", "{:.0%}"),
    ("clipped", "clip_fraction", "{:.2%}"),
    ("explained variance", "explained_variance", "{:.2f}"),
    ("rank skew, static", "rank_skew", "{:.3f}"),
    ("rank skew, planned", "planned_skew", "{:.3f}"),
    ("MoE layers, static, expected s", "expected_static_seconds", "{:.3g}"),
    ("MoE layers, planned, expected s", "expected_seconds", "{:.3g}"),
)


def metrics_table(rows: Sequence[dict[str, Any]], *, wide: bool) -> Table:
    """Return the metrics of the last row as a table; `wide`: with sparklines of all rows."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    last = rows[-1]
    for label, name, form in _SHOWN:
        values = [row.get(name) for row in rows]
        if all(value is None for value in values):
            continue
        shown = "-" if last[name] is None else form.format(last[name])
        table.add_row(label, Text(shown, justify="right"), *([Text(curve(values), style="cyan")] if wide else []))
    evaluations = [row["evaluation"]["reward"] for row in rows if row.get("evaluation")]
    if evaluations:
        table.add_row("evaluation", Text(f"{evaluations[-1]:.3f}", justify="right"))
    table.add_row("tokens per second", Text(f"{tokens_per_second(last):,.0f}", justify="right"))
    total = sum(last["seconds"].values())
    stages = "  ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in last["seconds"].items() if seconds > total / 200
    )
    table.add_row("seconds", Text(f"{total:.2f}", justify="right"), *([stages] if wide else []))
    return table


def _fixed() -> Column:
    return Column(no_wrap=True, overflow="ignore")
