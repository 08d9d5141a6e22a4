"""Waits of the host for a device, found on a CPU: a mode follows what would be on the device, and notes what reads it.

On the device are parameters, what is uploaded, and results of operations on those. A download is on the host after
`wait_for_copies`; to read it before would be too early.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from relibra.rl.batch import token_batch
from relibra.rl.update import credit, recompute
from tests.gpu.steps_in_threads import reads_back


class DeviceWaits(TorchDispatchMode):
    """Counts reads of the device inside, by the function of relibra that reads."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.arriving: dict[int, StorageWeakRef] = {}
        self._there: dict[int, StorageWeakRef] = {}
        self.put(*(tensor for model in models for tensor in (*model.parameters(), *model.buffers())))

    def put(self, *tensors: Tensor) -> None:
        """Say that tensors are on the device."""
        for tensor in tensors:
            reference = _storage(tensor)
            self._there[reference.cdata] = reference

    def __enter__(self) -> DeviceWaits:
        _ACTIVE.waits = self
        self._calls = _Calls()
        self._calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._calls.__exit__(*error)

    def note(self) -> None:
        """Count a wait; on a CPU alone the executor looks at choices."""
        if (caller := _caller()) != "check_choices":
            self.found[caller] += 1

    def holds(self, *tensors: Tensor) -> bool:
        """Return whether one of the tensors is on the device."""
        return not {_storage(one).cdata for one in tensors}.isdisjoint(self._there)

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        there, arriving = self.holds(*tensors), {_storage(one).cdata for one in tensors} & self.arriving.keys()
        if arriving or (there and reads_back(function, args)):
            self.note()
        found = function(*args, **(kwargs or {}))
        if there:
            self.put(*(one for one in tree_leaves(found) if isinstance(one, Tensor)))
            if function._schema.is_mutable:
                self.put(*tensors)
        return found


class _Calls(TorchFunctionMode):
    """Counts what is no operation on a CPU: copies to the host, and from pageable memory to the device."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, kwargs = _ACTIVE.waits, kwargs or {}
        name, of_tensor = getattr(function, "__name__", ""), bool(args) and isinstance(args[0], Tensor)
        places = [one for one in (*args[1:], kwargs.get("device")) if isinstance(one, torch.device | str)]
        if name in ("tolist", "cpu", "numpy", "__array__") and of_tensor:
            waited = waits.holds(args[0])
        elif name == "to" and places:
            waited = (not waits.holds(args[0]) or "cpu" in places) and not kwargs.get("non_blocking")
        else:
            waited = name in ("tensor", "as_tensor") and bool(places)
        if waited:
            waits.note()
        return function(*args, **kwargs)


def _storage(tensor: Tensor) -> StorageWeakRef:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return StorageWeakRef(local.untyped_storage())


def _caller() -> str:
    """Return the innermost function of relibra under way."""
    frame, name = sys._getframe(1), "elsewhere"
    while frame is not None and "/src/relibra/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return name if frame is None else frame.f_code.co_name


def _upload(tensors: Any, _device: torch.device) -> list[Tensor]:
    with _disable_current_modes():
        copies = [one.clone() for one in tensors]
    _ACTIVE.waits.put(*copies)
    return copies


def _download(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        copy = tensor.detach().clone()
    _ACTIVE.waits.arriving[_storage(copy).cdata] = _storage(copy)
    return copy


def _wait_for_copies(_device: torch.device) -> None:
    _ACTIVE.waits.found["wait_for_copies"] += 1
    _ACTIVE.waits.arriving.clear()


_ACTIVE = threading.local()


def follow_copies(monkeypatch: Any) -> None:
    """Let the copies of the trainer tell the mode of their thread what they move."""
    monkeypatch.setattr(token_batch, "upload_together", _upload)
    for user in (recompute, credit):
        monkeypatch.setattr(user, "download", _download)
        monkeypatch.setattr(user, "wait_for_copies", _wait_for_copies)
