"""`compiled`: numba kernels, cached on disk if a folder is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel at its first call, without cache if neither package nor home folder is writable.

    Put `@no_type_check` under it: the shape checker of the tests must not wrap numba functions.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder for its cache: a container with a read-only root
        return njit(nogil=True)(function)
