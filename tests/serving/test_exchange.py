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
from relibra.planning.deployment.worker_choice import choose_workers
from relibra.serving.channel import connect, listen, worker_address
from relibra.serving.exchange import expert_side
from relibra.serving.exchange.addressing import address_choices
from relibra.serving.exchange.attention_side import ExchangeShape, SlotExchange, WorkerLostError
from relibra.serving.exchange.expert_side import ExpertInbox, ExpertShape
from relibra.serving.exchange.messages import ANSWER, Done, Hello, Rows
from relibra.serving.layout import held_by

SECRET = b"secret"
HIDDEN, MAX_TOKENS, TOP_K, LAYERS, NUM_EXPERTS = 4, 16, 2, 3, 5
TRANSPORTS = ("shared", "tcp")
ATTENTION = ExchangeShape(
    experts_of=(((0, 1),) * LAYERS,), max_tokens=MAX_TOKENS, top_k=TOP_K, hidden=HIDDEN, dtype=torch.float32
)
EXPERTS = ExpertShape(
    worker=0, experts=((0, 1),) * LAYERS, hidden=HIDDEN, dtype=torch.float32, max_rows=64, timeout=10.0
)
HELLO = Hello(secret=SECRET, attention=0, slot=0, sizes=EXPERTS.sizes, capacity=16, choices=32, shared_rows=0)


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
    """Expert workers as threads, with the same experts in all layers; `e` computes `expert_output(e, rows)`."""

    def __init__(self, stack, transport, experts_of, silent=()):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.experts_of, self.addresses, self.inboxes = tuple((own,) * LAYERS for own in experts_of), [], []
        for number, experts in enumerate(experts_of):
            listener, address = listen(worker_address(transport, folder, str(number)))
            shape = replace(EXPERTS, worker=number, experts=(experts,) * LAYERS)
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
            message.result_YH.zero_()
            chosen = np.repeat(experts, message.counts_E).tolist()
            for expert, row, gate in zip(chosen, message.row_C.tolist(), message.gate_C.tolist(), strict=True):
                message.result_YH[row] += gate * expert_output(expert, message.rows_YH[row])
            message.answer(inbox.counters)

    def exchange(self, stack, attention=0, slot=0, timeout=10.0):
        shape = replace(ATTENTION, experts_of=self.experts_of)
        exchange = SlotExchange(self.addresses, shape, attention=attention, slot=slot, secret=SECRET, timeout=timeout)
        stack.callback(exchange.close)
        return exchange


def there_and_back(exchange, expert_TK, layer=0):
    """Send tokens with these experts (a list: one each) and gates; return their sums, and those that are right."""
    expert_TK = np.asarray(expert_TK, dtype=np.int64)
    expert_TK = expert_TK[:, None] if expert_TK.ndim == 1 else expert_TK
    held_LNE = held_by(exchange.shape.experts_of, NUM_EXPERTS)
    held_LNE[:, list(exchange.lost)] = False
    worker_TK = choose_workers(expert_TK, held_LNE[layer], 1.05)
    tokens_TH = torch.arange(len(expert_TK) * HIDDEN, dtype=torch.float32).view(-1, HIDDEN)
    gate_TK = (1 + np.arange(expert_TK.size, dtype=np.float32) % 3).reshape(expert_TK.shape)
    addressed = address_choices(expert_TK, worker_TK, *held_LNE[layer].shape)
    exchange.rows(len(addressed.token_Y)).copy_(tokens_TH[addressed.token_Y])
    exchange.dispatch(layer, addressed, gate_TK.ravel()[addressed.choice_C])
    sums_TH = torch.zeros_like(tokens_TH)
    sums_TH.index_add_(0, torch.from_numpy(addressed.token_Y), exchange.collect(layer))
    right = [
        sum((float(g) * expert_output(int(e), row) for e, g in zip(own, gates, strict=True)), torch.zeros(HIDDEN))
        for own, gates, row in zip(expert_TK, gate_TK, tokens_TH, strict=True)
    ]
    return sums_TH, torch.stack(right) if right else tokens_TH, addressed


def assert_right(answer):
    sums, right, _ = answer
    assert torch.equal(sums, right)


@given(workers=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings(deadline=None)
def test_a_token_goes_to_a_worker_once_with_its_choices(workers, seed):
    rng = np.random.default_rng(seed)
    expert_TK = np.argsort(rng.random((int(rng.integers(0, 9)), 6)))[:, :3]
    worker_TK = rng.integers(0, workers, expert_TK.shape)
    found = address_choices(expert_TK, worker_TK, workers, 6)
    visited = sorted({(int(n), t) for (t, _), n in np.ndenumerate(worker_TK)})
    assert found.token_Y.tolist() == [t for _, t in visited]
    assert found.rows_N.tolist() == [sum(n == worker for n, _ in visited) for worker in range(workers)]
    choices = sorted((int(worker_TK[t, k]), int(e), t, k) for (t, k), e in np.ndenumerate(expert_TK))
    assert found.choice_C.tolist() == [3 * t + k for *_, t, k in choices]
    first_N = np.cumsum(found.rows_N) - found.rows_N
    rows = [int(first_N[n]) + row for (n, *_), row in zip(choices, found.row_C.tolist(), strict=True)]
    assert [found.token_Y[row] for row in rows] == [t for *_, t, _ in choices]
    assert all(found.counts_NE[n, e] == sum(one[:2] == (n, e) for one in choices) for n, e, *_ in choices)


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_row_comes_back_to_its_place(transport, data):
    workers = data.draw(st.integers(1, 3))
    experts_of = ((0, 1, 2, 3, 4), (0, 2, 4), (1,))[:workers]
    pairs = st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True), max_size=MAX_TOKENS)
    calls = data.draw(st.lists(pairs, min_size=1, max_size=4))
    with contextlib.ExitStack() as stack:
        exchange = Workers(stack, transport, experts_of).exchange(stack)
        rows = empty = 0
        for layer, chosen in enumerate(calls):
            answer = there_and_back(exchange, np.array(chosen).reshape(-1, 2), layer % LAYERS)
            assert_right(answer)
            rows, empty = rows + len(answer[2].token_Y), empty + int((answer[2].rows_N == 0).sum())
        assert exchange.counters.rows == rows
        assert exchange.counters.empty_messages == empty
        assert exchange.counters.bytes == 4 * HIDDEN * rows + 8 * sum(map(np.size, calls))
        assert exchange.counters.calls == len(calls)
        assert exchange.counters.group_creations == 0
        assert exchange.counters.buffers == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_attention_workers_and_slots_do_not_mix(transport):
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, transport, ((0, 1), (2, 3)))
        exchanges = [workers.exchange(stack, attention=a, slot=s) for a in range(3) for s in range(2)]
        wrong = []

        def work(number, exchange):
            for call in range(20):
                sums, right, _ = there_and_back(exchange, np.random.default_rng([number, call]).integers(0, 4, 10))
                if not torch.equal(sums, right):
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
        assert_right(there_and_back(exchange, [0]))  # the other worker still answers


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
        assert_right(there_and_back(exchange, [0, 0, 1, 2]))
        again = Workers(stack, transport, experts_of)
        exchange.rejoin(1, again.addresses[1], again.experts_of[1])
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


def message(count=1, counts=(1, 0), rows=(0,), gates=1, layer=0):
    rows, gates = np.array(rows, "<u4").tobytes(), np.ones(gates, "<f4").tobytes()
    return Rows(layer=layer, first_row=0, count=count, counts=np.array(counts, "<u4").tobytes(), rows=rows, gates=gates)


UNFIT = {
    "rows": message(count=17),
    "choices": message(counts=(33, 0), rows=[0] * 33, gates=33),
    "2^31": message(counts=(1 << 31, 0)),
    "counts": message(counts=(1,)),
    "layer": message(layer=LAYERS),
    "place": message(rows=(1,)),
    "gates": message(gates=2),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_message_that_does_not_fit_its_channel_ends_it(unfit):
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(greeted(Workers(stack, "tcp", ((0, 1),)).addresses[0]))
        channel.send(UNFIT[unfit])
        with pytest.raises(ConnectionError):
            channel.receive(ANSWER)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_worker_that_cannot_rejoin_is_lost_and_copies_answer(transport):
    experts_of = ((0, 1), (0, 1))
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, transport, experts_of)
        exchange = workers.exchange(stack)
        with pytest.raises(EngineError):
            exchange.rejoin(1, workers.addresses[1], ((0,),) * LAYERS)  # it holds other experts than that
        assert set(exchange.lost) == {1}
        assert_right(there_and_back(exchange, [0, 1, 1]))
        exchange.rejoin(1, workers.addresses[1], workers.experts_of[1])
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

        exchange.rejoin(0, workers.addresses[0], workers.experts_of[0])
        before = open_files()
        for _ in range(20):
            exchange.rejoin(0, workers.addresses[0], workers.experts_of[0])
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
        hello = msgspec.structs.replace(HELLO, capacity=rows, choices=rows, sizes=shape.sizes)
        channel = stack.enter_context(greeted(address, hello))
        welcoming.join()
        channel.send(message(rows, (rows, 0), range(rows), rows), memoryview(bytes(4 * rows * hidden)))
        found = inbox.next(10.0)
        assert found is not None
        began = time.monotonic()
        found.answer(inbox.counters)
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_tokens_to_one_expert_leave_the_other_worker_alone(transport):
    with contextlib.ExitStack() as stack:
        workers = Workers(stack, transport, ((0, 1), (2, 3)), silent=(1,))
        exchange = workers.exchange(stack)
        assert_right(there_and_back(exchange, [1] * MAX_TOKENS))
        assert_right(there_and_back(exchange, np.array([[0, 1]] * MAX_TOKENS)))
        assert (exchange.counters.rows, exchange.counters.empty_messages) == (2 * MAX_TOKENS, 2)
