"""`compiled`: numba kernels, cached on disk where there is a place to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel at its first call; where neither the package nor the home folder can be written, without cache.

    Put `@no_type_check` under it: the shape checker of the tests must not wrap what numba compiles.
    """
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # numba found no folder for its cache: a container with a read-only root
        return njit(nogil=True)(function)
