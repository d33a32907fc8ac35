"""Routers as a person may find them, for the status page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer
from vllm.bidir.router.status import page as status_page
from vllm.bidir.router.status.status import NodeStatus, PoolStatus, Status, Turns
from vllm.bidir.router.telemetry.last_errors import LastError

NOW = 1_780_000_000.0


def status(
    prefill: list[NodeStatus],
    decode: list[NodeStatus],
    lately: Turns | None = None,
    always: Turns | None = None,
    alone: dict[str, int] | None = None,
    errors: list[LastError] | None = None,
    waiting: int = 0,
    kept: int = 0,
) -> Status:
    pools = [
        PoolStatus(role, sum(node.state in ("up", "unknown") for node in nodes), waiting, nodes)
        for role, nodes in (("prefill", prefill), ("decode", decode))
    ]
    none = Turns(0, {})
    return Status(
        version="0.29.0+bidir.1",
        draining=False,
        now=NOW,
        uptime=273_900.0,
        pools=pools,
        conversations=kept,
        leases=kept * 4 // 5,
        last_minutes=10,
        turns_last_minutes=lately or none,
        turns=always or none,
        decode_alone=alone or {},
        errors=errors or [],
    )


def node(name: str, state: str = "up", in_flight: int = 0, share: float = 1.0) -> NodeStatus:
    return NodeStatus(name, state, in_flight, 64, share, state == "up")


BUSY = status(
    [
        node("10.0.12.11:8100", in_flight=3),
        node("10.0.12.12:8100", in_flight=2),
        node("10.0.12.13:8100", "ejected", share=0.1),
        node("10.0.12.14:8100", in_flight=1, share=0.4),
    ],
    [
        node("10.0.13.21:8200", in_flight=41),
        node("10.0.13.22:8200", in_flight=38),
        node("10.0.13.23:8200", in_flight=44),
        node("10.0.13.24:8200", "draining", in_flight=5),
    ],
    Turns(4_120, {"first_turn": 611, "expired": 57, "no_conversation": 12}),
    Turns(912_344, {"first_turn": 140_201, "expired": 20_118, "no_params": 903, "budget": 4_410}),
    {"bypass_n": 812, "peer_gone": 3},
    [
        LastError("prefill leg", "10.0.12.13:8100", "ConnectionResetError", 9, NOW - 12),
        LastError("prefill node", "10.0.12.13:8100", "ejected", 3, NOW - 12),
        LastError("lease renew", "10.0.13.24:8200", "TimeoutError", 2, NOW - 340),
        LastError("decode queue", "", "queue_timeout", 17, NOW - 7_900),
    ],
    waiting=2,
    kept=18_240,
)

_LONG = "[2001:db8:85a3:8d3:1319:8a2e:370:{0:x}]:8200"
MANY = status(
    [node(_LONG.format(0xA000 + number), in_flight=number) for number in range(12)],
    [
        node(_LONG.format(0xB000 + number), state, 10 * number, 0.1 * (number + 1) % 1)
        for number, state in enumerate(["up"] * 9 + ["down", "ejected", "draining"])
    ],
    Turns(0, {"first_turn": 3}),
    Turns(
        12,
        {
            reason: 10**number
            for number, reason in enumerate(("first_turn", "no_conversation", "expired", "budget"))
        },
    ),
    {"bypass_logprobs": 1},
    [
        LastError(
            "decode leg", _LONG.format(0xB000 + number), "ConnectionRefusedError", 12, NOW - 61
        )
        for number in range(40)
    ]
    + [LastError("answer to /v1/chat/completions", "", "503", 123_456, NOW - 9)],
    waiting=1_000,
    kept=100_000,
)

EMPTY = status([], [])
DOWN = status(
    [node("prefill-0.prefill.llm.svc.cluster.local:8100", "down")],
    [node("decode-0.decode.llm.svc.cluster.local:8200", "down")],
    errors=[
        LastError("answer to /v1/messages", "", "503", 4, NOW - 2),
        LastError("decode node", "decode-0.decode.llm.svc.cluster.local:8200", "down: 503", 1, NOW),
    ],
)
_EVIL = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>&lt;b&gt;"
EVIL = status(
    [node(_EVIL)],
    [node(_EVIL)],
    Turns(1, {_EVIL: 1}),
    Turns(1, {_EVIL: 1}),
    {_EVIL: 1},
    [LastError(_EVIL, _EVIL, _EVIL, 1, NOW)],
)
EVIL.version = _EVIL

STATUSES = {"busy": BUSY, "many": MANY, "empty": EMPTY, "down": DOWN, "evil": EVIL}


@asynccontextmanager
async def serving(statuses: Mapping[str, Status]) -> AsyncIterator[str]:
    """The pages of these, as the router sends them, at URL/NAME."""

    async def show(request: web.Request) -> web.Response:
        return web.Response(
            body=status_page.page(statuses[request.match_info["name"]]),
            content_type="text/html",
            charset="utf-8",
            headers=status_page.headers(),
        )

    app = web.Application()
    app.router.add_get("/{name}", show)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()
