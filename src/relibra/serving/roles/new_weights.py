"""`NewWeights`: other weights of the same model for a worker that runs, read first and used later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relibra.errors import ConfigError, EngineError, RelibraError, in_a_line


class NewWeights:
    """Weights that a worker has read and does not use yet: it has room for both."""

    def __init__(self, present: Sequence[nn.Module], load: Callable[[Path], Sequence[nn.Module]]) -> None:
        """Begin with none.

        present   modules of the worker
        load      reads the same modules from another folder
        """
        self._present, self._load = present, load
        self._read: Sequence[nn.Module] = ()

    def change(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Read the folder of `read`, or use what was read; an empty `use` drops it. Return the answer."""
        if "use" in frame:
            if frame["use"]:
                self._use()
            self._read = ()
            return {"used": frame["use"]}
        try:
            read = self._load(Path(frame["read"]))
            check_same_shapes(read, self._present, frame["read"])
        except Exception as error:  # noqa: BLE001 - a file of others: its error is the answer
            return {"failed": str(error) if isinstance(error, RelibraError) else in_a_line(error)}
        self._read = read
        return {"read": frame["read"]}

    def _use(self) -> None:
        if len(self._read) != len(self._present):
            raise EngineError("no weights have been read that could be used")
        with torch.inference_mode(False):
            for new, old in zip(self._read, self._present, strict=True):
                old.load_state_dict(new.state_dict(), assign=True)


def check_same_shapes(new: Sequence[nn.Module], old: Sequence[nn.Module], folder: str) -> None:
    """Raise ConfigError where the modules differ in number, or their parameters in names, shapes or types."""
    if len(new) != len(old):
        raise ConfigError(f"{folder} holds {len(new)} layers of experts: this server has {len(old)}")
    for modules in zip(new, old, strict=True):
        shapes = [{name: (tuple(one.shape), one.dtype) for name, one in of.state_dict().items()} for of in modules]
        for name in sorted(shapes[0].keys() | shapes[1].keys()):
            found, known = (of.get(name) for of in shapes)
            if found != known:
                raise ConfigError(f"{folder} is of another model: {name} is {found}, here {known}")
