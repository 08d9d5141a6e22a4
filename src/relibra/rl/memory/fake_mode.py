"""`FakeDeviceMode`: runs operations of the host as they are, and those of the device "gpu" on shapes.

Small integers and masks that come from the host are computed there too (`known` of a fake tensor), so that masks and
lengths have their real sizes. What only the device would know is guessed: 1, True, or all.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from relibra.rl.memory.estimate import LAYERS
from relibra.rl.memory.fake_device import DEVICE, replace_in, tell_waits
from relibra.rl.memory.ledger import Ledger

_MOST_KNOWN = 1 << 22
"""Numbers of a tensor whose values are computed on the host too."""
_LEAST_HOST_BYTES = 1 << 20
"""Smaller tensors of the host are not counted."""
_MOST_WRITTEN = 1 << 26
"""Larger tensors of the host keep the values that memory happens to have."""
_MOST_FRAMES = 90
_PACKAGE = f"{Path(__file__).parents[2]}/"
_SAME_MEMORY = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""Operations whose result is their argument; on shapes torch makes another tensor."""
_NOT_OURS = ("/torch/", "/rl/memory/", "/jaxtyping/", "/contextlib.py")


class Wait(NamedTuple):
    """A wait of the host for the device, or an upload that it waits for.

    phase, kind   of the run, and what the host asked for
    line          function of ours that asked
    inside        between the first and the last decoder layer, or in a backward pass
    """

    phase: str
    kind: str
    line: str
    inside: bool


class FakeDeviceMode(TorchDispatchMode):
    """Counts storages, waits and copies of what runs inside.

    vocabulary   size of the last axis of logits
    guess        returns the values of a tensor whose list is asked for (`tolist`); None: ones
    device       storages of the device
    host         storages of the host, page-locked ones rounded up
    waits        how often the host waits, in the order in which it first does
    mixed        operations on tensors of two devices, and their lines
    traffic      bytes that are copied, as "update to host"
    """

    def __init__(self, vocabulary: int, guess: Callable[[Tensor], Any] = lambda _: None) -> None:
        """Begin with the phase "load"."""
        super().__init__()
        self.device, self.host = Ledger(), Ledger()
        self.waits, self.traffic = Counter[Wait](), Counter[str]()
        self.mixed: list[str] = []
        self.phase, self._in_layers = "load", False
        self._vocabulary, self.guess = vocabulary, guess
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: set[int] = set()
        self._lifted: list[bool] = []
        self.begin("load")
        tell_waits(self.note)
        _pass_to(self)

    def begin(self, phase: str) -> None:
        """Count what follows to a phase."""
        self.phase = phase
        for ledger in (self.device, self.host):
            ledger.begin(phase)

    def begin_layers(self) -> None:
        """Count further storages to the phase `LAYERS`; waits and copies stay in the present one."""
        for ledger in (self.device, self.host):
            ledger.begin(LAYERS)

    def watch_layers(self, layers: Sequence[nn.Module]) -> None:
        """Count apart the waits between the first and the last of these layers, and the peaks inside these two."""
        # A backward pass frees inputs and makes gradients, so which of the two has the peak changes with the number.
        layers[0].register_forward_pre_hook(lambda *_: setattr(self, "_in_layers", True))
        layers[-1].register_forward_hook(lambda *_: setattr(self, "_in_layers", False))
        places = {0: "the first layer", len(layers) - 1: "the last layer"}
        for number, layer in enumerate(layers):
            for part in layer.children():  # hooks of a layer itself are outside of what is recomputed
                part.register_forward_pre_hook(lambda *_, at=number: setattr(self.device, "place", places.get(at, "")))

    def own(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Count the storages of tensors of the device to a part."""
        self.device.own(part, tensors)

    def loaded(self, model: nn.Module) -> None:
        """Do nothing: shapes need no weights."""

    def note(self, kind: str) -> None:
        """Count a wait of the host."""
        inside = self._in_layers or torch._C._current_graph_task_id() != -1
        self.waits[Wait(self.phase, kind, _function(), inside)] += 1

    def pin(self, tensor: Tensor, *, rounds_up: bool = True) -> Tensor:
        """Count a tensor of the host as page-locked, and return it; torch's allocator rounds up to a power of two."""
        self._pinned.add(tensor.untyped_storage()._cdata)
        if tensor.nbytes >= _LEAST_HOST_BYTES:
            self.host.see(tensor, "page-locked", _line(), power_of_two=rounds_up)
            self.host.own("page-locked", [tensor])
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host counts as page-locked."""
        return tensor.untyped_storage()._cdata in self._pinned

    def bytes_of(self, storage: Any) -> Tensor:
        """Return a tensor of the device as large as a storage, which stands for it."""
        with self._fake:
            return torch.empty(storage.nbytes(), dtype=torch.uint8, device=DEVICE)

    def __enter__(self) -> FakeDeviceMode:
        """Enter, also inside of itself."""
        self._lifted.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=) passes no mode
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        """Leave."""
        torch._C._set_only_lift_cpu_tensors(self._lifted.pop())
        super().__exit__(*args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on the host, or on shapes."""
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # more than half of all calls
        if any(not issubclass(t, FakeTensor | nn.Parameter) and t is not Tensor for t in types):
            return NotImplemented  # DTensor first; it comes back with local tensors
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks for shapes of whole tensors: no memory of ours
        flat, _ = tree_flatten((args, kwargs))
        fakes = [one for one in flat if isinstance(one, FakeTensor)]
        if not fakes and not any(isinstance(one, torch.device) and one.type == DEVICE for one in flat):
            return self._on_host(func, args, kwargs)
        if func.namespace == "aten" and torch.is_inference_mode_enabled() and func._can_decompose():
            with self:  # in inference mode composite operations come whole
                return func.decompose(*args, **kwargs)
        special = self._special(func, args, kwargs)
        return self._on_device(func, args, kwargs, fakes) if special is NotImplemented else special

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pinned, aten = kwargs.pop("pin_memory", False), torch.ops.aten
        if func is aten.zeros.default and math.prod(args[0]) > _MOST_WRITTEN:
            func = aten.empty.memory_format  # nobody reads it, and writing would take real memory
        elif func in (aten.zero_.default, aten.fill_.Scalar, aten.copy_.default) and args[0].nbytes > _MOST_WRITTEN:
            return args[0]
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.device.type == "cpu":
            if pinned:
                self.pin(out)
            elif out.nbytes >= _LEAST_HOST_BYTES and not self.host.knows(out):
                self.host.see(out, "host", _line())
        return out

    def _on_device(self, func: Any, args: Any, kwargs: Mapping[str, Any], fakes: Sequence[Any]) -> Any:
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except RuntimeError as error:
            if "two different devices" in str(error):
                self.mixed.append(f"{func} {_line()}")
            raise
        for one in tree_flatten(out)[0] if not isinstance(out, Tensor) else (out,):
            if isinstance(one, FakeTensor) and not self.device.knows(one):
                self._see(one)
        self._compute_known(func, args, kwargs, fakes, out)
        return out

    def _see(self, tensor: Tensor) -> None:
        is_logits = tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary
        line = _line()
        self.device.see(
            tensor, "logits" if is_logits else "buffers" if line.startswith("FSDP") else "activations", line
        )

    def _compute_known(self, func: Any, args: Any, kwargs: Mapping[str, Any], fakes: Sequence[Any], out: Any) -> None:
        if not isinstance(out, FakeTensor) or out.dtype.is_floating_point or out.numel() > _MOST_KNOWN:
            return
        name = func._schema.name
        writes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
        if func.namespace != "aten" or "empty" in name or "rand" in name or writes:
            return
        if any(getattr(one, "known", None) is None for one in fakes):
            return
        some = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "layout")}
        if "device" in kwargs:
            some["device"] = "cpu"
        try:
            known = func(*tree_map(_known_of, args), **tree_map(_known_of, some))
        except Exception:  # noqa: BLE001 - then nobody knows
            return
        if isinstance(known, Tensor) and known.shape == out.shape:
            out.known = known  # type: ignore[attr-defined]

    def _special(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that waits for the device or copies; NotImplemented: another one."""
        aten, first = torch.ops.aten, (*args, None)[0]
        known = getattr(first, "known", None)
        if func in (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.bincount.default):
            self.note(func._schema.name.removeprefix("aten::").replace("_local_scalar_dense", "item"))
        if func is aten._local_scalar_dense.default:
            return known.item() if known is not None else 1.0 if first.dtype.is_floating_point else 1
        if func is aten.equal.default:
            return True
        if func._schema.name in _SAME_MEMORY:
            return first
        if func is aten.nonzero.default:
            return self._make((first.numel(), first.dim()), None if known is None else known.nonzero())
        if func is aten.bincount.default:
            least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            return self._make((least,), None if known is None else torch.bincount(known, minlength=least))
        if func is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or first.device).type
            if isinstance(first, FakeTensor) and target == "cpu":
                return self._download(first, kwargs)
            if not isinstance(first, FakeTensor) and target == DEVICE:
                return self._upload(first, kwargs)
        if func is aten.copy_.default and isinstance(first, FakeTensor) != isinstance(args[1], FakeTensor):
            return self._copy(
                first, args[1], non_blocking=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            )
        if func is aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.note("boolean mask")
            return self._select(func, args)
        if func is aten._grouped_mm.default and first.dtype == torch.float32:
            with self._fake:  # its shapes are known in bfloat16 only
                like = func(*(one.bfloat16() if i < 2 else one for i, one in enumerate(args)), **kwargs)
                out = torch.empty_like(like, dtype=torch.float32)
            self._see(out)
            return out
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.note("repeat_interleave")
        return NotImplemented

    def _download(self, source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        if not kwargs.get("non_blocking", False):
            self.note("copy to host")
        self.traffic[f"{self.phase} to host"] += source.nbytes
        known = getattr(source, "known", None)
        return torch.zeros(source.shape, dtype=dtype) if known is None else known.to(dtype, copy=True)

    def _copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
        """Copy between a tensor of the host and one of the device, in either direction; values are lost."""
        way, on_host = ("device", source) if isinstance(target, FakeTensor) else ("host", target)
        self.traffic[f"{self.phase} to {way}"] += on_host.nbytes
        if not (non_blocking and self.is_pinned(on_host)):
            self.note(f"copy to {way}")
        return target.zero_() if on_host is target and target.numel() <= _MOST_KNOWN else target

    def _select(self, func: Any, args: Any) -> Any:
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype != torch.bool:
                indices.append(index)
                continue
            known = getattr(index, "known", None) if isinstance(index, FakeTensor) else index
            rows = torch.arange(index.numel())[:, None].expand(-1, index.dim()) if known is None else known.nonzero()
            indices += [self._make(column.shape, column) for column in rows.unbind(1)]
        return self._on_device(func, (args[0], indices), {}, [one for one in (args[0], *indices) if one is not None])

    def _make(self, shape: Sequence[int], known: Tensor | None) -> Tensor:
        """Return indices on the device, of a shape or with values that are known."""
        with self._fake:
            out = torch.empty(tuple(shape if known is None else known.shape), dtype=torch.int64, device=DEVICE)
        self._see(out)
        if known is not None:
            out.known = known  # type: ignore[attr-defined]
        return out

    def _upload(self, source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        if source.device.type != "meta":
            self.traffic[f"{self.phase} to device"] += source.nbytes
            if not (kwargs.get("non_blocking", False) and self.is_pinned(source)):
                self.note("upload")
        with self._fake:
            out = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=DEVICE)
        self._see(out)
        if source.device.type == "cpu" and source.numel() <= _MOST_KNOWN and not dtype.is_floating_point:
            out.known = source.detach().to(dtype, copy=True)  # type: ignore[attr-defined]
        return out


_mode: FakeDeviceMode | None = None


def _pass_to(mode: FakeDeviceMode) -> None:
    """Let methods of tensors that no dispatch mode sees report to this one."""
    global _mode
    first, _mode = _mode is None, mode
    if not first:
        return
    resize = torch.UntypedStorage.resize_

    def resize_(of: Any, size: int) -> Any:
        result = resize(of, size)
        _present().device.resized(of)
        return result

    def tolist(tensor: Tensor) -> Any:
        _present().note("tolist")
        known = getattr(tensor, "known", None)
        found = known.tolist() if known is not None else _present().guess(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype).tolist() if found is None else found

    replace_in(torch.UntypedStorage, resize_=resize_)
    replace_in(FakeTensor, tolist=tolist)
    replace_in(
        Tensor,
        pin_memory=lambda tensor, *_, **__: _present().pin(tensor),
        is_pinned=lambda tensor, *_, **__: _present().is_pinned(tensor),
    )


def _present() -> FakeDeviceMode:
    assert _mode is not None, "methods are replaced with the first mode"
    return _mode


def _known_of(value: Any) -> Any:
    return value.known if isinstance(value, FakeTensor) else value  # type: ignore[attr-defined]


def _line() -> str:
    """Return the innermost line outside of torch, or the function of FSDP2 or the autograd node that runs."""
    for frame, line in islice(walk_stack(sys._getframe(1)), _MOST_FRAMES):
        name = frame.f_code.co_filename
        if "/_fully_shard/" in name:
            return f"FSDP {frame.f_code.co_name}"
        if not name.startswith("<") and not any(part in name for part in _NOT_OURS):
            return f"{_short(name)}:{line}"
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def _function() -> str:
    """Return file and name of the innermost function of ours, else of the innermost one outside of torch."""
    other = ""
    for frame, _ in walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE) and "/rl/memory/" not in name:
            return f"{_short(name)} {frame.f_code.co_name}"
        if not other and not name.startswith("<") and not any(part in name for part in _NOT_OURS):
            other = f"{_short(name)} {frame.f_code.co_name}"
    return other


def _short(name: str) -> str:
    for mark in ("/src/relibra/", "/site-packages/relibra/", "/site-packages/"):
        if mark in name:
            return name.split(mark)[1]
    return name.rpartition("/")[2]
