"""One exchange of rows between M attention and N expert processes: relibra's channels, and gloo used as NCCL is.

Every pair carries the same bytes there and back; the expert side copies its rows into its results, in place of
computing. The baseline does what the paper measured NCCL doing (MegaScale-Infer, section 5): a barrier per call, a
staging copy at both ends, point-to-point operations in groups of at most 8. Both run in the same processes, in turns.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from relibra.serving.channel import listen, worker_address
from relibra.serving.exchange.addressing import Addressed, address_choices
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange
from relibra.serving.exchange.expert_side import ExpertInbox, ExpertShape
from relibra.serving.layout import Transport

HIDDEN = 1024
"""Values of a row; of small messages fewer."""
GROUP = 8
"""Point-to-point operations that the baseline begins together."""
WARM_UP, BLOCK = 30, 50
"""Calls before measuring, and calls of one transport before the other takes its turn."""
SECRET = b"m2n"
WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """M attention and N expert processes, and the bytes of a pair in one direction."""

    attention: int
    experts: int
    pair_bytes: int
    transport: Transport
    calls: int

    @property
    def rows(self) -> int:
        """Rows of a pair."""
        return self.pair_bytes // (4 * self.hidden)

    @property
    def hidden(self) -> int:
        """Values of a row."""
        return min(HIDDEN, self.pair_bytes // 4)


def measure(pattern: Pattern) -> dict:
    """Return milliseconds of each call of both, slowest attention process each, and the counters."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        spawn(_work, (pattern, port, Path(folder)), nprocs=pattern.attention + pattern.experts)
        files = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    found: dict = {name: np.max([one[name] for one in files if name in one], axis=0) for name in ("m2n", "gloo")}
    return {**found, "group_creations": sum(one["counters"]["group_creations"] for one in files)}


def _work(rank: int, pattern: Pattern, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=pattern.attention + pattern.experts)
    side = _attend if rank < pattern.attention else _serve
    found = side(pattern, rank, folder)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _attend(pattern: Pattern, rank: int, folder: Path) -> dict:
    dist.barrier()
    addresses = [(folder / f"address-{number}").read_text() for number in range(pattern.experts)]
    shape = ExchangeShape(
        experts_of=tuple(((number,),) for number in range(pattern.experts)),
        max_tokens=pattern.rows,
        top_k=pattern.experts,
        hidden=pattern.hidden,
        dtype=torch.float32,
    )
    exchange = SlotExchange(addresses, shape, attention=rank, slot=0, secret=SECRET, timeout=WAIT_SECONDS)
    dist.barrier()
    rows_XH = torch.randn(pattern.rows * pattern.experts, pattern.hidden)
    exchange.rows(len(rows_XH)).copy_(rows_XH)
    everywhere = all_to_all(pattern.rows, pattern.experts)

    def m2n() -> Tensor:
        exchange.dispatch(0, everywhere, np.ones(len(rows_XH), dtype=np.float32))
        return exchange.collect(0)

    gloo = _Baseline(pattern, rank)
    assert torch.equal(m2n(), rows_XH), "every row comes back to its place"
    assert torch.equal(gloo.there_and_back(rows_XH), rows_XH), "the baseline moves the same rows"
    found = _in_turns({"m2n": m2n, "gloo": lambda: gloo.there_and_back(rows_XH)}, pattern.calls)
    exchange.close()
    return {**found, "counters": dict(vars(exchange.counters))}


def all_to_all(tokens: int, workers: int) -> Addressed:
    """Return rows of tokens that go to the only expert of every worker."""
    expert_TK = np.tile(np.arange(workers), (tokens, 1))
    return address_choices(expert_TK, expert_TK, workers, workers)


def _serve(pattern: Pattern, rank: int, folder: Path) -> dict:
    number = rank - pattern.attention
    listener, address = listen(worker_address(pattern.transport, folder, str(number)))
    (folder / f"address-{number}").write_text(address)
    most = pattern.rows * pattern.experts
    shape = ExpertShape(worker=number, experts=((number,),), hidden=pattern.hidden, dtype=torch.float32, max_rows=most)
    inbox = ExpertInbox(listener, shape, SECRET)
    dist.barrier()
    while inbox.counters.buffers < 2 * pattern.attention:
        assert inbox.next(0.01) is None, "nobody sends before all channels are open"
    dist.barrier()

    def m2n() -> None:
        for _ in range(pattern.attention):
            message = inbox.next(WAIT_SECONDS)
            assert message is not None, "every attention process sends"
            message.result_YH.copy_(message.rows_YH)
            message.answer(inbox.counters)

    gloo = _Baseline(pattern, rank)
    m2n()
    gloo.there_and_back(None)
    _in_turns({"m2n": m2n, "gloo": lambda: gloo.there_and_back(None)}, pattern.calls)
    counters = dict(vars(inbox.counters))
    inbox.release()
    return {"counters": counters}


def _in_turns(calls: dict[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Return milliseconds of `count` calls of each, in blocks that take turns; all ranks begin a block together."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for begin in range(-WARM_UP, count, BLOCK):
        for name, call in calls.items():
            dist.barrier()
            for number in range(begin, min(begin + BLOCK, count)):
                began = time.perf_counter()
                call()
                if number >= 0:
                    found[name].append(1e3 * (time.perf_counter() - began))
    return found


class _Baseline:
    """The same pattern over gloo: barrier, staging copies, groups of point-to-point operations."""

    def __init__(self, pattern: Pattern, rank: int) -> None:
        attention = rank < pattern.attention
        first, count = (pattern.attention, pattern.experts) if attention else (0, pattern.attention)
        self._peers, self._attention = list(range(first, first + count)), attention
        self._sent, self._received = (torch.empty(count, pattern.rows, pattern.hidden) for _ in range(2))
        self._rows = torch.empty(count, pattern.rows, pattern.hidden)

    def there_and_back(self, rows_XH: Tensor | None) -> Tensor:
        """Return the rows of an attention process when they are back."""
        if rows_XH is None:
            self._one_way(None, send=False)
            self._one_way(self._rows.clone(), send=True)
        else:
            self._one_way(rows_XH.view_as(self._sent), send=True)
            self._one_way(None, send=False)
        return self._rows.flatten(0, 1)

    def _one_way(self, rows: Tensor | None, *, send: bool) -> None:
        dist.barrier()
        if rows is not None:
            self._sent.copy_(rows)
        call, buffers = (dist.isend, self._sent) if send else (dist.irecv, self._received)
        operations = [dist.P2POp(call, buffer, peer) for buffer, peer in zip(buffers, self._peers, strict=True)]
        for begin in range(0, len(operations), GROUP):
            for work in dist.batch_isend_irecv(operations[begin : begin + GROUP]):
                work.wait()
        if rows is None:
            self._rows.copy_(self._received)


def summary(milliseconds: np.ndarray) -> dict[str, float]:
    """Return median and 99th percentile."""
    return {"p50_ms": statistics.median(milliseconds), "p99_ms": float(np.quantile(milliseconds, 0.99))}
