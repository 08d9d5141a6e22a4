"""`Recording`: the files of a run folder or a trace that a report reads.

A path is a run folder (`config.json`, `metrics.jsonl`, `traces/step-00000/`, ...) or a single trace. Only names and
small files are read here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relibra.errors import TraceError
from relibra.reporting.data.metrics import Metrics, read_metrics
from relibra.routing.trace_files import INDEX

_STEP_FOLDER = re.compile("step-([0-9]{1,15})")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Traces in order of their step, with the configuration and metrics of the run.

    path         as the user gave it
    traces       (RL step, trace path); a trace outside a run has step None; () for a run of a dense model
    unfinished   step folders whose writer was stopped before the end; they are left out
    config       the resolved configuration of the run, {} without one
    num_experts  for traces that lack it; None: see their reader
    """

    path: Path
    traces: tuple[tuple[int | None, Path], ...]
    unfinished: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    num_experts: int | None = None

    @property
    def name(self) -> str:
        """The name of the run, or of the file or folder."""
        name = self.setting("run", "name")
        return name if isinstance(name, str) and name.strip() else self.path.resolve().name

    @property
    def is_run(self) -> bool:
        """Whether the path is a run folder, not a single trace."""
        return not self.traces or self.traces[0][0] is not None

    @property
    def num_ranks(self) -> int | None:
        """Expert-parallel ranks the run used, None when unknown."""
        return self._count("parallel", "ranks")

    @property
    def micro_batch_tokens(self) -> int | None:
        """Tokens of a micro-batch of all ranks together, None when unknown."""
        per_rank, ranks = self._count("update", "micro_batch_tokens"), self.num_ranks
        return per_rank * ranks if per_rank and ranks else None

    def setting(self, *keys: str) -> object:
        """Return a nested setting, None when any key on the way is missing."""
        value: object = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def _count(self, *keys: str) -> int | None:
        value = self.setting(*keys)
        return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 1 << 31 else None


def open_recording(path: Path | str, num_experts: int | None = None) -> Recording:
    """Find the traces of a run folder, or take the path as a single trace.

    num_experts   experts per layer, for an `.npz` or `.npy` of choices, which does not say; None: see the reader
    raises        TraceError without a finished trace or step, and where the path is no run folder and no trace
    """
    path = Path(path)
    if not path.is_dir() or (path / INDEX).is_file():
        if not path.exists():
            raise TraceError(
                f"{path} does not exist: name a run folder, a trace folder, or an .npz or .npy of expert choices"
            )
        return Recording(path=path, traces=((None, path),), num_experts=num_experts)
    if not any((path / name).exists() for name in ("traces", "metrics.jsonl", "config.json")):
        raise TraceError(
            f"{path} is neither a run folder (it has no traces/, metrics.jsonl or config.json) nor a trace "
            f"(it has no {INDEX}): name the folder that `relibra train` wrote, or one trace"
        )
    folders = _step_folders(path / "traces")
    finished = tuple((step, folder) for step, folder in folders if (folder / INDEX).is_file())
    metrics = read_metrics(path / "metrics.jsonl")
    if not finished and not metrics.rows:
        raise TraceError(
            f"run {path} has no finished trace under traces/ ({len(folders)} unfinished) and no finished step: let it "
            "complete one step, then ask again"
        )
    return Recording(
        path=path,
        traces=finished,
        unfinished=len(folders) - len(finished),
        config=_read_config(path / "config.json"),
        metrics=metrics,
        num_experts=num_experts,
    )


def _step_folders(traces: Path) -> list[tuple[int, Path]]:
    if not traces.is_dir():
        return []
    found = [(_STEP_FOLDER.fullmatch(folder.name), folder) for folder in traces.iterdir() if folder.is_dir()]
    return sorted((int(match[1]), folder) for match, folder in found if match)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, JSON nested without end
        raise TraceError(f"{path} is damaged ({error}): restore it, or remove it to report without it") from error
    return config if isinstance(config, dict) else {}
