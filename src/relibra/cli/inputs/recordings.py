"""`find_recording`: find the trace of a run, given its settings or its folder, or of a path."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from relibra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Recorded routes.

    trace     where they are
    words     for messages, such as "step 3 of run demo"; empty where the source is a trace
    """

    trace: Path
    words: str = ""

    @property
    def micro_batch_tokens(self) -> int | None:
        """Most tokens per rank in a micro-batch of the run that recorded the trace; None: no run, or not known."""
        if self.trace.absolute().parent.name != "traces":
            return None
        try:
            tokens = json.loads((self.trace.absolute().parent.parent / "config.json").read_bytes())["update"][
                "micro_batch_tokens"
            ]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return tokens if type(tokens) is int and 1 <= tokens <= 1 << 40 else None


def find_recording(source: Path) -> Recording:
    """Return the last recorded step of a run, given its settings or folder; any other path is a trace.

    raises    ConfigError when a run has recorded nothing
    """
    if source.suffix == ".toml":
        from relibra.rl.config.run_config import load_config

        run = load_config(source).run
        folders = [run.folder / run.name, *sorted(run.folder.glob(f"{run.name}-*"), key=lambda path: path.name)]
        recorded = [folder for folder in folders if _steps(folder)]
        if not recorded:
            raise ConfigError(
                f"{source}: the run has no recorded routes in {folders[0] / 'traces'}: train first (relibra train "
                f"{source}), or name a trace"
            )
        return _last_step(recorded[-1])
    if (source / "traces").is_dir() or (source / "config.json").is_file():
        if not _steps(source):
            raise ConfigError(f"{source} is the folder of a run without recorded routes: it has no traces/step-*")
        return _last_step(source)
    return Recording(trace=source)


def _steps(run: Path) -> list[Path]:
    """Return the traces of finished steps, in order."""
    from relibra.routing.trace_files import INDEX

    return sorted(path.parent for path in (run / "traces").glob(f"step-*/{INDEX}"))


def _last_step(run: Path) -> Recording:
    last = _steps(run)[-1]
    return Recording(trace=last, words=f"step {int(last.name.removeprefix('step-'))} of run {run.resolve().name}")
