"""`Prefetcher`: a thread that copies expert weights into slots while the rank computes."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from relibra.errors import EngineError


@runtime_checkable
class WeightSource(Protocol):
    """Gives the weights of any expert, such as a `HostPool`."""

    def copy_to(self, layer_position: int, expert: int, out: Mapping[str, Tensor]) -> None:
        """Copy the weights of one expert into tensors of the same names and shapes."""


class Prefetcher:
    """One thread that copies experts into slots, in the order of `start`.

    A slot may be read after `wait`, and passed to `start` again once nothing reads it. On an accelerator a copy is
    complete when `wait` returns, but runs on the default stream and does not overlap with computation there.
    """

    def __init__(self, source: WeightSource, *, depth: int = 16) -> None:
        """Start the thread; it ends with `close`, with this object or with the process.

        depth   number of `start` calls that may queue; the next one blocks
        """
        self._copies: dict[Hashable, Future[None]] = {}
        self._queue: queue.Queue[_Job | None] = queue.Queue(depth)
        closing = threading.Event()
        thread = threading.Thread(
            target=_copy_until_closed, args=(source, self._queue, closing), name="relibra-prefetch", daemon=True
        )
        thread.start()
        # Also called at exit: a daemon thread inside torch while the interpreter shuts down can crash the process.
        self._finalizer = weakref.finalize(self, _stop, thread, self._queue, closing)

    def start(self, key: Hashable, copies: Sequence[tuple[int, int, Mapping[str, Tensor]]]) -> None:
        """Queue copies of experts; a key may be used again when its copies are complete.

        copies   (layer position, expert, tensors to copy into)
        raises   EngineError after `close`, or for a key whose copies are not complete
        """
        if not self._finalizer.alive:
            raise EngineError(f"prefetch {key!r} comes after close(): make a new Prefetcher")
        if key in self._copies and not self._copies[key].done():
            raise EngineError(f"prefetch {key!r} is under way already: wait for it before its key is used again")
        self._copies[key] = done = Future[None]()
        self._queue.put(_Job(done, tuple(copies)))

    def wait(self, key: Hashable, timeout: float) -> None:
        """Return when the copies of a key are complete; raise their error if they failed.

        timeout   seconds; then EngineError is raised, and the key may be waited for again
        raises    EngineError also for a key that was not started, or was cut off by `close`
        """
        if key not in self._copies:
            raise EngineError(f"prefetch {key!r} was never started: call start() first")
        try:
            error = self._copies[key].exception(timeout)
        except TimeoutError:
            raise EngineError(
                f"prefetch {key!r} has not finished after {timeout:g} s: allow more time, or start it earlier"
            ) from None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread after its current copy; queued copies fail. Closing again has no effect."""
        self._finalizer()


class _Job(NamedTuple):
    """The copies of one key, and the future that reports their completion."""

    done: Future[None]
    copies: tuple[tuple[int, int, Mapping[str, Tensor]], ...]


def _copy_until_closed(source: WeightSource, jobs: queue.Queue[_Job | None], closing: threading.Event) -> None:
    """Run the thread; it holds no reference to the Prefetcher, which can be collected."""
    while (job := jobs.get()) is not None:
        try:
            for layer_position, expert, out in job.copies:
                if closing.is_set():
                    raise EngineError("the prefetcher was closed before the copy was complete: wait before close()")
                source.copy_to(layer_position, expert, out)
        except Exception as error:  # noqa: BLE001  crosses a thread border: `wait` raises it
            job.done.set_exception(error)
        else:
            job.done.set_result(None)
        del job  # frees the slots before the next job arrives


def _stop(thread: threading.Thread, jobs: queue.Queue[_Job | None], closing: threading.Event) -> None:
    closing.set()
    jobs.put(None)
    if thread is not threading.current_thread():  # the garbage collector may close a Prefetcher on this very thread
        thread.join()
