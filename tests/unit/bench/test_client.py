"""What is measured of a stream, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.bench.client import Reply, Target, complete, new_session
from tools.bench.errors import BenchError

PAUSE_S = 0.1
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ask = Callable[..., Awaitable[Reply]]


def tokens(*ids: int) -> dict[str, Any]:
    return {"choices": [{"text": "x" * len(ids), "token_ids": list(ids)}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3}}


def stream(*steps: dict[str, Any] | float | str) -> Handler:
    """Sends objects as events, texts as they are, and waits for numbers."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                data = step if isinstance(step, str) else f"data: {json.dumps(step)}\n\n"
                await response.write(data.encode())
        return response

    return answer


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    servers: list[TestServer] = []
    sessions: list[aiohttp.ClientSession] = []

    async def one(handler: Handler, output_tokens: int = 3, links: bool = True) -> Reply:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        servers.append(TestServer(app, host="127.0.0.1"))
        await servers[-1].start_server()
        sessions.append(new_session())
        target = Target(str(servers[-1].make_url("/")).rstrip("/"), "m", links)
        return await complete(sessions[-1], target, [1, 2, 3], output_tokens, "r1", "c1")

    yield one
    for session in sessions:
        await session.close()
    for server in servers:
        await server.close()


DONE = "data: [DONE]\n\n"


async def test_ttft_is_that_of_the_first_chunk_with_a_token(ask: Ask) -> None:
    """Neither the status line nor an empty chunk is a first token."""
    empty = {"choices": [{"text": "", "token_ids": []}]}
    reply = await ask(
        stream(empty, PAUSE_S, tokens(5), PAUSE_S, tokens(6, 7), PAUSE_S, USAGE, DONE)
    )
    assert reply.token_ids == (5, 6, 7)
    assert 100 <= reply.ttft_ms < 190
    assert len(reply.itl_ms) == 1 and 90 <= reply.itl_ms[0] < 190
    # From the first chunk to the end of the stream, over the two tokens after the first.
    assert reply.tpot_ms == pytest.approx((reply.latency_ms - reply.ttft_ms) / 2)
    assert reply.latency_ms >= 300


async def test_a_first_chunk_of_any_length_is_read(ask: Ask) -> None:
    """It repeats the prompt: longer than what a stream reader takes for a line."""
    long = {"choices": [{"text": "x", "token_ids": [5], "prompt_token_ids": [12345] * 200_000}]}
    reply = await ask(stream(long, tokens(6, 7), USAGE, DONE))
    assert [count for _, count in reply.arrivals] == [1, 2]


async def test_lengths_are_forced_and_ids_are_sent(ask: Ask) -> None:
    seen: list[tuple[dict[str, Any], str]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json(), request.headers["X-Request-Id"]))
        return await stream(tokens(5, 6, 7), USAGE, DONE)(request)

    await ask(answer)
    await ask(answer, links=False)
    (body, name), (alone, _) = seen
    assert name == "r1" and body["conversation_id"] == "c1" and "conversation_id" not in alone
    assert body["prompt"] == [1, 2, 3] and body["temperature"] == 0
    assert (body["max_tokens"], body["ignore_eos"]) == (3, True)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((tokens(5), USAGE, DONE), "1 tokens for a prompt of 3"),
        ((tokens(5, 6, 7), {"choices": [], "usage": {"prompt_tokens": 4}}, DONE), "prompt of 4"),
        ((tokens(5), {"error": {"message": "no memory"}}), "no memory"),
        ((tokens(5, 6, 7), USAGE), "its end before that"),
    ],
    ids=["short", "other-prompt", "error", "torn"],
)
async def test_an_answer_that_is_not_what_was_asked_for_is_an_error(
    ask: Ask, steps: tuple[Any, ...], found: str
) -> None:
    with pytest.raises(BenchError) as error:
        await ask(stream(*steps))
    assert "request r1 failed" in str(error.value) and found in str(error.value)


async def test_a_refusal_is_quoted(ask: Ask) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="too long")

    with pytest.raises(BenchError, match="400: too long"):
        await ask(refuse)
