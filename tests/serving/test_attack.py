"""Clients that send too much or ask for too much: bounded before it is spent, and nobody else is held."""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import tokenizers
from fastapi import HTTPException, Request

from benchmarks.reliability.attacked_server import hostile_bodies
from benchmarks.reliability.started_run import are_gone
from relibra.engine.sequence import SamplingParameters
from relibra.serving.channel import Progress
from relibra.serving.server import forked, reading
from relibra.serving.server.bodies import ChatBody, CompletionBody, TokenBody
from relibra.serving.server.choice import READ_AT_ONCE, make_choices
from relibra.serving.server.forked import run_forked
from relibra.serving.server.reading import MOST_BODY_BYTES, SMALL_BYTES, BodyReader
from relibra.serving.server.text import TextCodec
from relibra.serving.server.weights import WorkerCall
from tests.serving.server_process import relibra_serve, workers_of, write_text_model


class Letters:
    """A tokenizer of single characters that counts what it has encoded, here: in the process that asks."""

    chat_template = "none"
    added_tokens_decoder: ClassVar = {}

    def get_vocab(self):
        return {"a": 1, "bb": 2}

    def encode(self, text, **_):
        return [1] * len(text)

    def apply_chat_template(self, messages, **_):
        return self.encode("".join(one["content"] for one in messages))

    def decode(self, tokens, **_):
        return "a" * len(tokens)


CODEC = TextCodec(Letters(), (), 1000)


def sent(*pieces, delay=0.0):
    """Return a request whose body comes in pieces; its client stays."""
    left = list(pieces)

    async def receive():
        if not left:
            await asyncio.Event().wait()
        await asyncio.sleep(delay)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


def read(kind, body, max_length=50_000):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(BodyReader("tiny", CODEC, max_length).read(sent(data), kind))


def status_of(kind, body, max_length=50_000):
    with pytest.raises(HTTPException) as caught:
        read(kind, body, max_length)
    return caught.value.status_code


@pytest.mark.parametrize("length", [10, 20_000])
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, lambda n: {"prompt": "a" * n}),
        (CompletionBody, lambda n: {"prompt": ["a", "a" * n], "n": 2, "stop": ["x"], "echo": True, "user": "u" * n}),
        (CompletionBody, lambda n: {"prompt": [[3], [5] * n], "temperature": None}),
        (ChatBody, lambda n: {"messages": [{"role": "user", "content": "a" * n}], "logprobs": True}),
        (TokenBody, lambda n: {"token_ids": [7] * n, "sampling_params": {"n": 3, "logprobs": 2, "metadata": [0] * n}}),
    ],
    ids=["text", "texts", "tokens", "chat", "generate"],
)
def test_bodies_mean_the_same_whether_read_here_or_in_a_fork(kind, body, length):
    whole, data = kind.model_validate(body(length)), json.dumps(body(length)).encode()
    got, prompts = read(kind, data)
    assert (len(data) > SMALL_BYTES) == (length > 10)
    assert prompts == whole.prompts(CODEC, 50_000)
    choices, expected = (one.choices(CODEC, 50_000, prompts) for one in (got, whole))
    for one, other in zip(choices, expected, strict=True):
        sampling = one.sampling
        assert one.prompt == other.prompt
        assert sampling == SamplingParameters(**{**vars_of(other.sampling), "seed": sampling.seed})
    known = set(kind.model_fields) - set(kind.no_prompt) - {"sampling_params"}
    assert {name: getattr(got, name) for name in known} == {name: getattr(whole, name) for name in known}


def test_unknown_fields_do_not_leave_the_fork():
    wide = {"metadata": [0] * SMALL_BYTES}
    completion, _ = read(CompletionBody, {"prompt": "a", "stream_options": {"include_usage": True, **wide}, **wide})
    generate, _ = read(TokenBody, {"token_ids": [1], "sampling_params": {"n": 2, **wide}, **wide})
    assert completion.include_usage
    assert generate.sampling_params.n == 2
    for part in (completion, completion.stream_options, generate, generate.sampling_params):
        assert not part.model_extra


def vars_of(sampling):
    return {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}


def test_number_and_length_are_checked_before_encoding(monkeypatch):
    encoded = []
    monkeypatch.setattr(Letters, "encode", lambda _, text, **__: encoded.append(text) or [1])
    messages = [{"role": "user", "content": "a" * 150}, {"role": "user", "content": "a" * 51}]
    for kind, body in (
        (CompletionBody, {"prompt": []}),
        (CompletionBody, {"prompt": ["a"] * 257}),
        (CompletionBody, {"prompt": ["a"] * 3, "n": 128}),
        (CompletionBody, {"prompt": ["a", "a" * 201]}),
        (CompletionBody, {"prompt": [5] * 101}),
        (ChatBody, {"messages": messages}),
        (TokenBody, {"token_ids": [5] * 101}),
    ):
        assert status_of(kind, body, max_length=100) == 400, body
    assert encoded == []
    read(CompletionBody, {"prompt": "a" * 200}, max_length=100)
    assert [text for text in encoded if len(text) > 1] == ["a" * 200]


@pytest.mark.parametrize("length", [150, 2 * SMALL_BYTES])
def test_tokens_of_a_text_are_limited_before_they_are_handed_on(length):
    with pytest.raises(HTTPException, match=f"{length:,} tokens"):
        read(CompletionBody, {"prompt": "a" * length}, max_length=length - 10)
    messages = [{"role": "user", "content": "a" * length}]
    with pytest.raises(HTTPException, match=f"{length:,} tokens"):
        read(ChatBody, {"messages": messages}, max_length=length - 10)


def test_special_tokens_are_looked_for_once():
    looked = []

    class Special(Letters):
        """Counts how often its special tokens are listed."""

        @property
        def added_tokens_decoder(self):
            return looked.append(1) or {7: "<call>"}

        def decode(self, tokens, **_):
            return "a" * (len(tokens) - tokens.count(7))

    codec = TextCodec(Special(), (), 1000)
    for _ in range(2):
        make_choices(codec, [[1]], 128, SamplingParameters(limit=1), ["<call>x", *"abcdefgh"], max_length=9)
    assert codec.special_tokens(["<call>x", "a"]) == {"<call>x": {"<call>": 7}, "a": {}}
    assert len(looked) == 1


def test_bytes_and_time_of_bodies_are_limited(monkeypatch):
    assert status_of(CompletionBody, b" " * (MOST_BODY_BYTES + 1)) == 413
    monkeypatch.setattr(reading, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(reading, "MOST_BYTES_UNDER_WAY", 3 * SMALL_BYTES)

    async def send():
        reader = BodyReader("tiny", CODEC, 50_000)
        statuses = []
        for request in (sent(b" ", b" ", delay=0.04), sent(*[b" " * SMALL_BYTES] * 5)):
            with pytest.raises(HTTPException) as caught:
                await reader.read(request, CompletionBody)
            statuses.append(caught.value.status_code)
        with pytest.raises(HTTPException):
            await reader.read_call(sent(b" " * 2 * SMALL_BYTES), WorkerCall)
        for _ in range(3):  # what has ended counts no more
            await reader.read(sent(json.dumps({"prompt": "a" * 2 * SMALL_BYTES}).encode()), CompletionBody)
        return statuses

    assert asyncio.run(send()) == [408, 429]


def test_work_ends_with_its_client_and_at_its_limits(monkeypatch):
    monkeypatch.setattr(forked, "MOST_SECONDS", 1.0)
    seen = []

    async def watch():
        for work in (lambda: [os.getpid()], lambda: [bytearray(2 * forked.MOST_MEMORY)], lambda: time.sleep(60)):
            began = time.monotonic()
            try:
                seen.append(await run_forked(work))
            except HTTPException as error:
                seen.append(error.status_code)
            assert time.monotonic() - began < 5
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        before = set(children.read_text().split())
        task = asyncio.create_task(run_forked(lambda: time.sleep(60)))
        await asyncio.sleep(0.1)
        [child] = set(children.read_text().split()) - before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert are_gone([int(child)])

    asyncio.run(watch())
    [[pid], *statuses] = seen
    assert pid != os.getpid()
    assert statuses == [400, 503]


def test_a_parser_that_lacks_memory_ends_at_once(monkeypatch):
    """Its panic would search symbols for minutes, without memory, where the environment asks for backtraces."""
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    body = hostile_bodies(MOST_BODY_BYTES - 1024)["deep unknown field"][1]
    with pytest.raises(HTTPException) as caught:
        asyncio.run(asyncio.wait_for(run_forked(lambda: [CompletionBody.model_validate_json(body)], len(body)), 30))
    assert caught.value.status_code == 400


def test_a_fork_that_fails_or_has_no_client_leaves_nothing_open(monkeypatch):
    def no_fork():
        raise BlockingIOError

    async def fail():
        files = set(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, "fork", no_fork)
        with pytest.raises(HTTPException) as caught:
            await run_forked(list)
        for steps in range(4):
            task = asyncio.create_task(run_forked(list))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0)
        return caught.value.status_code, set(os.listdir("/proc/self/fd")) - files

    assert asyncio.run(fail()) == (503, set())


def test_work_ends_though_its_server_was_killed(monkeypatch):
    monkeypatch.setattr(forked, "MOST_SECONDS", 0.5)
    kill, pids = os.kill, []
    monkeypatch.setattr(os, "kill", lambda pid, _: pids.append(pid))
    with pytest.raises(HTTPException):
        asyncio.run(run_forked(lambda: time.sleep(60)))
    began = time.monotonic()
    while time.monotonic() - began < 10 and not are_gone(pids):
        time.sleep(0.05)
    alive = not are_gone(pids)
    if alive:
        kill(pids[0], signal.SIGKILL)
    assert not alive


def test_a_fork_keeps_no_other_file_open(tmp_path):
    with (tmp_path / "file").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        [names] = asyncio.run(run_forked(lambda: [sorted(map(os.path.realpath, Path("/proc/self/fd").iterdir()))]))
    assert str(tmp_path / "file") not in names


def test_bodies_do_not_wait_for_answers():
    async def answers_beside():
        slow = [asyncio.create_task(run_forked(lambda: time.sleep(60), size)) for size in [None] * 5 + [8 << 20] * 3]
        await asyncio.sleep(0.2)
        small = await asyncio.wait_for(run_forked(lambda: [1], size=100), 10)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return small

    assert asyncio.run(answers_beside()) == [1]


def test_a_fork_encodes_beside_threads_of_tokenizers(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(forked, "MOST_SECONDS", 10.0)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    texts = ["a"] * 64
    assert len(tokenizer.encode_batch(texts)) == 64, "threads have begun"

    def encode():
        yield [one.ids for one in tokenizer.encode_batch(texts)]

    assert asyncio.run(run_forked(encode)) == [[[0]] * 64]


def test_entries_count_all_that_an_answer_is_long_by():
    def entries(routes=None, **sampling):
        [choice] = make_choices(CODEC, [[1] * 800], 1, SamplingParameters(limit=1, **sampling), [], max_length=900)
        choice.put(Progress(number=0, token=5, finish="length", routes=routes))
        assert choice.read()
        return choice, choice.entries

    choice, plain = entries()
    assert plain == 800 // 16 + 1
    assert entries(prompt_log_probs=True, top_log_probs=20)[1] == 800 + 21
    assert entries(routes=bytes(1 << 20))[1] == plain + 512
    choice.clear()
    assert choice.entries == 0


def test_what_came_for_a_slow_reader_is_read_in_parts():
    async def read_all():
        [choice] = make_choices(CODEC, [[1]], 1, SamplingParameters(limit=100), [], max_length=200)
        for number in range(100):
            choice.put(Progress(number=0, token=5, finish="length" if number == 99 else None))
        counts = []
        while choice.finish is None:
            choice.arrived.clear()
            assert choice.read()
            counts.append(choice.num_tokens)
            assert choice.arrived.is_set() == (choice.finish is None), "who waits for the rest does not sleep"
        return counts, choice.new_text

    counts, text = asyncio.run(read_all())
    assert counts == [READ_AT_ONCE, 2 * READ_AT_ONCE, 3 * READ_AT_ONCE, 100]
    assert text == "a" * 100


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_text_model(folder)
    with relibra_serve(folder, "--name", "tiny") as (url, process):
        yield url, process


@pytest.mark.slow
def test_hostile_bodies_hold_nobody_and_end_with_their_clients(served):
    url, process = served
    held, ended = [0.0], threading.Event()

    def probe():
        with httpx.Client(trust_env=False, timeout=60) as client:
            while not ended.is_set():
                began = time.monotonic()
                assert client.get(f"{url}/v1/models").status_code == 200
                held[0] = max(held[0], time.monotonic() - began)

    watching = threading.Thread(target=probe)
    watching.start()
    bodies = hostile_bodies(MOST_BODY_BYTES - 1000)
    try:
        for case, (path, data) in bodies.items():
            answer = httpx.post(
                f"{url}{path}", content=data, headers={"Content-Type": "application/json"}, timeout=100, trust_env=False
            )
            assert answer.status_code in (200, 400), (case, answer.text)
        for path, data in bodies.values():
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{url}{path}", content=data, headers={"Content-Type": "application/json"}, timeout=0.02)
    finally:
        ended.set()
        watching.join()
    assert held[0] < 0.5, "a quiet machine stays below 0.1: bench reliability"
    end = time.monotonic() + 3
    while len(workers_of(process)) > 2:
        assert time.monotonic() < end, "what has no client any more has ended"
        time.sleep(0.05)


@pytest.mark.slow
def test_large_answer_is_whole_and_holds_nobody(served):
    url, _ = served
    asked = {"prompt": [5, 6], "n": 64, "seed": 1, "max_tokens": 60, "logprobs": 20, "ignore_eos": True}
    large = httpx.post(f"{url}/v1/completions", json=asked, timeout=100, trust_env=False).json()
    small = httpx.post(f"{url}/v1/completions", json={**asked, "n": 1}, timeout=100, trust_env=False).json()
    assert len(large["choices"]) == 64
    assert large["choices"][0]["text"] == small["choices"][0]["text"]
    assert large["choices"][0]["logprobs"]["tokens"] == small["choices"][0]["logprobs"]["tokens"]
    assert large["usage"]["completion_tokens"] == 64 * 60
    assert set(large) == set(small)
