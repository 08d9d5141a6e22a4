"""What a person sees while a run goes on: bars on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

LINE_EVERY_WARMUP_STEPS = 40
NARROW = 110
"""Terminals of fewer columns see no bar and a shorter note, but always the step and the time left."""


class TrainingProgress:
    """Shows warm-up and RL steps; only rank 0 has one that is `enabled`."""

    def __init__(self, *, warmup_steps: int, rl_steps: int, enabled: bool) -> None:
        """Prepare the display; nothing is drawn before the `with` block."""
        self.console = Console(stderr=True, quiet=not enabled)
        self._totals = {"warm-up": warmup_steps, "RL": rl_steps}
        self._narrow = self.console.width < NARROW
        columns: list[ProgressColumn] = [
            TextColumn("[bold]{task.description:>8}", table_column=_fixed()),
            BarColumn(bar_width=24),
            MofNCompleteColumn(table_column=_fixed()),
            TimeRemainingColumn(compact=True, table_column=_fixed()),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
        ]
        if self._narrow:
            del columns[1]
        self._bars = Progress(
            *columns,
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TrainingProgress:
        """Start drawing."""
        self._bars.start()
        self._tasks = {
            name: self._bars.add_task(name, total=total, note="", start=False)
            for name, total in self._totals.items()
            if total
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing."""
        self._bars.stop()

    def warmup_step(self, step: int, loss: float) -> None:
        """Show a finished warm-up step."""
        self._advance("warm-up", f"loss {loss:.3f}")
        last = step + 1 == self._totals["warm-up"]
        if not self.console.is_terminal and (step % LINE_EVERY_WARMUP_STEPS == 0 or last):
            self.console.print(f"warm-up {step + 1}/{self._totals['warm-up']}  loss {loss:.3f}", highlight=False)

    def rl_step(self, metrics: dict[str, Any]) -> None:
        """Show a finished RL step."""
        note = (
            f"reward {metrics['reward']:.2f}  length {metrics['response_length']:.0f}"
            f" (max {metrics['response_length_max']})  rank skew {metrics['rank_skew']:.2f}  k3 {metrics['k3_kl']:.1e}"
        )
        short = f"reward {metrics['reward']:.2f}  length {metrics['response_length']:.0f}"
        self._advance("RL", f"{short}  rank skew {metrics['rank_skew']:.2f}" if self._narrow else note)
        if not self.console.is_terminal:
            seconds = sum(metrics["seconds"].values())
            line = f"step {metrics['step'] + 1}/{self._totals['RL']}  {note}  {seconds:.1f} s"
            self.console.print(line, highlight=False, soft_wrap=True)

    def stopping(self) -> None:
        """Say above the bars, which would overwrite what others print, that Ctrl-C was heard."""
        if self.console.is_terminal:
            text = "stopping after this step; press Ctrl-C again to stop at once"
            self.console.print(text, highlight=False, soft_wrap=True)

    def _advance(self, name: str, note: str) -> None:
        task = self._tasks[name]
        self._bars.start_task(task)
        self._bars.update(task, advance=1, note=note)


def _fixed() -> Column:
    """Return a column that never shrinks."""
    return Column(no_wrap=True, overflow="ignore")
