"""`AttentionEngine`: the micro-batches of an attention worker, and which request goes to which."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from relibra.serving.engine.micro_batch import MicroBatch
from relibra.serving.engine.request import GenerateRequest


class AttentionEngine:
    """Micro-batches that run at the same time, each in a thread of its own."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Start the threads."""
        self.micro_batches = micro_batches
        self._of_request: dict[int, MicroBatch] = {}
        self._threads = [
            threading.Thread(target=one.run, name=f"micro-batch {number}", daemon=True)
            for number, one in enumerate(micro_batches)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: GenerateRequest) -> None:
        """Give a request to a micro-batch where its prompt waits, else to the one with the fewest.

        Ties: one where its prompt runs, then the first.
        """
        waiting = next((one for one in self.micro_batches if one.awaits_prompt(request.tokens)), None)
        chosen = waiting or min(
            self.micro_batches, key=lambda one: (one.unfinished, not one.runs_prompt(request.tokens))
        )
        self._of_request[request.number] = chosen
        chosen.submit(request)

    def cancel(self, number: int) -> None:
        """End a request at the next step of its micro-batch."""
        if (one := self._of_request.get(number)) is not None:
            one.cancel(number)

    def forget(self, number: int) -> None:
        """Forget a request that has ended."""
        self._of_request.pop(number, None)

    def close(self) -> None:
        """Stop all threads after their step, and wait for them."""
        for one in self.micro_batches:
            one.close()
        for thread in self._threads:
            thread.join()
