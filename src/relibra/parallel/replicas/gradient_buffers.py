"""`GradientBuffers`: memory for gradients of replicas on their way home, which all layers of a step use in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class GradientBuffers:
    """Gradients of one expert, per parameter, that are free to be received into.

    One that is taken is nobody else's until it is given back, which its owner does after it has arrived and has been
    added up. So nothing that is under way is overwritten, in whichever order backward passes run.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        """Allocate nothing yet.

        like   slots `[X, ...]` by parameter
        """
        self._like = like
        self._free: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        self._zeros: dict[str, Tensor] = {}

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of the weights."""
        return self._like[name].dtype

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return memory for the gradient of one expert; what it holds is undefined."""
        free = self._free.setdefault((name, dtype), [])
        return free.pop() if free else self._like[name].new_empty(self._like[name].shape[1:], dtype=dtype)

    def give_back(self, name: str, gradients: Iterable[Tensor]) -> None:
        """Note that these are free again."""
        for gradient in gradients:
            self._free.setdefault((name, gradient.dtype), []).append(gradient)

    def zeros(self, name: str) -> Tensor:
        """Return the gradient of a replica that computed nothing, to be sent; nobody writes into it."""
        if name not in self._zeros:
            self._zeros[name] = self._like[name].new_zeros(self._like[name].shape[1:])
        return self._zeros[name]

    def clear(self) -> None:
        """Release the memory of gradients that nobody holds."""
        self._free.clear()
        self._zeros.clear()
