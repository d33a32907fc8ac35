"""OpenAI's and Anthropic's own Python clients, before a router whose engines fail in all ways."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from vllm.bidir.router.clients.security import Security, key_digest

from tests.router.conftest import MakeSetup, Setup
from tests.router.fake_apis import named, speak_all
from tests.router.fake_engine import P_PARAMS, d_params, event

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
PIECES = ("Good ", "day \u00fc\u4e2d\U0001f600", ".")

Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
Ask = Callable[["Clients"], Awaitable[Any]]
MakeClients = Callable[..., "Clients"]


# Making one with the system's certificates takes a tenth of a second, and it is not used here.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Clients:
    """Both clients of one router; each tries once."""

    def __init__(self, setup: Setup, api_key: str = "k", **options: Any) -> None:
        options = {"max_retries": 0, "timeout": 20.0, "api_key": api_key, **options}
        # The environment's proxies cannot reach this machine's servers.
        http = {"verify": NO_TLS, "trust_env": False}
        self.openai = openai.AsyncOpenAI(
            base_url=f"{setup.url}/v1",
            http_client=openai.DefaultAsyncHttpxClient(**http),
            **options,
        )
        self.anthropic = anthropic.AsyncAnthropic(
            base_url=setup.url, http_client=anthropic.DefaultAsyncHttpxClient(**http), **options
        )

    async def chat(self, **fields: Any) -> Any:
        return await self.openai.chat.completions.create(model="m", messages=MESSAGES, **fields)

    async def complete(self, **fields: Any) -> Any:
        return await self.openai.completions.create(model="m", prompt="Hi", **fields)

    async def respond(self, **fields: Any) -> Any:
        return await self.openai.responses.create(model="m", input="Hi", **fields)

    async def message(self, **fields: Any) -> Any:
        return await self.anthropic.messages.create(
            model="m", max_tokens=8, messages=MESSAGES, **fields
        )


ASKS: dict[str, tuple[Ask, Any]] = {
    "chat": (Clients.chat, openai),
    "completions": (Clients.complete, openai),
    "responses": (Clients.respond, openai),
    "messages": (Clients.message, anthropic),
}


@pytest.fixture
async def make_clients() -> AsyncIterator[MakeClients]:
    made: list[Clients] = []

    def make(*args: Any, **options: Any) -> Clients:
        made.append(Clients(*args, **options))
        return made[-1]

    yield make
    for clients in made:
        await clients.openai.close()
        await clients.anthropic.close()


@pytest.fixture
def clients(setup: Setup, make_clients: MakeClients) -> Clients:
    return make_clients(setup)


def chat_script(engine_role: str) -> Script:
    """Chats as vLLM answers them, whole or in pieces."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = P_PARAMS if engine_role == "prefill" else d_params(1)
        made = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(PIECES)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({**made, "choices": [choice], "kv_transfer_params": params})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in PIECES:
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            await response.write(event({**made, "choices": [choice]}))
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        await response.write(event({**made, "choices": [choice], "kv_transfer_params": params}))
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        await response.write(event({**made, "choices": [], "usage": usage}))
        await response.write(event("[DONE]"))
        return response

    return script


def refusing(status: int, **headers: str) -> Script:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": "engine", "type": "t", "param": "p", "code": status}
        if request.path == "/v1/messages":
            whole = {"type": "error", "error": {"type": "t", "message": "engine"}}
        else:
            whole = {"error": error}
        return web.json_response(whole, status=status, headers=headers)

    return script


async def test_openais_client_reads_chats_whole_and_streamed(
    setup: Setup, clients: Clients
) -> None:
    for engine in (*setup.prefill, *setup.decode):
        engine.script = chat_script(engine.role)
    whole = await clients.chat()
    assert whole.choices[0].message.content == "".join(PIECES)
    assert not hasattr(whole, "kv_transfer_params")
    stream = await clients.chat(stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    said = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    assert "".join(filter(None, said)) == "".join(PIECES)
    assert chunks[-1].usage.total_tokens == 4


async def test_clients_stream_responses_and_messages(setup: Setup, clients: Clients) -> None:
    for engine in (*setup.prefill, *setup.decode):
        speak_all(engine)
    events = [one async for one in await clients.respond(stream=True)]
    assert [one.type for one in events] == [
        "response.created",
        "response.output_text.delta",
        "response.completed",
    ]
    assert not hasattr(events[-1].response, "kv_transfer_params")
    kinds = [one.type async for one in await clients.message(stream=True)]
    assert kinds == ["message_start", "content_block_delta", "message_delta", "message_stop"]


@pytest.mark.parametrize(("ask", "sdk"), ASKS.values(), ids=ASKS)
async def test_a_refusal_of_the_router_is_the_clients_own_error(
    setup: Setup, clients: Clients, ask: Ask, sdk: Any
) -> None:
    with pytest.raises(sdk.BadRequestError) as caught:
        await ask(clients, extra_body={"kv_transfer_params": {"remote_host": "x"}})
    assert "`kv_transfer_params` cannot be set by a client" in str(caught.value)
    if sdk is openai:
        assert caught.value.param == "kv_transfer_params"
        assert caught.value.type == "invalid_request_error"
    with pytest.raises(sdk.BadRequestError, match="conversation_id"):
        await ask(clients, extra_body={"conversation_id": 1})
    with pytest.raises(sdk.BadRequestError, match="X-Conversation-End"):
        await ask(clients, extra_headers={"X-Conversation-End": "maybe"})


@pytest.mark.parametrize(("ask", "sdk"), ASKS.values(), ids=ASKS)
async def test_keys_sizes_and_ends_have_the_errors_that_clients_know(
    make_setup: MakeSetup, make_clients: MakeClients, ask: Ask, sdk: Any
) -> None:
    security = Security(client_keys=frozenset((key_digest("right"),)))
    setup = await make_setup(security=security, max_body=2000)
    with pytest.raises(sdk.AuthenticationError):
        await ask(make_clients(setup, "wrong"))
    right = make_clients(setup, "right")
    with pytest.raises(sdk.APIStatusError) as caught:
        await ask(right, extra_body={"user": "x" * 3000})
    assert caught.value.status_code == 413
    setup.router.draining.tell()
    await setup.router.draining.run()
    with pytest.raises(sdk.APIStatusError, match="shutting down") as caught:
        await ask(right)
    assert caught.value.status_code == 503 and caught.value.response.headers["Retry-After"] == "1"


@pytest.mark.parametrize(("ask", "sdk"), ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("status", "error"),
    [(404, "NotFoundError"), (422, "UnprocessableEntityError")],
)
async def test_a_refusal_of_an_engine_comes_as_it_is(
    setup: Setup, clients: Clients, ask: Ask, sdk: Any, leg: str, status: int, error: str
) -> None:
    getattr(setup, leg)[0].script = refusing(status)
    with pytest.raises(getattr(sdk, error), match="engine") as caught:
        await ask(clients)
    assert caught.value.status_code == status
    if sdk is openai:
        assert caught.value.response.headers["X-Request-Id"] == caught.value.request_id


@pytest.mark.parametrize(("ask", "sdk"), (ASKS["chat"], ASKS["messages"]))
async def test_a_client_waits_as_long_as_an_engine_says_and_tries_again(
    setup: Setup, make_clients: MakeClients, ask: Ask, sdk: Any
) -> None:
    times: list[float] = []
    speak_all(setup.decode[0])
    answer = setup.decode[0].script

    async def busy_once(request: web.Request, body: dict[str, Any]) -> Any:
        times.append(time.monotonic())
        if len(times) == 1:
            return await refusing(429, **{"Retry-After": "1"})(request, body)
        assert answer is not None
        return await answer(request, body)

    setup.decode[0].script = busy_once
    with pytest.raises(sdk.RateLimitError) as caught:
        await ask(make_clients(setup))
    assert caught.value.response.headers["Retry-After"] == "1"
    times.clear()
    await ask(make_clients(setup, max_retries=1))
    assert len(times) == 2 and times[1] - times[0] >= 1


async def test_a_full_queue_is_a_rate_limit(
    make_setup: MakeSetup, make_clients: MakeClients
) -> None:
    setup = await make_setup(decode_in_flight=1, queue_limit=0)
    go_on = asyncio.Event()

    async def waits(request: web.Request, body: dict[str, Any]) -> None:
        await go_on.wait()

    setup.decode[0].script = waits
    clients = make_clients(setup)
    first = asyncio.create_task(clients.complete())
    while not setup.decode[0].asked:
        await asyncio.sleep(0.01)
    for ask, sdk in ASKS.values():
        with pytest.raises(sdk.RateLimitError) as caught:
            await ask(clients)
        assert caught.value.response.headers["Retry-After"] == "1"
    go_on.set()
    await first


@pytest.mark.parametrize(("ask", "sdk"), ASKS.values(), ids=ASKS)
async def test_a_stream_that_is_cut_is_an_error_and_not_an_end(
    setup: Setup, clients: Clients, ask: Ask, sdk: Any
) -> None:
    is_seen = asyncio.Event()

    async def cut(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first: dict[str, Any] = {"id": "c", "choices": [{"index": 0, "delta": {}, "text": "x"}]}
        if request.path == "/v1/responses":
            await response.write(named("response.output_text.delta", {"delta": "x"}))
        elif request.path == "/v1/messages":
            await response.write(named("message_start", {"message": {"id": "m"}}))
            await response.write(named("content_block_delta", {"index": 0, "delta": {}}))
        else:
            await response.write(event(first))
        await is_seen.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    setup.decode[0].script = cut
    seen = []
    with pytest.raises(sdk.APIError, match="The decode node failed in the middle") as caught:
        async for one in await ask(clients, stream=True):
            seen.append(one)
            is_seen.set()
    assert seen and not isinstance(caught.value, sdk.APIConnectionError)


@pytest.mark.parametrize(("ask", "sdk"), ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_gives_up_ends_the_work(
    setup: Setup, make_clients: MakeClients, ask: Ask, sdk: Any, leg: str
) -> None:
    engine = getattr(setup, leg)[0]

    async def hangs(request: web.Request, body: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    engine.script = hangs
    while not engine.asked:  # a busy machine may not come so far in that time
        with pytest.raises(sdk.APITimeoutError):
            await ask(make_clients(setup, timeout=0.3))
    await asyncio.wait_for(engine.gone.wait(), 5)
