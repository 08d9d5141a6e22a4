"""`ExchangeCounters`: what an exchange did, and what it did without: staging copies and set-up per call."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class ExchangeCounters:
    """Counts of one side since it started.

    calls             dispatches of a layer of a micro-batch, or answers to one
    rows, bytes       rows sent, and their bytes
    empty_messages    notices without rows
    channels          channels opened
    buffers           buffers allocated
    staging_copies    rows that did not lie in the buffer of their channel and were copied there first
    group_creations   sets of peers made for a call: a channel opened, or a buffer allocated, after the first call
    """

    calls: int = 0
    rows: int = 0
    bytes: int = 0
    empty_messages: int = 0
    channels: int = 0
    buffers: int = 0
    staging_copies: int = 0
    group_creations: int = 0

    def open_channel(self, buffers: int = 0) -> None:
        """Count a channel with its buffers; after the first call it is a set-up that a call has waited for."""
        self.channels += 1
        self.buffers += buffers
        self.group_creations += self.calls > 0

    def send(self, rows: int, num_bytes: int) -> None:
        """Count a message."""
        self.rows += rows
        self.bytes += num_bytes
        self.empty_messages += rows == 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)
