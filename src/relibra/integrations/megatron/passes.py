"""`LayerPasses`: which micro-batch a layer runs, in its forward pass and again when the backward pass recomputes it.

Pipeline schedules run forward k + 1 before backward k, and recomputation happens inside the backward pass, so there is
no one current micro-batch. As in Megatron's `RouterReplay`, each layer keeps a queue: filled by forward passes,
emptied by recomputations.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch

from relibra.errors import EngineError

Entry = TypeVar("Entry")


def is_recompute() -> bool:
    """Return whether a backward pass is running: a layer that runs inside it is recomputed."""
    # As `relibra.replay.routers.is_recompute`, which loads the transformers that relibra trains with.
    return torch._C._current_graph_task_id() != -1


class LayerPasses(Generic[Entry]):
    """Entries of one layer: what it needs in the micro-batch that it runs."""

    def __init__(self) -> None:
        """Start without a micro-batch."""
        self._entry: Entry | None = None
        self._trains = False
        self._awaiting: deque[Entry | None] = deque()

    def begin(self, entry: Entry | None) -> None:
        """Let the next forward passes use this entry; None: none.

        Called where gradients are enabled as in the forward pass of the model: without them nothing is recomputed.
        """
        self._entry, self._trains = entry, torch.is_grad_enabled()

    def take(self, where: str) -> Entry | None:
        """Return the entry of the pass that runs now.

        where    layer, for the message
        raises   EngineError in a recomputation without a forward pass
        """
        if is_recompute():
            if not self._awaiting:
                raise EngineError(
                    f"{where} is recomputed more often than it ran forward: begin a micro-batch before each forward "
                    "pass, and clear only between steps"
                )
            return self._awaiting.popleft()
        if self._trains and not torch.is_grad_enabled():  # a checkpoint: the backward pass runs the layer again
            self._awaiting.append(self._entry)
        return self._entry

    @property
    def num_awaiting(self) -> int:
        """Return the number of forward passes that wait for their recomputation."""
        return len(self._awaiting)

    def clear(self) -> None:
        """Forget everything; between steps."""
        self._entry, self._trains = None, False
        self._awaiting.clear()
