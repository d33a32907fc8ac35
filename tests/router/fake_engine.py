"""An engine's HTTP face without an engine: it records what it is asked and answers by script."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from vllm.bidir.router.clients.errors import error_body
from vllm.bidir.router.options import Address

from tests.router.fake_leases import FakeLeases

P_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p",
    "remote_block_ids": [[1, 2]],
    "remote_host": "elsewhere",
    "remote_port": 5600,
    "remote_request_id": "r",
    "readback": 1,
}


def d_params(turn: int) -> dict[str, Any]:
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "d",
        "remote_block_ids": [[turn, turn + 1]],
        "remote_host": "elsewhere",
        "remote_port": 5700,
        "remote_request_id": f"turn-{turn}",
    }


def long_params(turn: int) -> dict[str, Any]:
    """Those of a long history: so long that the router does not decode them."""
    blocks = [list(range(turn, turn + 400)), [], list(range(7, 90))]
    checkpoints = [[number, f"{number:022}"] for number in range(40)]
    proof = {"v": 1, "hash": "sha256", "checkpoints": checkpoints}
    return d_params(turn) | {"remote_block_ids": blocks, "prefix_proof": proof}


def event(data: dict[str, Any] | str) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


@dataclass
class FakeEngine:
    """One fake node; `script` may answer instead of the default. `keeps`: what D says of a turn."""

    role: str
    # Those of one router differ, as engines do; None: what P_PARAMS and d_params say.
    engine_id: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    script: Callable[[web.Request, dict[str, Any]], Any] | None = None
    keeps: Callable[[int], dict[str, Any]] = d_params
    health: int = 200
    checks: int = 0
    hangs: bool = False
    asked_for_models: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    leases: FakeLeases = field(default_factory=FakeLeases)
    server: TestServer | None = None

    @property
    def address(self) -> Address:
        assert self.server is not None and self.server.port is not None
        return Address(self.server.host, self.server.port, scheme=self.server.scheme)

    async def start(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> FakeEngine:
        app = web.Application(client_max_size=1 << 30)
        self.leases.add_routes(app)
        app.router.add_post("/v1/{rest:.*}", self._generate)
        for path in ("/tokenize", "/detokenize"):
            app.router.add_post(path, self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self.server = TestServer(app, host=host, port=port)
        await self.server.start_server(ssl=tls)
        return self

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.close()

    async def _health(self, request: web.Request) -> web.Response:
        self.checks += 1
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        self.asked_for_models += 1
        if self.hangs:
            await asyncio.Event().wait()
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            refusal = error_body(400, "The body must be an object.", None, request.path)
            return web.Response(status=400, body=refusal, content_type="application/json")
        self.asked.append(body)
        self.headers.append(request.headers)
        try:
            if self.script is not None:
                answer = await self.script(request, body)
                if answer is not None:
                    return answer
            return await self._default(request, body)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    def params(self, number: int) -> dict[str, Any]:
        """What D says of this turn, and will say again when it is asked."""
        params = self._as_own(self.keeps(number)) | self.leases.terms(number)
        self.leases.note(params)
        return params

    def _as_own(self, params: dict[str, Any]) -> dict[str, Any]:
        own = {} if self.engine_id is None else {"remote_engine_id": self.engine_id}
        return params | own

    async def _default(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.role == "prefill":
            choice = {"index": 0, "text": "x", "finish_reason": "length"}
            own = self._as_own(P_PARAMS)
            return web.json_response({"choices": [choice], "kv_transfer_params": own})
        number = len(self.asked)
        params = self.params(number)
        if not body.get("stream"):
            choice = {"index": 0, "text": "hello", "finish_reason": "stop", "tool_calls": [1]}
            whole = {
                "id": "1",
                "choices": [choice],
                "usage": {"n": 2},
                "kv_transfer_params": params,
            }
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in stream_of(params):
            await response.write(piece)
        return response


def stream_of(params: dict[str, Any]) -> list[bytes]:
    """What D streams; the last chunk with a choice carries its params."""
    text = 'say "kv_transfer_params": {} \u2028 now'
    return [
        event({"id": "1", "choices": [{"index": 0, "text": text, "finish_reason": None}]}),
        event(
            {
                "id": "1",
                "choices": [{"index": 0, "text": ".", "finish_reason": "stop"}],
                "kv_transfer_params": params,
            }
        ),
        event({"id": "1", "choices": [], "usage": {"total_tokens": 3}}),
        event("[DONE]"),
    ]


def as_client_sees(params: dict[str, Any]) -> bytes:
    """The same stream without the field, byte for byte where nothing was taken out."""
    first, last, usage, done = stream_of(params)
    chunk = json.loads(last[len(b"data: ") :])
    del chunk["kv_transfer_params"]
    return first + event(chunk) + usage + done


async def begin_stream(request: web.Request) -> web.StreamResponse:
    """An answer that has said no more than that it is a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def cut(request: web.Request) -> None:
    """Break off, as an engine does that dies."""
    assert request.transport is not None
    request.transport.abort()
