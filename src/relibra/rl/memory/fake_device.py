"""A GPU that is not there: the device "gpu" of torch's Python backend, and process groups that send nothing.

Fake "cuda" tensors would need no device of ours, but autograd aborts a process without CUDA that uses them. A process
cannot get rid of a device: dry runs have a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "gpu"
"""It cannot be "cuda", which torch keeps for itself."""


class _Queue:
    """The only stream, and every event: memory follows the order of the host, and what is asked for has happened."""

    stream_id = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self  # record, wait and their like

    def record_event(self, event: Any = None) -> Any:
        return event or _Queue()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _waits("synchronize")


class _DeviceModule:
    """What torch, FSDP2 and DTensor ask of `torch.gpu`."""

    Stream = Event = _Queue
    one = _Queue()

    def __init__(self) -> None:
        some: Any = self
        some.is_initialized = some.is_available = lambda: True
        some._is_in_bad_fork, some.device_count, some.current_device = lambda: False, lambda: 8, lambda: 0
        some.set_device = some.manual_seed_all = some.manual_seed = some.set_rng_state = lambda *_: None
        some.empty_cache, some.synchronize = lambda: None, lambda *_: _waits("synchronize")
        some.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
        some.current_stream = some.default_stream = lambda *_: self.one
        some.stream = some.device = lambda *_: nullcontext()
        some.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


_told: list[Callable[[str], None]] = []


def _waits(kind: str) -> None:
    for tell in _told:
        tell(kind)


def tell_waits(tell: Callable[[str], None]) -> None:
    """Let a function know of each wait of the host for a stream or an event, by its kind."""
    _told[:] = [tell]


def replace_in(owner: object, **functions: Any) -> None:
    """Set functions of a module or a class, by name."""
    for name, function in functions.items():
        setattr(owner, name, function)


def install(num_ranks: int) -> torch.device:
    """Make the device and the process group of this process, once, and return the device; this process is rank 0."""
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_DeviceModule())
    replace_in(fake_tensor, init_gpu_context=lambda *_: None)
    replace_in(
        torch.accelerator,
        current_stream=lambda *_: _DeviceModule.one,
        synchronize=lambda *_: _waits("synchronize"),
        set_device_index=lambda *_: None,
    )
    backends: Any = dist.Backend
    backends.backend_capability["fake"].append(DEVICE)
    backends.default_device_backend_map[DEVICE] = "fake"
    dist.init_process_group(f"cpu:fake,{DEVICE}:fake", store=FakeStore(), rank=0, world_size=num_ranks)
    _let_all_ranks_agree()
    _take_kernels_of_gpus()
    return torch.device(DEVICE, 0)


def _let_all_ranks_agree() -> None:
    """Make collectives of the host return what they would if all ranks said what this one says."""
    gather, reduce_, make = dist.all_gather, dist.all_reduce, dist.new_group

    def all_gather(tensors: list[Tensor], tensor: Tensor, group: Any = None, **_: object) -> None:
        if isinstance(tensor, FakeTensor):
            gather(tensors, tensor, group=group)
        for one in tensors:
            if not isinstance(tensor, FakeTensor):
                one.copy_(tensor)
            elif (known := getattr(tensor, "known", None)) is not None:
                one.known = known.clone()  # type: ignore[attr-defined]

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: object) -> None:
        if isinstance(tensor, FakeTensor):
            reduce_(tensor, op=op, group=group)
        elif op == dist.ReduceOp.SUM:
            tensor.mul_(dist.get_world_size(group))

    def new_group(ranks: Any = None, *_: object, **__: object) -> Any:
        return make(ranks, backend=f"cpu:fake,{DEVICE}:fake")

    replace_in(dist, all_gather=all_gather, all_reduce=all_reduce, barrier=lambda *_, **__: None, new_group=new_group)


def _take_kernels_of_gpus() -> None:
    """Let attention take the kernel that a GPU takes; for an unknown device torch would store the matrix of scores."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not isinstance(query, FakeTensor):
            return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None and query.dtype == torch.bfloat16:
            flash = torch.ops.aten._scaled_dot_product_flash_attention  # keys and values may have fewer heads
            return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]

    replace_in(torch.nn.functional, scaled_dot_product_attention=attention)
