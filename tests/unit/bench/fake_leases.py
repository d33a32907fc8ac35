"""P, D and router in one small server, each at a port of its own, that note what they are asked."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.unit.bench.fake import reply_to

# What D says of its leases, in the shape of its answer.
TOTALS = {
    "mode": "lease",
    "blocks": 240,
    "leases": 20,
    "reclaimed": 0,
    "expired": 0,
    "refused": 0,
}


@dataclass
class FakeNodes:
    """`bodies`: of completions, by node, in the order in which they came. `pause_s`: between two
    tokens of a stream. `fails`: whether streams end in an error. `read`: P has read turns back.
    `keeps`: D does, and tells."""

    pause_s: float = 0.002
    fails: bool = False
    read: int = 0
    leased: bool = True
    keeps: bool = True
    bodies: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {"prefill": [], "decode": [], "router": []}
    )
    ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FakeNodes:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self.ports[node]}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runners = [self._loop.run_until_complete(self._start(node)) for node in self.bodies]
        self._ready.set()
        self._loop.run_forever()
        for runner in runners:
            self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self, node: str) -> web.AppRunner:
        async def complete(request: web.Request) -> web.StreamResponse:
            body = json.loads(await request.read())
            self.bodies[node].append(body)
            return await self._answer(request, node, body)

        async def metrics(_: web.Request) -> web.StreamResponse:
            return web.Response(text=self._metrics())

        async def leases(_: web.Request) -> web.StreamResponse:
            return web.json_response(TOTALS) if self.leased else web.Response(status=404)

        app = web.Application()
        app.router.add_post("/v1/completions", complete)
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/v1/kv_leases", leases)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.ports[node] = runner.addresses[0][1]
        return runner

    def _metrics(self) -> str:
        turns = len(self.bodies["router"])
        return (
            f'vllm:bidir_read_back_total{{outcome="read",reason=""}} {self.read * turns}\n'
            f"vllm:nixl_xfer_time_seconds_count {self.read * len(self.bodies['prefill'])}\n"
            f"vllm:num_preemptions_total {len(self.bodies['decode'])}\n"
            "vllm:kv_cache_usage_perc 0.5\n"
        )

    async def _answer(
        self, request: web.Request, node: str, body: dict[str, Any]
    ) -> web.StreamResponse:
        reply = reply_to(body["prompt"], body["max_tokens"])
        if not body.get("stream"):
            params = {"remote_block_ids": [[1]], "from": node, "turn": len(self.bodies[node])}
            choice = {"text": "x", "token_ids": reply}
            told = params if self.keeps or node != "decode" else None
            return web.json_response({"choices": [choice], "kv_transfer_params": told})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in reply:
            await asyncio.sleep(self.pause_s)
            event: dict[str, Any] = {"choices": [{"text": "x", "token_ids": [token]}]}
            if self.fails:
                event = {"error": {"message": "no memory"}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        end = {"choices": [], "usage": {"prompt_tokens": len(body["prompt"])}}
        await response.write(f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n".encode())
        return response
