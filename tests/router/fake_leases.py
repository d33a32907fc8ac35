"""The lease endpoints of a fake decode node: what it was asked to renew, release and read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MOST_IDS = 10_000


def lease_id(number: int, rank: int = 0) -> str:
    return f"d{rank}-{number:032x}"


@dataclass(frozen=True)
class Call:
    """One call as it came in. `word` is renew, release or read."""

    word: str
    ids: list[str]
    headers: Mapping[str, str]


@dataclass
class FakeLeases:
    """`duration_s` None: fixed mode, where with `names` turns have lease ids too. Ids in `gone` are
    lost; `status` is answered instead of 200; while `hangs` is set no call is answered. `told` are
    the params by lease id, `read` answers instead of them."""

    duration_s: Any = None
    gone: set[str] = field(default_factory=set)
    status: int = 200
    answer: Any = None
    hangs: bool = False
    names: bool = False
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: Callable[[web.Request], Awaitable[web.Response]] | None = None
    calls: list[Call] = field(default_factory=list)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/kv_leases/{word}", self._serve)
        app.router.add_get("/v1/kv_leases/{id}", self._read)

    def terms(self, number: int) -> dict[str, Any]:
        """What D's params say of this turn's lease."""
        if self.duration_s is None:
            return {"lease_id": lease_id(number)} if self.names else {}
        return {"lease_id": lease_id(number), "lease_duration": self.duration_s}

    def note(self, params: dict[str, Any]) -> None:
        """What D tells a router of a turn, and again when it is asked."""
        if "lease_id" in params:
            self.told[params["lease_id"]] = params

    def renewed(self) -> list[list[str]]:
        return [call.ids for call in self.calls if call.word == "renew"]

    def released(self) -> list[str]:
        return [one for call in self.calls if call.word == "release" for one in call.ids]

    async def _read(self, request: web.Request) -> web.Response:
        named = request.match_info["id"]
        self.calls.append(Call("read", [named], request.headers))
        if self.read is not None:
            return await self.read(request)
        params = None if named in self.gone else self.told.get(named)
        return web.json_response(params or {"error": {}}, status=200 if params else 404)

    async def _serve(self, request: web.Request) -> web.Response:
        word, ids = request.match_info["word"], json.loads(await request.read())["lease_ids"]
        assert word in ("renew", "release")
        self.calls.append(Call(word, ids, request.headers))
        if self.hangs:
            await asyncio.sleep(60)
        if self.status != 200:
            return web.json_response({"error": {}}, status=self.status)
        if self.answer is not None:
            return web.Response(body=self.answer, content_type="application/json")
        if len(ids) > MOST_IDS:
            return web.json_response({"error": {}}, status=413)
        lost = [one for one in ids if one in self.gone]
        there = [one for one in ids if one not in self.gone]
        if word == "release":
            self.gone.update(there)
            return web.json_response({"released": there, "lost": lost})
        return web.json_response({"renewed": dict.fromkeys(there, 1.5), "lost": lost})
