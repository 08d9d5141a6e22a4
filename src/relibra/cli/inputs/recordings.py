"""`find_recording`: find a trace, given the settings or the folder of a run, or the trace itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from relibra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """Recorded routes.

    trace     where they are
    label     for messages, such as "step 3 of run demo"; empty where the source is a trace
    prompts_once   responses that are trained together feed their prompt once; None: as in the run
    """

    trace: Path
    label: str = ""
    prompts_once: bool | None = None

    @property
    def run(self) -> Path | None:
        """Folder of the run that recorded the trace; None: no run."""
        folder = self.trace.absolute().parent
        return folder.parent if folder.name == "traces" else None

    @property
    def micro_batch_tokens(self) -> int | None:
        """Most tokens per rank in a micro-batch of the run that recorded the trace; None: no run, or not known."""
        return self._number("update", "micro_batch_tokens", 1, 1 << 40)

    @property
    def mini_batches(self) -> int | None:
        """Mini-batches of a step of the run that recorded the trace; None: no run, or not known."""
        return self._number("update", "mini_batches", 1, 1 << 20)

    @property
    def seed(self) -> int:
        """Seed of the run; 0 where it is not known."""
        return self._number("run", "seed", 0, 1 << 63) or 0

    @property
    def keeps_groups(self) -> bool:
        """Whether the run keeps the responses to a prompt in one mini-batch."""
        of_group = ("grpo", "dapo", "gspo")
        return self._setting("algorithm", "preset") in of_group or self._setting("algorithm", "advantage") == "group"

    @property
    def shares_prompts(self) -> bool:
        """Whether responses of the run that are trained together feed their prompt once."""
        return self._setting("update", "shared_prompts") is True if self.prompts_once is None else self.prompts_once

    @property
    def filters_groups(self) -> bool:
        """Whether the run may leave recorded responses out of its update, by their rewards."""
        return self._setting("algorithm", "group_filter") not in (None, "off")

    def _number(self, section: str, name: str, least: int, most: int) -> int | None:
        number = self._setting(section, name)
        return number if type(number) is int and least <= number <= most else None

    def _setting(self, section: str, name: str) -> object:
        """Return a setting of the run that recorded the trace; None: no run, or not known."""
        try:
            return self._config[section][name]
        except (KeyError, TypeError):
            return None

    @cached_property
    def _config(self) -> Any:
        """What config.json of the run holds; None: no run, or not known."""
        try:
            return None if self.run is None else json.loads((self.run / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return None


def find_recording(source: Path) -> RecordedStep:
    """Return the last recorded step of a run; any other path is a trace.

    source    settings of the run (of its folders NAME, NAME-2, ... the highest-numbered one that has recorded routes),
              its folder, or a trace
    raises    ConfigError when a run has recorded nothing
    """
    if source.suffix == ".toml":
        from relibra.rl.config.run_config import load_config
        from relibra.rl.run.run_folder import folders_of_run

        run = load_config(source).run
        recorded = [folder for folder in folders_of_run(run.folder, run.name) if _steps(folder)]
        if not recorded:
            raise ConfigError(
                f"{source}: the run has no recorded routes in {run.folder / run.name / 'traces'}: train first (relibra "
                f"train {source}), or name a trace"
            )
        return _last_step(recorded[-1])
    if (source / "traces").is_dir() or (source / "config.json").is_file():
        if not _steps(source):
            raise ConfigError(f"{source} is the folder of a run without recorded routes: it has no traces/step-*")
        return _last_step(source)
    return RecordedStep(trace=source)


def _steps(run: Path) -> list[Path]:
    """Return the traces of finished steps, in order."""
    from relibra.routing.trace_files import INDEX

    return sorted(path.parent for path in (run / "traces").glob(f"step-*/{INDEX}"))


def _last_step(run: Path) -> RecordedStep:
    last = _steps(run)[-1]
    return RecordedStep(trace=last, label=f"step {int(last.name.removeprefix('step-'))} of run {run.resolve().name}")
