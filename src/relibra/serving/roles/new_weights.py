"""`NewWeights`: other weights of the same model for a worker that runs, read first and used later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relibra.errors import ConfigError, EngineError, RelibraError, in_a_line
from relibra.serving.roles.attention_worker import AttentionWorker
from relibra.serving.roles.checkpoint import load_attention, load_experts, open_checkpoint, read_structure
from relibra.serving.roles.expert_worker import ExpertWorker


class NewWeights:
    """Weights that a worker has read and does not use yet: it has room for both."""

    def __init__(self, worker: AttentionWorker | ExpertWorker, dtype: str, experts: Sequence[int] = ()) -> None:
        """Begin with none.

        experts   of an expert worker
        """
        self._worker, self._dtype, self._experts = worker, dtype, experts
        self._read: list[nn.Module] = []

    def change(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Read the folder of `read`, or use what was read; an empty `use` drops it. Return the answer."""
        if "use" in frame:
            if frame["use"]:
                self._use()
            self._read = []
            return {"used": frame["use"]}
        try:
            self._read = self._load(Path(frame["read"]))
        except Exception as error:  # noqa: BLE001 - a file of others: its error is the answer
            return {"failed": str(error) if isinstance(error, RelibraError) else in_a_line(error)}
        return {"read": frame["read"]}

    def _load(self, folder: Path) -> list[nn.Module]:
        structure, tensors = read_structure(folder, self._dtype), open_checkpoint(folder)
        if isinstance(self._worker, ExpertWorker):
            read = load_experts(structure, tensors, self._experts)
        else:
            read = [load_attention(structure, tensors)]
        if len(read) != len(self._present):
            raise ConfigError(f"{folder} holds {len(read)} layers of experts: this server has {len(self._present)}")
        for new, old in zip(read, self._present, strict=True):
            check_same_shapes(new, old, folder)
        return read

    @property
    def _present(self) -> Sequence[nn.Module]:
        return self._worker.layers if isinstance(self._worker, ExpertWorker) else [self._worker.model]

    def _use(self) -> None:
        if len(self._read) != len(self._present):
            raise EngineError("no weights have been read that could be used")
        with torch.inference_mode(False):
            for new, old in zip(self._read, self._present, strict=True):
                old.load_state_dict(new.state_dict(), assign=True)


def check_same_shapes(new: nn.Module, old: nn.Module, folder: Path) -> None:
    """Raise ConfigError where the parameters of two modules differ in names, shapes or types."""
    shapes = [{name: (tuple(one.shape), one.dtype) for name, one in of.state_dict().items()} for of in (new, old)]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        if shapes[0].get(name) != shapes[1].get(name):
            raise ConfigError(
                f"{folder} is of another model: {name} is {shapes[0].get(name)}, here {shapes[1].get(name)}"
            )
