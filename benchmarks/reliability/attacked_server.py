"""`relibra serve` under hostile bodies, with stopped workers, and the stop beside them: what others notice of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

PROMPT = "3+4="
JSON = {"Content-Type": "application/json"}
MOST_HELD_SECONDS, MOST_STOP_SECONDS, MOST_BYTES = 0.1, 5.0, 2 << 30
TIMEOUT_SECONDS = 10.0
"""Of the server's --timeout."""
AT_ONCE = 16
_READY = re.compile(r"at http://[\d.]+:(\d+)/v1")


def hostile_bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Return path and body, of about so many bytes, of each case."""

    def body(start: bytes, piece: bytes, end: bytes) -> bytes:
        return start + piece * ((size - len(start) - len(end)) // len(piece)) + end

    completions, chat, tokens = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
    return {
        "one long text": (completions, body(b'{"prompt":"', b"3+4=", b'"}')),
        "short texts": (completions, body(b'{"prompt":[', b'"3+4=",', b'"3"]}')),
        "long texts": (completions, body(b'{"prompt":[', b'"' + b"3+4=" * 4096 + b'",', b'"3"]}')),
        "lists of ids": (completions, body(b'{"prompt":[', b"[1],", b"[1]]}")),
        "ids that end in a text": (completions, body(b'{"prompt":[', b"[1],", b'"3"]}')),
        "long ids": (tokens, body(b'{"token_ids":[', b"1,", b"1]}")),
        "wide unknown field": (completions, body(b'{"prompt":"3+4=","x":[', b"[],", b"[]]}")),
        "deep unknown field": (completions, body(b'{"prompt":"3+4=","x":[', b'[[[[[[[["a"]]]]]]]],', b"0]}")),
        "wide stream options": (
            completions,
            body(b'{"prompt":"3+4=","stream_options":{"metadata":[', b"[],", b"[]]}}"),
        ),
        "unknown keys": (completions, b'{"prompt":"3+4=",%s}' % b",".join(b'"%d":0' % n for n in range(size // 12))),
        "messages": (chat, body(b'{"messages":[', b'{"role":"user","content":"3"},', b'{"role":"user"}]}')),
        "no JSON": (completions, body(b"", b"[", b"")),
    }


class AttackedServer:
    """A server of the built-in model, in a process group of its own."""

    def __init__(self, home: Path, *options: str) -> None:
        """Start it, and wait until it takes requests."""
        relibra, self.log = [sys.executable, "-m", "relibra"], home / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if not (home / "model").exists():
            subprocess.run([*relibra, "export", str(home / "model")], check=True, capture_output=True, env=environment)
        words = [*relibra, "serve", str(home / "model"), "--port", "0", "--timeout", str(TIMEOUT_SECONDS), *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*words, "--until-eof"],  # it ends with this process
                stdin=subprocess.PIPE,
                stderr=log,
                stdout=log,
                env=environment,
                start_new_session=True,
            )
        while not (found := _READY.search(self.log.read_text())):
            assert self.process.poll() is None, f"the server did not start: {self.log.read_text()}"
            time.sleep(0.05)
        self.port = int(found.group(1))

    def ask(self, path: str, body: bytes | None = None, seconds: float = 120.0) -> tuple[int, bytes]:
        """Return status and answer; status 0 where the connection breaks."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request("GET" if body is None else "POST", path, body, JSON)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()

    def complete(self, seconds: float = 120.0, **fields: Any) -> tuple[int, bytes]:
        """Ask for a completion."""
        return self.ask("/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 4, **fields}).encode(), seconds)

    def workers(self) -> list[dict[str, Any]]:
        """Return what the server says of its workers."""
        return json.loads(self.ask("/health")[1])["workers"]

    def memory(self, workers: set[int]) -> int:
        """Return bytes of the server and of what it has forked, shared pages once."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        total = 0
        for pid in {self.process.pid, *map(int, children.read_text().split())} - workers:
            with suppress(OSError):
                found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
                total += int(found.group(1)) << 10 if found else 0
        return total

    def stop(self) -> float | None:
        """Send SIGINT; return the seconds until it has ended, None where it had to be killed."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
            return time.monotonic() - began
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """End it, and wait for it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def attacked_server(home: Path, *options: str) -> Iterator[AttackedServer]:
    """Run a server."""
    server = AttackedServer(home, *options)
    try:
        yield server
    finally:
        server.kill()


class Probe(threading.Thread):
    """Asks for something small again and again; `held` is the longest time that it took, `most` the most memory."""

    def __init__(self, server: AttackedServer) -> None:
        """Begin when started."""
        super().__init__(daemon=True)
        self._server, self._ended = server, threading.Event()
        self._workers = {one["pid"] for one in server.workers()}
        self.held, self.most = 0.0, 0

    def run(self) -> None:
        """Ask until the end."""
        while not self._ended.wait(0.01):
            began = time.monotonic()
            status, _ = self._server.ask("/v1/models")
            self.held = max(self.held, time.monotonic() - began if status == 200 else 60.0)
            self.most = max(self.most, self._server.memory(self._workers))

    def end(self) -> None:
        """Stop asking."""
        self._ended.set()
        self.join()


def beside_probe(server: AttackedServer, asked: Callable[[], list[int]]) -> dict[str, Any]:
    """Return what a probe noticed while something was asked for, and the statuses of the answers."""
    probe = Probe(server)
    probe.start()
    began = time.monotonic()
    statuses = asked()
    seconds = time.monotonic() - began
    time.sleep(0.2)
    probe.end()
    return {
        "status": ", ".join(map(str, sorted(set(statuses)))),
        "seconds": seconds,
        "held ms": 1e3 * probe.held,
        "peak MiB": probe.most / 2**20,
        "neither": int(probe.held > MOST_HELD_SECONDS or probe.most > MOST_BYTES or not {0, 500}.isdisjoint(statuses)),
    }


def hostile_rows(server: AttackedServer, size: int, answer: int) -> Iterator[dict[str, Any]]:
    """Send hostile bodies, one and AT_ONCE at once, and ask for an answer of 128 choices with 20 log-probs each.

    answer   tokens of a choice
    """
    bodies = hostile_bodies(size)

    def asked_once(path: str, body: bytes) -> list[int]:
        return [server.ask(path, body)[0]]

    for case, (path, body) in bodies.items():
        yield {"case": case, **beside_probe(server, partial(asked_once, path, body))}

    def all_at_once() -> list[int]:
        cases, statuses = list(bodies.values()), list[int]()
        threads = [
            threading.Thread(target=lambda one=one: statuses.append(server.ask(*one)[0]))
            for one in (cases * AT_ONCE)[:AT_ONCE]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statuses

    yield {"case": f"{AT_ONCE} at once", **beside_probe(server, all_at_once)}
    asked = {"n": 128, "logprobs": 20, "max_tokens": answer, "ignore_eos": True}
    yield {"case": "128 answers with log-probs", **beside_probe(server, lambda: [server.complete(**asked)[0]])}


def stopped_rows(server: AttackedServer) -> Iterator[dict[str, Any]]:
    """Send SIGSTOP to each worker; measure until a request under way is told, and until all is well again."""
    for worker in server.workers():
        answers: list[int] = []
        asked = threading.Thread(
            target=lambda answers=answers: answers.append(server.complete(max_tokens=4000, ignore_eos=True)[0])
        )
        asked.start()
        while not json.loads(server.ask("/health")[1])["running"]:
            time.sleep(0.01)
        began = time.monotonic()
        os.kill(worker["pid"], signal.SIGSTOP)
        asked.join()
        told = time.monotonic() - began
        while server.ask("/health")[0] != 200 or server.complete()[0] != 200:
            assert time.monotonic() - began < 300, server.log.read_text()
            time.sleep(0.1)
        yield {
            "case": f"SIGSTOP of {worker['role']} worker {worker['number']}",
            "status": str(answers[0]),
            "seconds": time.monotonic() - began,
            "told seconds": told,
            "neither": int(answers[0] != 503 or told > TIMEOUT_SECONDS + 5),
        }


def stop_row(home: Path, size: int, *, stopped: bool) -> dict[str, Any]:
    """Stop a server while AT_ONCE hostile bodies are under way, or while a worker is stopped; measure its end."""
    with attacked_server(home) as server:
        if stopped:
            os.kill(server.workers()[0]["pid"], signal.SIGSTOP)
            threading.Thread(target=server.complete, daemon=True).start()
        else:
            for path, body in (list(hostile_bodies(size).values()) * AT_ONCE)[:AT_ONCE]:
                threading.Thread(target=server.ask, args=(path, body), daemon=True).start()
        time.sleep(1.0)
        seconds, said = server.stop(), server.log.read_text()
    beside = "a stopped worker" if stopped else f"{AT_ONCE} hostile bodies"
    late = seconds is None or seconds > MOST_STOP_SECONDS or "Traceback" in said
    return {"case": f"SIGINT beside {beside}", "seconds": seconds, "neither": int(late)}


def rows_of(found: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the rows of a result file."""
    facts = {
        "table": "attack",
        "label": "measured",
        "unit": "status: of the answers; seconds: until the answer, until the worker is back, until the server has "
        "ended; held ms: longest time that another client waited for /v1/models meanwhile; peak MiB: of the server and "
        "what it forks; told seconds: until a request under way was told; neither: an end other than promised",
        "seed": 0,
        "repetitions": 1,
        "configuration": f"built-in model, 1 attention and 2 expert workers, --timeout {TIMEOUT_SECONDS:g}; bodies of "
        f"{size / 2**20:.1f} MiB",
    }
    columns = ("status", "seconds", "held ms", "peak MiB", "told seconds", "neither")
    return [{"case": one["case"], **facts, **{key: one.get(key) for key in columns}} for one in found]
