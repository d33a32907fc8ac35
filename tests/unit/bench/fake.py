"""Router and engines in one small server that answers in a moment and writes their log lines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tools.bench.arms import Arm
from tools.bench.client import Target
from tools.bench.logs import conversation_digest
from tools.bench.servers import READ_BYTES, READ_TOKENS

BLOCK = 128
BYTES_PER_TOKEN = 8192
VOCABULARY = tuple(range(100, 1000))
_PREFIX = "INFO 11-29 18:00:00 "


class FakeServing:
    """A running arm. `asked`: prompts by request id, in order; `stay_off`: nothing is read back."""

    def __init__(self, arm: Arm, folder: Path, stay_off: bool = False) -> None:
        self.arm = arm
        self.folder = folder
        self.asked: dict[str, list[int]] = {}
        self.totals_read = {READ_TOKENS: 0.0, READ_BYTES: 0.0}
        self._reads = arm.bidirectional and not stay_off
        self._kept: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self.port = 0

    def __enter__(self) -> FakeServing:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def target(self) -> Target:
        return Target(f"http://127.0.0.1:{self.port}", "m", self.arm.links)

    def block_size(self) -> int:
        return BLOCK

    def totals(self) -> dict[str, float]:
        return self.totals_read

    def commands(self) -> dict[str, list[str]]:
        return {"prefill-0": ["vllm", "serve", "m"]}

    def environment(self) -> dict[str, dict[str, str]]:
        return {"prefill-0": {"A": "1"}}

    def connectors(self) -> dict[str, dict[str, Any]]:
        return {"prefill-0": {"bidirectional_kv_xfer": self.arm.bidirectional}}

    def check_alive(self) -> None:
        pass

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        name, prompt = request.headers["X-Request-Id"], body["prompt"]
        self.asked[name] = prompt
        if not self.arm.disaggregated:
            return web.Response(status=500)
        conversation = body.get("conversation_id")
        self._log(name, conversation, len(prompt))
        reply = reply_to(prompt, body["max_tokens"])
        if conversation is not None:
            self._kept[conversation] = len(prompt) + len(reply) - 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in reply:
            await _send(response, {"choices": [{"text": "x", "token_ids": [token]}]})
        await _send(response, {"choices": [], "usage": {"prompt_tokens": len(prompt)}})
        await response.write(b"data: [DONE]\n\n")
        return response

    def _log(self, name: str, conversation: str | None, prompt: int) -> None:
        kept = self._kept.get(conversation or "", 0) if self._reads else 0
        read = min(kept, prompt - 1) if kept >= BLOCK else 0
        digest = "-" if conversation is None else conversation_digest("", conversation)
        turn = f"{_PREFIX}[router] [{name}] conv={digest}: "
        looked = "HIT (127.0.0.1:2)" if kept else "MISS (first_turn)"
        _append(self.folder / "router.log", f"{turn}cache {looked}")
        _append(self.folder / "router.log", f"{turn}Prefill done in 20ms (127.0.0.1:1)")
        if not kept:
            return
        line = (
            f"{_PREFIX}[scheduler.py:1] read-back req=cmpl-{name}-0-0a1b2c3d peer=d prompt={prompt}"
        )
        if read:
            blocks = -(-read // BLOCK)
            moved = blocks * BLOCK * BYTES_PER_TOKEN
            self.totals_read[READ_TOKENS] += read
            self.totals_read[READ_BYTES] += moved
            line += (
                f" local=0 verified={kept} read={read} computed={prompt - read} blocks={blocks} "
                f"mb={moved / 1e6:.1f} hold_ms=1.0 transfer_ms=5.0 confirm_ms=0.5 outcome=read"
            )
        else:
            line += (
                f" local=0 verified=0 read=0 computed={prompt} outcome=recompute reason=no_proof"
            )
        _append(self.folder / "prefill-0.log", line)


class Starts:
    """Starts fakes, and keeps what each was asked."""

    def __init__(self, stay_off: bool = False) -> None:
        self.started: list[FakeServing] = []
        self._stay_off = stay_off

    @contextmanager
    def __call__(self, arm: Arm, folder: Path) -> Iterator[FakeServing]:
        with FakeServing(arm, folder, self._stay_off) as serving:
            self.started.append(serving)
            yield serving


def reply_to(prompt: list[int], count: int) -> list[int]:
    """Tokens that depend on the whole prompt, as a model's greedy ones do."""
    seed = hashlib.sha256(repr(prompt).encode()).digest()
    return [VOCABULARY[seed[n % 32] + n % 7] for n in range(count)]


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as log:
        log.write(line + "\n")


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
