"""Connections of clients that leave, keep silent, or are too many."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time

import pytest
import uvicorn

from relibra.serving.server import connections
from tests.serving.server_process import relibra_serve, write_text_model
from tests.serving.test_server import figures


def connect(url):
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)


@pytest.mark.slow
def test_clients_that_leave_are_counted_and_print_nothing(tmp_path):
    write_text_model(tmp_path)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90000"
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
    with relibra_serve(tmp_path, "--name", "tiny") as (url, process):
        for body in (b"", b'{"prompt": "', b"\x00" * 50_000):
            for _ in range(10):
                with connect(url) as client:
                    client.sendall(head + b"\r\n\r\n" + body)
        for nonsense in (b"\x00\x01\r\n\r\n", upgrade):
            with connect(url) as client:
                client.sendall(nonsense)
                client.recv(1000)
        end = time.monotonic() + 10
        left = 'relibra_requests_total{path="/v1/completions",status="499"}'
        while figures(url).get(left, 0) < 30:
            assert time.monotonic() < end, figures(url)
        process.terminate()
        process.wait(30)
        assert process.stderr.read() in ("", "stopped\n")


def test_a_low_limit_of_open_files_is_raised():
    program = (
        "import resource as r; from relibra.serving.server.connections import allow_open_files;"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, {most})); allow_open_files(); print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    for most in (1000, 10_000):
        command = [sys.executable, "-c", program.format(most=most)]
        assert int(subprocess.check_output(command)) == min(most, 8192)


def wait_quickly(monkeypatch, most):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", most)


async def answer(scope, receive, send):
    """Answer everything, as an application."""
    if scope["type"] == "http":
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def test_headers_that_never_end_and_too_many_connections_close(monkeypatch):
    wait_quickly(monkeypatch, most=4)

    async def watch():
        config = uvicorn.Config(answer, http=connections.BoundedConnection, lifespan="off", log_level="error", port=0)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        async def drip(pieces):
            """Send pieces; return the seconds until the connection is closed."""
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            began = asyncio.get_running_loop().time()
            for piece in pieces:
                if not reader.at_eof():
                    writer.write(piece)
                    await asyncio.sleep(0.05)
            with contextlib.suppress(OSError):
                while await reader.read(1000):
                    pass
            writer.close()
            return asyncio.get_running_loop().time() - began

        request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        silent, slow, again = await asyncio.gather(
            drip([]), drip([b"GET / HTTP/1.1\r\n", *[b"A: b\r\n"] * 20]), drip([request, *[b"G"] * 20])
        )
        half_open = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
        spoken = 0
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            spoken += b"ok" in await reader.read(1000)
            half_open.append((reader, writer))
        most = len(server.server_state.connections)
        for _, writer in half_open:
            writer.close()
        server.should_exit = True
        await task
        return silent, slow, again, spoken, most

    silent, slow, again, spoken, most = asyncio.run(watch())
    assert 0.2 < silent < 2
    assert 0.2 < slow < 2
    assert 0.2 < again < 2
    assert spoken == 5
    assert most <= 4
