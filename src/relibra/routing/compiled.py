"""`compiled`: numba kernels, cached on disk if a folder is writable."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from numba import njit
from numba.core.event import Event, Listener, install_listener


def watch_compilation(begin: Callable[[str], None]) -> AbstractContextManager[object]:
    """Call `begin` with the name of each kernel whose compilation begins inside; kernels in a cache have none."""

    class Compilations(Listener):  # type: ignore[misc]
        def on_start(self, event: Event) -> None:
            begin(event.data["dispatcher"].py_func.__name__)

        def on_end(self, event: Event) -> None:
            pass

    return install_listener("numba:compile", Compilations())


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel at its first call, without cache if neither package nor home folder is writable.

    Put `@no_type_check` under it: the shape checker of the tests must not wrap numba functions.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder for its cache: a container with a read-only root
        return njit(nogil=True)(function)
