"""A router in this process, between fake engines on real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import aiohttp
import pytest
from vllm.bidir.router.http.listener import Listener
from vllm.bidir.router.nodes.options import NodeOptions
from vllm.bidir.router.options import Address, RouterOptions
from vllm.bidir.router.process.runtime import new_event_loop
from vllm.bidir.router.router import Router
from vllm.bidir.router.server import listener

from tests.router.fake_engine import FakeEngine

# What speaks HTTP to clients does so on both loops that a router may run on.
_ON_BOTH_LOOPS = ("test_connection", "test_http", "test_draining", "test_clients_go", "test_tls")

BODY = {"model": "m", "prompt": "hello", "max_tokens": 8}
JSON = {"Content-Type": "application/json"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which loops a test runs on."""
    if item.path.stem in _ON_BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop, "uvloop": new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


class RouterServer:
    """A router that listens on a free port."""

    def __init__(self, router: Router, host: str = "127.0.0.1") -> None:
        self._router = router
        self._host = host
        self._lasts = AsyncExitStack()
        self.listener: Listener = listener(router, host, 0)

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def url(self) -> str:
        scheme = "http" if self._router.options.security.tls is None else "https"
        return f"{scheme}://{Address(self._host, self.port)}"

    async def start_server(self) -> None:
        await self._lasts.enter_async_context(self._router.lifespan())
        await self.listener.start()

    async def close(self) -> None:
        await self.listener.close()
        await self._lasts.aclose()


@dataclass
class Setup:
    """One router with its engines, and a client of it."""

    router: Router
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    url: str
    client: aiohttp.ClientSession
    server: RouterServer

    async def ask(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, bytes]:
        body = {**BODY, **fields}
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.read()

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def another_router(setup: Setup, **options: Any) -> AsyncIterator[Setup]:
    """A second router in front of the same engines."""
    router = Router(replace(setup.router.options, **options))
    server = RouterServer(router)
    await server.start_server()
    try:
        yield replace(setup, router=router, url=server.url, server=server)
    finally:
        await server.close()


MakeSetup = Callable[..., Awaitable[Setup]]


@pytest.fixture
async def make_setup() -> AsyncIterator[MakeSetup]:
    closing: list[Callable[[], Awaitable[Any]]] = []

    async def make(
        prefill: int | tuple[Address, ...] = 1,
        decode: int | tuple[Address, ...] = 1,
        **options: Any,
    ) -> Setup:
        """So many engines, or none where addresses are given."""
        engines: dict[str, list[FakeEngine]] = {"prefill": [], "decode": []}
        addresses: dict[str, tuple[Address, ...]] = {}
        for role, given in (("prefill", prefill), ("decode", decode)):
            for number in range(given if isinstance(given, int) else 0):
                engine_id = f"{role}-{number}" if number else None
                engines[role].append(await FakeEngine(role, engine_id).start())
                closing.append(engines[role][-1].stop)
            started = tuple(engine.address for engine in engines[role])
            addresses[role] = started if isinstance(given, int) else given
        made = RouterOptions(**addresses)
        # Options of nodes are named as the others are.
        names = {one.name for one in fields(NodeOptions)} & options.keys()
        nodes = NodeOptions(**{name: options.pop(name) for name in names})
        router = Router(replace(made, nodes=nodes, **options))
        server = RouterServer(router)
        await server.start_server()
        client = aiohttp.ClientSession()
        closing.extend([server.close, client.close])
        return Setup(
            router,
            engines["prefill"],
            engines["decode"],
            server.url,
            client,
            server,
        )

    yield make
    for close in reversed(closing):
        await close()


@pytest.fixture
async def setup(make_setup: MakeSetup) -> Setup:
    return await make_setup()
