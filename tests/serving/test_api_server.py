"""Parts of the API server: the queue, and text that grows token by token."""

import asyncio
import contextlib
import itertools
import socket
from pathlib import Path
from typing import ClassVar

import pytest
import tokenizers
from fastapi import HTTPException, Request
from hypothesis import given
from hypothesis import strategies as st

from relibra.engine.sequence import SamplingParameters
from relibra.errors import ConfigError
from relibra.serving.channel import Progress, read_frame
from relibra.serving.server.admission import Admission
from relibra.serving.server.choice import make_choices
from relibra.serving.server.metrics import CountAnswers, ServerMetrics
from relibra.serving.server.serve import ServerSettings, key_check, read_api_keys
from relibra.serving.server.text import AnswerText, TextCodec
from relibra.serving.server.workers import Connection, WorkerClients
from tests.serving.in_process import StoppedWorker

SPECIAL = {256: "<end>", 257: "<tool>"}


class Utf8:
    """A tokenizer whose tokens are bytes, and two special ones."""

    added_tokens_decoder: ClassVar = {
        number: tokenizers.AddedToken(name, special=True) for number, name in SPECIAL.items()
    }

    def decode(self, tokens, *, skip_special_tokens, **_):
        special = dict.fromkeys(SPECIAL, "") if skip_special_tokens else SPECIAL
        return b"".join(special[one].encode() if one in special else bytes([one]) for one in tokens).decode(
            errors="replace"
        )


CODEC = TextCodec(Utf8(), (256,), 258)


def pieces_of(answer, tokens, cuts):
    borders = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    parts = [tokens[a:b] for a, b in itertools.pairwise(borders)]
    return [answer.add(part, last=index == len(parts) - 1) for index, part in enumerate(parts)]


@given(st.lists(st.integers(0, 256), max_size=12), st.lists(st.integers(0, 200), max_size=12))
def test_bytes_that_are_no_text_do_not_hold_a_stream_up(tokens, cuts):
    text = "".join(pieces_of(AnswerText(CODEC, [], {}), [*tokens, *b"the end"], cuts))
    assert text.endswith("the end")


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 200), max_size=30),
)
def test_no_piece_holds_a_part_of_a_stop_text(text, stops, cuts):
    answer = AnswerText(CODEC, [], CODEC.special_tokens(stops))
    pieces = pieces_of(answer, list(text.encode()), cuts)
    shown, found = "".join(pieces), [text.find(stop) for stop in stops if stop in text]
    assert (answer.stopped_by is not None) == bool(found)
    if not found:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
        assert len(shown) < min(ends), "nothing goes on behind the first stop text"


def written(tokens, kept=SPECIAL):
    return "".join(SPECIAL[one] if one in SPECIAL else chr(one) for one in tokens if one < 256 or one in kept)


@given(
    st.lists(st.sampled_from([*b"ab", *SPECIAL]), max_size=12),
    st.lists(st.lists(st.sampled_from([*b"ab", *SPECIAL]), min_size=1, max_size=3).map(written), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_special_tokens_of_stop_texts_are_matched(tokens, stops, skip_special, include_stop):
    answer = AnswerText(CODEC, [], CODEC.special_tokens(stops), skip_special=skip_special, include_stop=include_stop)
    shown = "".join(answer.add([token], last=False) for token in tokens) + answer.add([], last=True)
    named = [one for one, name in SPECIAL.items() if not skip_special or any(name in stop for stop in stops)]
    expected, by = tokens, None
    for end in range(1, len(tokens) + 1):
        text = written(tokens[:end], named)
        if found := [(text.find(stop), stop) for stop in stops if stop in text]:
            place, by = min(found, key=lambda one: one[0])
            expected = [one for one in tokens[:end] if one < 256 or one in named]
            while written(expected) != text[:place]:
                expected.pop()
            break
    assert answer.stopped_by == by
    visible = written(expected, () if skip_special else SPECIAL)
    assert shown == visible + (by if by and include_stop else "")


@pytest.mark.parametrize(
    ("options", "stops", "text", "by"),
    [
        ({}, ["b<end>"], "a", "b<end>"),
        ({}, ["c<end>"], "ab", None),
        ({"skip_special": False}, ["c<end>"], "ab", None),
        ({"skip_special": False, "include_stop": True}, [], "ab<end>", None),
        ({"include_stop": True}, ["b<end>"], "ab<end>", "b<end>"),
        ({"include_stop": True}, [], "ab", None),
    ],
)
def test_a_stop_token_is_shown_where_it_is_asked_for(options, stops, text, by):
    answer = AnswerText(CODEC, [], CODEC.special_tokens(stops), **options)
    assert answer.add([*b"ab"], last=False) + answer.add([256], last=True, stops=True) == text
    assert answer.stopped_by == by


def test_keys_come_from_files_and_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("one\n\n two \n")
    monkeypatch.setenv("KEY_OF_A_TEST", "three")
    assert read_api_keys(f"file:{tmp_path / 'keys'}") == ("one", "two")
    assert read_api_keys("env:KEY_OF_A_TEST") == ("three",)
    assert read_api_keys("") == ()


@pytest.mark.parametrize(
    ("header", "passes"),
    [("Bearer two", True), ("bearer  one ", True), ("Bearer three", False), ("Basic one", False), ("", False)],
)
def test_one_of_the_keys_is_asked_for(header, passes):
    request = Request({"type": "http", "headers": [(b"authorization", header.encode())]})
    key_check(())(request)
    with contextlib.nullcontext() if passes else refused(401, "key"):
        key_check(("one", "two"))(request)


@pytest.mark.parametrize("source", ["sk-1", "env:NOT_SET_BY_A_TEST", "file:/nowhere", "env:"])
def test_what_holds_no_key_is_refused(source):
    with pytest.raises(ConfigError, match="--api-key-from"):
        read_api_keys(source)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host": "0.0.0.0", "updates": Path()}, "--updates"),
        ({"deadline": 0.0}, "deadline is 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        ServerSettings(**{"host": "127.0.0.1", "port": 0, "name": "tiny"} | changes)


def test_a_worker_that_hangs_while_weights_change_is_given_up():
    async def changed():
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(StoppedWorker("attention", 1), *await asyncio.open_connection(sock=ours))
            answer = await connection.command("weights", {"read": "folder"}, seconds=0.05)
            return answer, connection.writer.is_closing(), await read_frame(connection.reader)

    answer, closing, frame = asyncio.run(changed())
    assert answer is None
    assert closing
    assert frame is None, "who reads takes the worker for ended, and starts it again"


class NoWorkers(WorkerClients):
    """Stands in for workers that take as many choices as there is room, and answer nothing."""

    failure = ""

    def __init__(self, room=0):
        """Connect to nobody."""
        self.room, self.begun, self.cancelled = room, [], []

    def has_room(self, _most):
        return len(self.begun) < self.room

    def begin(self, choice, _most):
        choice.request(len(self.begun))
        self.begun.append(choice)

    def cancel(self, choice):
        self.cancelled.append(choice)

    def end_answers(self, finish, error=""):
        for choice in self.begun:
            choice.end(finish, error)


@pytest.mark.parametrize("begun", [False, True])
def test_a_failure_is_counted_and_its_cause_logged_once(begun, caplog):
    failure = type("Failure", (Exception,), {})

    async def app(_scope, _receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise failure("why")

    async def fail():
        sent, metrics = [], ServerMetrics()

        async def send(message):
            sent.append(message["type"])

        for _ in range(3):
            await CountAnswers(app, metrics)({"type": "http"}, send, send)
        return sent, metrics.text({}, {}).decode()

    sent, text = asyncio.run(fail())
    assert sent == (["http.response.start"] * 3 if begun else ["http.response.start", "http.response.body"] * 3)
    assert 'relibra_requests_total{path="other",status="500"} 3.0' in text
    [record] = caplog.records
    assert record.exc_info[0] is failure


def choices_of(samples):
    return make_choices(CODEC, [[1]], samples, SamplingParameters(limit=2), [], max_length=8)


def admission_of(room=0, deadline=5.0, **limits):
    limits = {"most_waiting": 2, "most_open": 3} | limits
    return Admission(NoWorkers(room), ServerMetrics(), at_worker=1, deadline=deadline, **limits)


@contextlib.contextmanager
def refused(status, words):
    """Expect an answer of this status, whose sentence matches."""
    with pytest.raises(HTTPException, match=words) as caught:
        yield
    assert caught.value.status_code == status
    assert status != 429 or int(caught.value.headers["Retry-After"]) >= 1


async def started(admission, samples):
    """Queue a request; return its steps, and the task that waits for the first."""
    steps = admission.run(choices_of(samples))
    task = asyncio.create_task(anext(steps))
    await asyncio.sleep(0)
    return steps, task


def test_full_queue_takes_no_more_and_error_has_the_numbers():
    async def fill():
        admission = admission_of(most_waiting=2, most_open=3)
        await started(admission, 1)
        with refused(429, r"1 of 2 .* adds 2"):
            await anext(admission.run(choices_of(2)))
        await started(admission, 1)
        with refused(429, "2 of 2"):
            await anext(admission.run(choices_of(1)))
        admission.queue.clear()  # both run now, and one more
        await started(admission, 1)
        with refused(429, "3 of 3 in all"):
            await anext(admission.run(choices_of(1)))
        with refused(400, r"3 answers, .* holds 2"):
            await anext(admission.run(choices_of(3)))

    asyncio.run(fill())


def test_choices_begin_in_order_and_end_with_their_request():
    async def serve():
        admission = admission_of(room=2, most_waiting=4, most_open=8)
        clients = admission.clients
        await started(admission, 3)
        later, waiting = await started(admission, 1)
        assert [choice.index for choice in clients.begun] == [0, 1]
        assert len(admission.queue) == 2
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await later.aclose()
        assert [choice.index for choice in admission.queue] == [2], "the request that left does not wait"
        for token, finish in ((3, None), (4, "length")):
            clients.begun[0].put(Progress(number=0, token=token, finish=finish))
        await asyncio.sleep(0.01)
        assert clients.begun[0].finish == "length"
        assert clients.begun[0].tokens == [3, 4]
        assert clients.begun[0] in clients.cancelled

    asyncio.run(serve())


def test_a_pause_ends_answers_with_what_they_have():
    async def serve():
        admission = admission_of(room=1, most_waiting=4, most_open=8)
        begun, waits = await started(admission, 1)
        queued, waits_too = await started(admission, 1)
        admission.clients.begun[0].put(Progress(number=0, token=3, log_prob=-1.0))
        admission.pause()
        [[first], [second]] = await waits, await waits_too
        assert (first.tokens, first.log_probs, first.num_tokens, first.routes) == ([3], [-1.0], 1, None)
        assert (second.tokens, second.log_probs) == ([], [])
        assert first.finish == second.finish == "abort"
        assert [[one async for one in steps] for steps in (begun, queued)] == [[], []]
        admission.clients.begun.clear()
        await started(admission, 1)
        assert not admission.clients.begun, "what comes now waits"
        admission.resume()
        assert len(admission.clients.begun) == 1

    asyncio.run(serve())


def test_a_request_ends_at_its_deadline():
    async def wait():
        with refused(503, "--deadline"):
            await anext(admission_of(deadline=0.01).run(choices_of(1)))

    asyncio.run(wait())


def test_a_server_that_stops_ends_what_waits_and_takes_no_more():
    async def stop():
        admission = admission_of()
        _, waiting = await started(admission, 2)
        admission.stop()
        with refused(503, "stopped"):
            await waiting
        assert not admission.queue
        with refused(503, "stopped"):
            await anext(admission.run(choices_of(1)))

    asyncio.run(stop())
