"""Ranks as threads of one process: several ranks of the executor on one device, the only one a machine may have.

torch's process group of threads (`multi_threaded_pg`) has the collectives. Added here:

streams     copies of a collective run behind what each rank has enqueued, and each rank goes on behind them, as with
            NCCL. On a GPU torch's own would read what is not computed yet, where ranks use streams of their own (FSDP)
messages    `isend` and `irecv` return at once; copies run on a stream of their own, and `wait` is waited for by the
            caller's stream. Messages of a pair of ranks match in their order, whatever their tags, as with NCCL

Ranks share the threads that autograd has, one for each GPU, and a backward pass that waits there for another rank would
wait forever. So every rank runs backward passes in its own thread (`set_multithreading_enabled(False)`). The order of
ready functions is that of one thread in both cases: latest first.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils._python_dispatch import _disable_current_modes

BACKEND = "threaded_ranks"
SECONDS = 120
"""A rank that waits for another one longer raises."""
SECONDS_AFTER_ERROR = 10
"""What the others get to notice that one has raised; those in a group of gloo notice at their time-out only."""


def _mark(device: torch.device | None = None) -> Any:
    """Return a point of the current stream of this thread; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _go_on_behind(*marks: Any) -> None:
    for mark in marks:
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


class _InOrder(threaded.Collective):
    """A collective whose copies run behind all that its ranks have enqueued, and before all that they enqueue next."""

    def __init__(self, world_size: int, collective: Any, group: Any) -> None:
        super().__init__(world_size, self, group)
        self._inner, self._before_R, self._after = collective, [None] * world_size, None

    def join(self, rank: int, data: Any) -> Any:
        self._before_R[rank] = _mark()
        work = super().join(rank, data)
        _go_on_behind(self._after)
        return work

    def work(self, data: Any) -> None:
        _go_on_behind(*self._before_R)
        with _disable_current_modes():  # it reads sizes, which are on the CPU
            self._inner.work(data)
        self._after = _mark()


class _Message(dist.Work):
    """One end of a message."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.posted, self.done = tensor, _mark(), None
        self.matched = threading.Event()

    def wait(self, _timeout: Any = None) -> bool:
        if not self.matched.wait(SECONDS):
            raise RuntimeError("timed out waiting for a rank that never posted its end of a message")
        _go_on_behind(self.done)
        return True


class _Ends(NamedTuple):
    sent: deque[_Message]
    received: deque[_Message]


class ThreadedGroup(threaded.ProcessLocalGroup):
    """Collectives of torch's group, and messages."""

    _lock = threading.Lock()
    _ends: ClassVar[dict[tuple[str, int, int], _Ends]] = defaultdict(lambda: _Ends(deque(), deque()))
    _stream: Any = None

    def _get_backend(self, _device: torch.device) -> Any:
        """Return what the executor asks a backend for: the time-out of its group."""
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=SECONDS)))

    def send(self, tensors: list[Tensor], peer: int, _tag: int = 0) -> dist.Work:
        return self._post(tensors[0], self._rank, peer, is_sent=True)

    def recv(self, tensors: list[Tensor], peer: int, _tag: int = 0) -> dist.Work:
        return self._post(tensors[0], peer, self._rank, is_sent=False)

    def _post(self, tensor: Tensor, source: int, target: int, *, is_sent: bool) -> dist.Work:
        message = _Message(tensor.detach())
        with ThreadedGroup._lock:
            ends = ThreadedGroup._ends[self.pg_name, source, target]
            (ends.sent if is_sent else ends.received).append(message)
            while ends.sent and ends.received:
                _copy(ends.sent.popleft(), ends.received.popleft())
        return message

    @classmethod
    def forget(cls) -> None:
        cls._ends.clear()


def _copy(sent: _Message, received: _Message) -> None:
    assert sent.tensor.shape == received.tensor.shape, "both ends of a message have one shape"
    assert sent.tensor.dtype == received.tensor.dtype, "and one type"
    if sent.posted is None:
        received.tensor.copy_(sent.tensor)
    else:
        ThreadedGroup._stream = ThreadedGroup._stream or torch.cuda.Stream()
        with torch.cuda.stream(ThreadedGroup._stream):
            _go_on_behind(sent.posted, received.posted)
            received.tensor.copy_(sent.tensor, non_blocking=True)
            sent.done = received.done = _mark()
    sent.matched.set()
    received.matched.set()


def _make_group(store: Any, rank: int, world_size: int, timeout: Any) -> dist.ProcessGroup:
    group = ThreadedGroup(rank, world_size)
    dist.distributed_c10d._store_based_barrier(rank, store, "", world_size, timeout)
    return group


if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu", "cuda"])
if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch below 2.12: read where a group ends
    threaded.ThreadLocalWorld.comms = []


def run_threads(work: Callable[[int], Any], num_ranks: int) -> list[Any]:
    """Run `work(rank)` on ranks that are threads of this process; return what they return, or raise what one raises."""
    found, errors = [None] * num_ranks, list[BaseException]()
    store = dist.HashStore()

    def run(rank: int) -> None:
        torch.autograd.set_multithreading_enabled(False)
        dist.init_process_group(BACKEND, rank=rank, world_size=num_ranks, store=store)
        try:
            found[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the test
            errors.append(error)
            ThreadedGroup.exception_handle(error)  # the others leave the collectives they are in
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        with mock.patch.object(threaded, "Collective", _InOrder):
            threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + SECONDS
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                threads[-1].join(0.02)
                threads[0].join(0.02)
                if errors:
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_ERROR)
        if not errors and any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"ranks did not finish within {SECONDS} s")
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        ThreadedGroup.reset()
        ThreadedGroup.forget()
    if errors:
        raise errors[0]
    return found
