"""Two thousand streams open at the same time, through the router as a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
from collections.abc import Iterator

import pytest
from vllm.bidir.router.process import runtime

from tests.router.conftest import until
from tests.router.fake_engine import P_PARAMS, d_params, event
from tests.router.router_process import HARD, router
from tools.bench.router.client import Connection, unchunked
from tools.bench.router.engines import Connection as EngineConnection
from tools.bench.router.memory import resident_mb

STREAMS = 2000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ASKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
# What the router may take for an open stream, and for one whose client does not read.
OPEN_MB, FULL_MB = 0.06, 1.5


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Decode:
    """Begins every stream at once, and ends them when all have begun."""

    def __init__(self) -> None:
        self.open: list[tuple[EngineConnection, int]] = []
        self.all_open = asyncio.Event()

    def answer(self, connection: EngineConnection, path: str, body: bytes) -> None:
        if path == "/health":
            connection.write_json(b"{}")
            return
        user = int(json.loads(body)["user"])
        connection.transport.write(HEAD + chunk(event(f"first {user}")))
        self.open.append((connection, user))
        if len(self.open) == STREAMS:
            self.all_open.set()

    def end_all(self) -> None:
        for connection, user in self.open:
            kept = event({"choices": [{"index": 0}], "kv_transfer_params": d_params(user)})
            rest = chunk(event(f"second {user}")) + chunk(kept) + chunk(event("[DONE]"))
            connection.transport.write(rest + b"0\r\n\r\n")


def seen_by(user: int) -> bytes:
    last = event({"choices": [{"index": 0}]})
    return event(f"first {user}") + event(f"second {user}") + last + event("[DONE]")


def prefill(connection: EngineConnection, path: str, body: bytes) -> None:
    connection.write_json(json.dumps({"choices": [], "kv_transfer_params": P_PARAMS}).encode())


SOFT = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.fixture
def many_files() -> Iterator[None]:
    if HARD != resource.RLIM_INFINITY and HARD < 5 * STREAMS:
        pytest.skip(f"needs {5 * STREAMS} open files; ulimit -Hn says {HARD}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (5 * STREAMS, HARD))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))


async def test_all_are_served_whole_and_take_little_memory(many_files: None) -> None:
    decode = Decode()
    async with router(prefill, decode.answer) as (port, pid):
        before = resident_mb(pid)

        async def one(user: int) -> bool:
            connection = await Connection.open("127.0.0.1", port)
            body = {"model": "m", "prompt": "p", "stream": True, "user": str(user)}
            reply = await connection.post("/v1/completions", json.dumps(body).encode())
            connection.close()
            return reply.status == 200 and unchunked(reply.body) == seen_by(user)

        asking = [asyncio.ensure_future(one(user)) for user in range(STREAMS)]
        await asyncio.wait_for(decode.all_open.wait(), 60)
        open_mb = resident_mb(pid)
        decode.end_all()
        assert all(await asyncio.wait_for(asyncio.gather(*asking), 60))
        assert open_mb - before < STREAMS * OPEN_MB


async def test_clients_that_do_not_read_take_little_memory(many_files: None) -> None:
    """What they have not read stays with D."""
    # More each than the system's own buffers can take.
    clients, lines = 24, b"data: %b\n\n" % (b"x" * 9_992) * 1500
    written: list[asyncio.Transport] = []

    def decode(connection: EngineConnection, path: str, body: bytes) -> None:
        if path == "/health":
            connection.write_json(b"{}")
            return
        connection.transport.write(HEAD + chunk(lines))
        written.append(connection.transport)

    def left() -> int:
        return sum(transport.get_write_buffer_size() for transport in written)

    async with router(prefill, decode) as (port, pid):
        before = resident_mb(pid)
        body = b'{"model": "m", "prompt": "p", "stream": true}'
        connections = []
        for _ in range(clients):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(ASKED % len(body) + body)
            connections.append(connection)
        await until(lambda: len(written) == clients, 30)
        last = -1
        while left() != last:
            last = left()
            await asyncio.sleep(0.2)
        assert all(transport.get_write_buffer_size() for transport in written)
        assert resident_mb(pid) - before < clients * FULL_MB
        for connection in connections:
            connection.close()


def test_few_files_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda which, to: set_to.append(to))
    with caplog.at_level(logging.WARNING, "vllm_bidir_router"):
        runtime.open_many_files()
    assert set_to == [(1024, 1024)]
    assert "only 1024 files may be open" in caplog.text


@pytest.mark.parametrize("soft", [256, resource.RLIM_INFINITY])
def test_where_nothing_limits_files_there_is_no_warning(
    soft: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda which, to: set_to.append(to))
    with caplog.at_level(logging.WARNING, "vllm_bidir_router"):
        runtime.open_many_files()
    assert set_to == ([] if soft == resource.RLIM_INFINITY else [(1 << 20, -1)])
    assert not caplog.text
