"""Parts of the front: the fair queue, and text that grows token by token."""

import asyncio
import itertools
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relibra.errors import ConfigError
from relibra.serving.control import read_frame
from relibra.serving.engine.request import SamplingParameters
from relibra.serving.server.access import read_api_keys
from relibra.serving.server.admission import Admission, FrontLimits
from relibra.serving.server.fair_queue import FairQueue, retry_seconds
from relibra.serving.server.refusals import BadRequest, Overloaded, Unavailable
from relibra.serving.server.serve import FrontSettings
from relibra.serving.server.text import AnswerText, TextCodec, longest_beginning
from relibra.serving.server.workers.clients import WorkerClients
from relibra.serving.server.workers.connection import Connection, Mailbox, SampleGroup, tell_weights


class Utf8:
    """A tokenizer whose tokens are bytes; 256 is a special one."""

    def decode(self, tokens, *, skip_special_tokens, **_):
        kept = [token for token in tokens if token < 256]
        assert skip_special_tokens
        return bytes(kept).decode(errors="replace")


CODEC = TextCodec(Utf8(), (256,), 257)


def pieces_of(answer, tokens, cuts):
    borders = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    parts = [tokens[a:b] for a, b in itertools.pairwise(borders)]
    return [answer.add(part, last=index == len(parts) - 1) for index, part in enumerate(parts)]


@given(st.text(max_size=30), st.text(max_size=4), st.lists(st.integers(0, 200), max_size=30))
def test_a_stream_has_the_text_of_the_whole_answer(text, prompt, cuts):
    answer = AnswerText(CODEC, list(prompt.encode()), [])
    assert "".join(pieces_of(answer, list(text.encode()), cuts)) == text


@given(st.lists(st.integers(0, 256), max_size=12), st.lists(st.integers(0, 200), max_size=12))
def test_bytes_that_are_no_text_do_not_hold_a_stream_up(tokens, cuts):
    text = "".join(pieces_of(AnswerText(CODEC, [], []), [*tokens, *b"the end"], cuts))
    assert text.endswith("the end")


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 200), max_size=30),
)
def test_no_piece_holds_a_part_of_a_stop_text(text, stops, cuts):
    answer = AnswerText(CODEC, [], stops)
    pieces = pieces_of(answer, list(text.encode()), cuts)
    shown, found = "".join(pieces), [text.find(stop) for stop in stops if stop in text]
    assert answer.stopped == bool(found)
    if not found:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
        assert len(shown) < min(ends), "nothing goes on behind the first stop text"


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_longest_beginning_is_that_of_a_search(text, stops):
    every = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert longest_beginning(text, stops) == max(every, default=0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=40))
def test_everything_that_waits_is_served_and_clients_keep_their_order(items):
    queue = FairQueue()
    for number, (client, cost) in enumerate(items):
        queue.push(client, cost, (client, number))
    served = [queue.pop() for _ in items]
    assert len(queue) == 0
    for client in "abc":
        own = [number for one, number in served if one == client]
        assert own == sorted(own)


@given(st.integers(1, 5), st.integers(20, 40))
def test_busy_clients_get_equal_shares(cost, number):
    queue = FairQueue()
    for one in range(number):
        queue.push("heavy", cost, "heavy")
        queue.push("light", 1, "light")
        assert one >= 0
    shares = {"heavy": 0, "light": 0}
    while shares["heavy"] < number and shares["light"] < number:
        client = queue.pop()
        shares[client] += cost if client == "heavy" else 1
        assert abs(shares["heavy"] - shares["light"]) <= 2 * cost


def test_who_leaves_the_queue_is_not_served():
    queue = FairQueue()
    items = [object() for _ in range(3)]
    for item in items:
        queue.push("a", 1, item)
    queue.remove(items[1])
    assert items[1] not in queue
    assert [queue.pop(), queue.pop()] == [items[0], items[2]]


def test_the_hint_to_come_back_is_what_the_queue_takes():
    assert retry_seconds(10, []) == 1
    assert retry_seconds(20, [float(n) / 2 for n in range(11)]) == 10
    assert retry_seconds(10_000, [0.0, 1.0]) == 60


def test_keys_come_from_files_and_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("one\n\n two \n")
    monkeypatch.setenv("KEY_OF_A_TEST", "three")
    assert read_api_keys(f"file:{tmp_path / 'keys'}") == ("one", "two")
    assert read_api_keys("env:KEY_OF_A_TEST") == ("three",)
    assert read_api_keys("") == ()


@pytest.mark.parametrize("source", ["sk-1", "env:NOT_SET_BY_A_TEST", "file:/nowhere", "env:"])
def test_what_holds_no_key_is_refused(source):
    with pytest.raises(ConfigError, match="--api-key-from"):
        read_api_keys(source)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host": "0.0.0.0", "updates": True}, "--updates"),
        ({"max_waiting": 0}, "--max-waiting"),
        ({"deadline": 0.0}, "--deadline"),
    ],
)
def test_settings_of_the_front_out_of_range_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        FrontSettings(**{"host": "127.0.0.1", "port": 0, "name": "tiny"} | changes)


def test_a_worker_that_hangs_while_weights_change_is_given_up():
    async def told():
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection("attention worker 0", *await asyncio.open_connection(sock=ours))
            answers = await tell_weights([connection], {"read": "folder"}, seconds=0.05)
            return answers, connection.writer.is_closing(), await read_frame(connection.reader)

    answers, closing, frame = asyncio.run(told())
    assert answers == [None]
    assert closing
    assert frame is None, "who reads takes the worker for ended, and starts it again"


class NoWorkers(WorkerClients):
    """Stands in for workers that take nothing."""

    failure = ""

    def __init__(self):
        """Connect to nobody."""

    def has_room(self, _most):
        return False

    def cancel(self, _group):
        pass

    def end_answers(self, _why):
        pass


def group_of(samples):
    return SampleGroup(
        tokens=[1], sampling=SamplingParameters(limit=1), samples=samples, first=0, client="a", mailbox=Mailbox()
    )


def test_a_refusal_says_how_many_wait_and_how_many_may():
    limits = FrontLimits(at_worker=1, waiting=2, answers=3, deadline=1.0)
    admission = Admission(NoWorkers(), limits)
    admission.check(2)
    admission.submit(group_of(1))
    with pytest.raises(Overloaded, match=r"1 of 2 answers, .* adds 2; .* in 1 s, .*--max-waiting") as one:
        admission.check(2)
    assert one.value.retry_after == 1
    admission.submit(group_of(1))
    with pytest.raises(Overloaded, match="2 of 2 answers"):
        admission.check(1)
    admission.waiting -= 2  # both run now, and one more
    admission.submit(group_of(1))
    admission.waiting -= 1
    with pytest.raises(Overloaded, match="3 of 3 answers"):
        admission.check(1)
    with pytest.raises(BadRequest, match=r"3 answers, .* holds 2"):
        admission.check(3)


def test_a_server_that_stops_ends_what_waits_and_what_was_just_let_in():
    admission = Admission(NoWorkers(), FrontLimits(at_worker=1, waiting=4, answers=4, deadline=1.0))
    waiting, late = group_of(2), group_of(1)
    admission.submit(waiting)
    admission.stop()
    admission.submit(late)
    for group in (waiting, late):
        steps = asyncio.run(group.mailbox.take())
        assert [choice for choice, _ in steps] == list(range(group.samples))
        assert all(step["finish"] == "lost" and "stopped" in step["error"] for _, step in steps)
        admission.release(group)
    assert (admission.waiting, admission.open) == (0, 0)
    with pytest.raises(Unavailable, match="stopped"):
        admission.check(1)
