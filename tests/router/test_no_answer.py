"""What engines say with a status of 200, or begin to, and is no answer all the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.router.conftest import MakeSetup, Setup
from tests.router.fake_apis import named
from tests.router.fake_engine import (
    FakeEngine,
    as_client_sees,
    begin_stream,
    cut,
    d_params,
    event,
)

ERROR = {"error": {"message": "no", "type": "InternalServerError", "code": 500}}


OPENING = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
USED = event({"choices": [], "usage": {"completion_tokens": 0}})
RESPONSES_BEGIN = [
    named(f"response.{kind}", {"response": {"output": [], "usage": None, "status": "in_progress"}})
    for kind in ("created", "in_progress")
]
# What each API's engine streams when it cannot read what P hands over, in pieces as they come.
CANNOT_READ = {
    "/v1/completions": [event(ERROR), event("[DONE]")],
    "/v1/chat/completions": [event(OPENING), event(ERROR), event("[DONE]")],
    "/v1/messages": [
        b"event: message_start\n" + event({"type": "message_start", "message": {"id": "1"}}),
        b"event: error\n" + event({"type": "error", "error": {"type": "internal_error"}}),
    ],
    "/v1/responses": [*RESPONSES_BEGIN, b"event: unknown\n" + event(ERROR)],
}
# As the base release does where it tells nobody: but for Responses a stream of no tokens.
WITHOUT_A_WORD = {
    "/v1/completions": [USED, event("[DONE]")],
    "/v1/chat/completions": [event(OPENING), event(OPENING), USED, event("[DONE]")],
    "/v1/messages": [
        CANNOT_READ["/v1/messages"][0],
        named("message_delta", {"delta": {}, "usage": {"output_tokens": 0}}),
        named("message_stop", {}),
    ],
    "/v1/responses": RESPONSES_BEGIN,
}


@pytest.mark.parametrize(
    ("path", "how"),
    [
        *((path, how) for path in CANNOT_READ for how in ("500", "in pieces", "at once")),
        *((path, "without a word") for path in WITHOUT_A_WORD),
        ("/v1/responses", "breaks off"),
    ],
)
async def test_a_d_that_fails_with_what_p_hands_over_computes_it_all(
    path: str, how: str, make_setup: MakeSetup
) -> None:
    """P is gone before D has read from it: no other D could, either, and none is to blame."""
    setup = await make_setup(decode=2, eject_after=1)

    async def cannot_read(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if "kv_transfer_params" not in body:
            return None
        if how == "500":
            return web.json_response(ERROR, status=500)
        response = await begin_stream(request)
        pieces = CANNOT_READ[path]
        if how in ("without a word", "breaks off"):
            pieces = WITHOUT_A_WORD[path]
        for piece in [b"".join(pieces)] if how == "at once" else pieces:
            await response.write(piece)
            await asyncio.sleep(0.01)
        if how == "breaks off":
            cut(request)
        return response

    for engine in setup.decode:
        engine.script = cannot_read
    chat = {"messages": [{"role": "user", "content": "hello"}], "prompt": None}
    more = {} if path == "/v1/completions" else chat
    status, body = await setup.ask(path, stream=True, **more)
    assert (status, body) == (200, as_client_sees(d_params(2)))
    assert [len(engine.asked) for engine in setup.decode] == [2, 0]
    alone = setup.metric("bidir_router_decode_alone_total", reason="transfer_failed")
    assert alone == 1
    assert setup.metric("bidir_router_ejections_total", role="decode") == 0


def aborted(path: str, stream: bool) -> bytes:
    """What an engine that is shut down answers, with 200; whole answers of it may have begun."""
    choice = {"index": 0, "finish_reason": "abort"}
    none = {"output": [], "content": [], "usage": {"output_tokens": 0}}
    if not stream:
        text = {"text": "hel"} if path == "/v1/completions" else {"message": {"content": ""}}
        whole = {"choices": [choice | text]} if "completions" in path else none
        return json.dumps(whole).encode()
    if path == "/v1/responses":
        completed = named("response.completed", {"response": none | {"status": "completed"}})
        return b"".join([*RESPONSES_BEGIN, completed])
    if path == "/v1/messages":
        return b"".join(WITHOUT_A_WORD[path])
    opening = event(OPENING) if path == "/v1/chat/completions" else b""
    said = event({"choices": [choice | {"delta": {}, "text": ""}]})
    return opening + said + event("[DONE]")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(CANNOT_READ))
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_turn_that_a_node_aborts_is_served_by_another(
    role: str, path: str, stream: bool, make_setup: MakeSetup
) -> None:
    setup = await make_setup(2, 2)
    engines: list[FakeEngine] = getattr(setup, role)

    async def shuts_down(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return web.Response(body=aborted(path, False), content_type="application/json")
        response = await begin_stream(request)
        await response.write(aborted(path, True))
        return response

    engines[0].script = shuts_down
    chat = {"messages": [{"role": "user", "content": "hello"}], "prompt": None}
    more = {} if path == "/v1/completions" else chat
    for _ in range(2):
        status, body = await setup.ask(path, stream=stream, **more)
        assert status == 200 and (b'now"' if stream else b'"hello"') in body
    assert len(engines[1].asked) == 2
    assert all("kv_transfer_params" in asked for asked in engines[1].asked)
    kind = {"leg": role, "kind": "AbortedError"}
    # D may have failed with what P handed over: it is asked once more, without.
    tries = 2 if role == "decode" else 1
    assert setup.metric("bidir_router_leg_failures_total", **kind) == tries


async def test_text_that_speaks_of_an_abort_is_an_answer(setup: Setup) -> None:
    text = '"finish_reason": "abort", "output_tokens": 0'

    async def answers(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [{"text": text, "finish_reason": "stop"}]})

    setup.decode[0].script = answers
    status, body = await setup.ask()
    assert status == 200 and json.loads(body)["choices"][0]["text"] == text


async def test_an_opening_is_passed_on_with_what_follows(setup: Setup) -> None:
    async def answers(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for piece in (event(OPENING), event({"choices": [{"delta": {"content": "x"}}]})):
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    setup.decode[0].script = answers
    status, body = await setup.ask("/v1/chat/completions", stream=True, messages=[])
    assert status == 200 and body.count(b"data: ") == 2 and body.startswith(event(OPENING))


async def test_a_stream_that_begins_with_an_error_is_no_stream_where_nothing_else_is_left(
    setup: Setup,
) -> None:
    async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(event(ERROR) + event("[DONE]"))
        return response

    setup.decode[0].script = broken
    status, body = await setup.ask(stream=True)
    assert (status, json.loads(body)) == (500, ERROR)
