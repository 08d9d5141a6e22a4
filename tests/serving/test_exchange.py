"""The exchange: every row comes back to its place, sizes are checked, a worker that is gone is named in time."""

import contextlib
import gc
import os
import socket
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relibra.errors import EngineError
from relibra.serving.channel import connect, listen, worker_address
from relibra.serving.exchange import expert_side
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange, WorkerLostError
from relibra.serving.exchange.expert_side import ExpertInbox, ExpertShape
from relibra.serving.exchange.messages import ANSWER, Done, Hello, Rows
from relibra.serving.layout import place_experts, place_table

SECRET = b"secret"
HIDDEN, MAX_TOKENS, TOP_K = 4, 16, 2
TRANSPORTS = ("shared", "tcp")
ATTENTION = ExchangeShape(
    experts_of=((0, 1),), max_tokens=MAX_TOKENS, top_k=TOP_K, hidden=HIDDEN, dtype=torch.float32, num_layers=3
)
EXPERTS = ExpertShape(
    worker=0, num_experts=2, num_layers=3, hidden=HIDDEN, dtype=torch.float32, max_rows=64, timeout=10.0
)
HELLO = Hello(secret=SECRET, attention=0, slot=0, sizes=EXPERTS.sizes, capacity=32, shared_rows=0)


@contextlib.contextmanager
def greeted(address, hello=HELLO):
    """Yield a channel without shared memory that an expert worker has welcomed."""
    with contextlib.closing(connect(address, 5.0)) as channel:
        channel.send(hello)
        assert channel.receive(ANSWER) == Done()
        yield channel


def expert_output(expert, rows):
    return rows * (expert + 1) + expert


class Workers:
    """Expert workers as threads; expert `e` computes `expert_output(e, rows)`."""

    def __init__(self, stack, transport, experts_of, silent=()):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.experts_of, self.addresses, self.inboxes = experts_of, [], []
        for number, experts in enumerate(experts_of):
            listener, address = listen(worker_address(transport, folder, str(number)))
            shape = replace(EXPERTS, worker=number, num_experts=len(experts))
            inbox = ExpertInbox(listener, shape, SECRET)
            thread = threading.Thread(target=self.run, args=(inbox, experts, number in silent))
            thread.start()
            self.addresses.append(address)
            self.inboxes.append(inbox)
            stack.callback(inbox.release)
            stack.callback(thread.join)
            stack.callback(inbox.close)

    @staticmethod
    def run(inbox, experts, silent):
        while (message := inbox.next()) is not None:
            if silent:
                continue
            first = 0
            for expert, count in zip(experts, message.counts_E.tolist(), strict=True):
                rows = slice(first, first + count)
                message.result_YH[rows] = expert_output(expert, message.rows_YH[rows])
                first += count
            message.answer(inbox.counters)

    def exchange(self, stack, attention=0, slot=0, timeout=10.0):
        shape = replace(ATTENTION, experts_of=self.experts_of)
        exchange = SlotExchange(self.addresses, shape, attention=attention, slot=slot, secret=SECRET, timeout=timeout)
        stack.callback(exchange.close)
        return exchange


def there_and_back(exchange, expert_Y, layer=0):
    """Send a row per entry of `expert_Y`; return rows and results, both in the order of the places."""
    place_Y = place_table(exchange.shape.experts_of, exchange.lost).place_rows(np.asarray(expert_Y, dtype=np.int64))
    rows = torch.arange(len(place_Y) * HIDDEN, dtype=torch.float32).view(-1, HIDDEN)
    exchange.rows(len(rows)).copy_(rows)
    counts = np.bincount(place_Y, minlength=sum(map(len, exchange.shape.experts_of)))
    exchange.dispatch(layer, counts)
    return rows, exchange.collect(layer), np.sort(np.asarray(expert_Y)[np.argsort(place_Y, kind="stable")])


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_row_comes_back_to_its_place(transport, data):
    workers = data.draw(st.integers(1, 3))
    experts_of = place_experts(5, workers, 0)
    calls = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=MAX_TOKENS * TOP_K), min_size=1, max_size=4))
    with contextlib.ExitStack() as stack:
        exchange = Workers(stack, transport, experts_of).exchange(stack)
        for layer, chosen in enumerate(calls):
            expert_Y = np.sort(np.asarray(chosen, dtype=np.int64))
            rows, results, _ = there_and_back(exchange, expert_Y, layer % 3)
            expected = [expert_output(int(e), row) for e, row in zip(expert_Y, rows, strict=True)]
            assert torch.equal(results, torch.stack(expected) if expected else results)
        assert exchange.counters.rows == sum(map(len, calls))
        assert exchange.counters.calls == len(calls)
        assert exchange.counters.group_creations == 0
        assert exchange.counters.buffers == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_attention_workers_and_slots_do_not_mix(transport):
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, transport, place_experts(4, 2, 0))
        exchanges = [workers.exchange(stack, attention=a, slot=s) for a in range(3) for s in range(2)]
        wrong = []

        def work(number, exchange):
            for call in range(20):
                expert_Y = np.sort(np.random.default_rng([number, call]).integers(0, 4, 10))
                rows, results, _ = there_and_back(exchange, expert_Y)
                expected = torch.stack([expert_output(int(e), row) for e, row in zip(expert_Y, rows, strict=True)])
                if not torch.equal(results, expected):
                    wrong.append((number, call))

        threads = [threading.Thread(target=work, args=item) for item in enumerate(exchanges)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_that_does_not_answer_is_named_within_timeout(transport):
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, transport, ((0,), (1,)), silent=(1,))
        exchange = workers.exchange(stack, timeout=0.5)
        began = time.monotonic()
        with pytest.raises(WorkerLostError, match=r"attention worker 0 waited for expert worker 1 at layer 2.*0\.5 s"):
            there_and_back(exchange, [0, 1], layer=2)
        assert time.monotonic() - began < 3
        assert set(exchange.lost) == {1}
        with pytest.raises(EngineError, match="1 experts that no other worker holds"):
            there_and_back(exchange, [0])
        exchange.dispatch(0, np.array([1, 0]))  # the other worker still answers
        assert len(exchange.collect(0)) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_copies_take_over_and_a_worker_can_rejoin(transport):
    experts_of = ((0, 1, 2), (0, 1, 2))
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, transport, experts_of)
        exchange = workers.exchange(stack)
        there_and_back(exchange, [0, 0, 1, 2])
        workers.inboxes[1].close()
        time.sleep(0.1)
        workers.inboxes[1].release()
        with pytest.raises(WorkerLostError, match="expert worker 1"):
            there_and_back(exchange, [0, 0, 1, 2])
        rows, results, experts = there_and_back(exchange, [0, 0, 1, 2])
        assert torch.equal(results, torch.stack([expert_output(int(e), r) for e, r in zip(experts, rows, strict=True)]))
        again = Workers(stack, transport, experts_of)
        exchange.rejoin(1, again.addresses[1], experts_of[1])
        assert not exchange.lost
        there_and_back(exchange, [0, 0, 1, 2])
        assert again.inboxes[1].counters.rows > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("secret", "changes", "named"),
    [
        (b"another", {}, "the secret is that of another deployment"),
        (SECRET, {"hidden": 8}, "different models"),
        (SECRET, {"max_tokens": 1000}, "more than the 64 allowed"),
    ],
)
def test_strangers_are_refused(transport, secret, changes, named):
    with contextlib.ExitStack() as stack:
        addresses, shape = Workers(stack, transport, ((0, 1),)).addresses, replace(ATTENTION, **changes)
        with pytest.raises(EngineError, match=named):
            SlotExchange(addresses, shape, secret=secret, attention=0, slot=0, timeout=5.0)


@pytest.mark.parametrize(
    ("layer", "counts"), [(0, [40, 0]), (0, [1 << 31, 0]), (0, [1]), (3, [1, 0])], ids=["40", "2^31", "counts", "layer"]
)
def test_a_message_that_does_not_fit_its_channel_ends_it(layer, counts):
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(greeted(Workers(stack, "tcp", ((0, 1),)).addresses[0]))
        channel.send(Rows(layer=layer, first_row=0, counts=np.array(counts, "<u4").tobytes()))
        with pytest.raises(ConnectionError):
            channel.receive(ANSWER)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_that_cannot_rejoin_is_lost_and_copies_answer(transport):
    experts_of = ((0, 1), (0, 1))
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, transport, experts_of)
        exchange = workers.exchange(stack)
        with pytest.raises(EngineError):
            exchange.rejoin(1, workers.addresses[1], (0,))  # it holds other experts than that
        assert set(exchange.lost) == {1}
        rows, results, experts = there_and_back(exchange, [0, 1, 1])
        assert torch.equal(results, torch.stack([expert_output(int(e), r) for e, r in zip(experts, rows, strict=True)]))
        exchange.rejoin(1, workers.addresses[1], (0, 1))
        assert not exchange.lost
        there_and_back(exchange, [0, 1, 1])


def test_opening_channels_again_leaves_no_file_open():
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, "shared", ((0, 1),))
        exchange = workers.exchange(stack)

        def open_files():
            there_and_back(exchange, [0, 1, 1])  # the worker has seen the former channel end
            gc.collect()  # what earlier tests left
            return len(os.listdir("/proc/self/fd"))

        exchange.rejoin(0, workers.addresses[0], (0, 1))
        before = open_files()
        for _ in range(20):
            exchange.rejoin(0, workers.addresses[0], (0, 1))
        assert open_files() <= before + 5


def test_channel_without_memory_is_refused_and_others_are_served(monkeypatch):
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, "tcp", ((0, 1),))
        with monkeypatch.context() as full:

            def no_memory(*_size):
                raise RuntimeError("out of memory")

            full.setattr(expert_side, "make_buffers", no_memory)
            with pytest.raises(EngineError, match="out of memory"):
                workers.exchange(stack)
        there_and_back(workers.exchange(stack), [0, 1, 1])


def test_sender_that_reads_nothing_delays_no_longer_than_timeout():
    rows, hidden = 4096, 1024  # 16 MB of results: more than sockets hold
    with contextlib.ExitStack() as stack:
        listener, address = listen("127.0.0.1:0")
        shape = replace(EXPERTS, hidden=hidden, max_rows=rows, timeout=0.5)
        inbox = ExpertInbox(listener, shape, SECRET)
        stack.callback(inbox.release)
        welcoming = threading.Thread(target=inbox.next, args=(0.5,))
        welcoming.start()
        hello = msgspec.structs.replace(HELLO, capacity=rows, sizes=shape.sizes)
        channel = stack.enter_context(greeted(address, hello))
        welcoming.join()
        counts = np.array([rows, 0], "<u4").tobytes()
        channel.send(Rows(layer=0, first_row=0, counts=counts), memoryview(bytes(4 * rows * hidden)))
        message = inbox.next(10.0)
        assert message is not None
        began = time.monotonic()
        message.answer(inbox.counters)
        assert time.monotonic() - began < 5.0
        assert channel.receive(ANSWER) == Done()
        with pytest.raises(ConnectionError):  # half of a message is not waited for
            channel.fill(memoryview(bytearray(4 * rows * hidden)))


def test_random_bytes_do_not_stop_a_worker():
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, "tcp", ((0, 1),))
        host, _, port = workers.addresses[0].rpartition(":")
        for size in (1, 40, 76, 200, 512):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(rng.bytes(size))
        there_and_back(workers.exchange(stack), [0, 1, 1])


def test_connections_that_say_nothing_delay_nobody():
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, "tcp", ((0, 1),))
        host, _, port = workers.addresses[0].rpartition(":")
        exchange = workers.exchange(stack)
        for _ in range(20):
            stack.enter_context(socket.create_connection((host, int(port))))
        began = time.monotonic()
        there_and_back(exchange, [0, 1, 1])
        there_and_back(workers.exchange(stack, attention=1), [1, 0])
        assert time.monotonic() - began < 2.0


def test_no_worker_at_an_address_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(EngineError, match=f"no expert worker answers at 127.0.0.1:{port}"):
        connect(f"127.0.0.1:{port}", 1.0)
