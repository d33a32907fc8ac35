"""Responses, Anthropic's messages, and the calls that are no turns."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router import side_calls
from vllm.bidir.router.clients.security import Security, key_digest
from vllm.bidir.router.turns.responses import Responses, ResponsesFilter, Said, said_in

from tests.router.conftest import MakeSetup, Setup, until
from tests.router.fake_apis import (
    messages_stream,
    output,
    responses_stream,
    speak_all,
    without_params,
)
from tests.router.fake_engine import P_PARAMS, d_params

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@pytest.fixture
async def apis(setup: Setup) -> Setup:
    for engine in (*setup.prefill, *setup.decode):
        speak_all(engine)
    return setup


async def ask(
    setup: Setup, path: str, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, bytes, Any]:
    body.setdefault("model", "m")
    async with setup.client.post(setup.url + path, json=body, headers=headers) as response:
        return response.status, await response.read(), response.headers


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_streams_pass_unchanged_but_for_the_params(apis: Setup, path: str) -> None:
    status, body, _ = await ask(apis, path, stream=True, input="a", messages=[user("a")])
    pieces = responses_stream(1, d_params(1)) if path == RESPONSES else messages_stream(d_params(1))
    assert status == 200 and body == without_params(pieces)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_whole_answers_keep_everything_but_the_params(apis: Setup, path: str) -> None:
    status, body, _ = await ask(apis, path, input="a", messages=[user("a")])
    answer = json.loads(body)
    assert status == 200 and "kv_transfer_params" not in answer and answer["usage"]


async def test_p_computes_one_token_whatever_the_api_calls_it(apis: Setup) -> None:
    await ask(apis, RESPONSES, input="a", max_output_tokens=9, store=True, include=["x"])
    await ask(apis, MESSAGES, messages=[user("a")], max_tokens=9, stream=True)
    responses, messages = apis.prefill[0].asked
    assert responses["max_output_tokens"] == 1 and responses["store"] is False
    assert not {"max_tokens", "include", "background"} & set(responses)
    assert messages["max_tokens"] == 1 and messages["stream"] is False
    to_d = apis.decode[0].asked
    assert to_d[0]["max_output_tokens"] == 9 and to_d[0]["include"] == ["x"]
    assert to_d[1]["max_tokens"] == 9 and to_d[1]["stream"] is True
    assert all(one["kv_transfer_params"]["remote_block_ids"] == [[1, 2]] for one in to_d)


@pytest.mark.parametrize("stream", [True, False])
async def test_messages_are_linked_and_read_back(apis: Setup, stream: bool) -> None:
    history = [user("a"), {"role": "assistant", "content": "hi"}, user("b")]
    for messages in (history[:1], history):
        assert (await ask(apis, MESSAGES, messages=messages, stream=stream))[0] == 200
    assert apis.prefill[0].asked[1]["kv_transfer_params"]["remote_request_id"] == "turn-1"


@pytest.mark.parametrize("stream", [True, False])
async def test_earlier_items_are_expanded_for_both_legs_and_read_back(
    apis: Setup, stream: bool
) -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    await ask(apis, RESPONSES, input="a", instructions="x", stream=stream)
    await ask(apis, RESPONSES, input=[result], previous_response_id="resp_1", stream=stream)
    await ask(apis, RESPONSES, input="c", previous_response_id="resp_2", stream=stream)
    whole = [user("a"), *output(1), result, *output(2), user("c")]
    for engine in (apis.prefill[0], apis.decode[0]):
        assert [one["input"] for one in engine.asked] == ["a", whole[:5], whole]
        assert not any("previous_response_id" in one for one in engine.asked)
        # Instructions are of one request only.
        assert ["instructions" in one for one in engine.asked] == [True, False, False]
    offered = [one["kv_transfer_params"].get("remote_request_id") for one in apis.prefill[0].asked]
    assert offered == [None, "turn-1", "turn-2"]
    assert apis.metric("bidir_router_identified_total", by="previous_response") == 2


async def test_forks_of_a_response_share_it(apis: Setup) -> None:
    await ask(apis, RESPONSES, input="a")
    for text in "bc":
        await ask(apis, RESPONSES, input=text, previous_response_id="resp_1")
    await ask(apis, RESPONSES, input="d", previous_response_id="resp_2")
    inputs = [one["input"] for one in apis.decode[0].asked]
    first = [user("a"), *output(1)]
    assert inputs[1:] == [
        [*first, user("b")],
        [*first, user("c")],
        [*first, user("b"), *output(2), user("d")],
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_9"},
        {"previous_response_id": 7},
        {"previous_response_id": "x" * 9999},
        {"background": True},
    ],
)
async def test_what_cannot_be_expanded_goes_to_d_alone(apis: Setup, fields: Any) -> None:
    status, _, headers = await ask(apis, RESPONSES, input="b", **fields)
    assert status == 200 and headers["x-kv-reuse"] == "miss; reason=bypass_stored"
    assert apis.prefill[0].asked == []
    (to_d,) = apis.decode[0].asked
    assert fields.items() <= to_d.items() and "kv_transfer_params" not in to_d
    assert apis.metric("bidir_router_decode_alone_total", reason="bypass_stored") == 1


@pytest.mark.parametrize("one", [{"store": False}, {"input": 7}, {"background": True}])
async def test_what_is_not_to_be_stored_is_not(apis: Setup, one: dict[str, Any]) -> None:
    await ask(apis, RESPONSES, **{"input": "a", **one})
    assert len(apis.router.responses) == 0


async def test_responses_of_other_tenants_are_not_known(apis: Setup) -> None:
    await ask(apis, RESPONSES, {"Authorization": "a"}, input="secret")
    await ask(apis, RESPONSES, {"Authorization": "b"}, input="x", previous_response_id="resp_1")
    assert apis.decode[0].asked[1]["input"] == "x"


async def test_an_answer_that_failed_is_not_kept(apis: Setup) -> None:
    async def refuses(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"id": "resp_1", "output": []}, status=400)

    apis.decode[0].script = refuses
    await ask(apis, RESPONSES, input="a")
    assert len(apis.router.responses) == 0


async def test_a_model_is_optional_for_responses_only(apis: Setup) -> None:
    assert (await ask(apis, RESPONSES, input="a", model=None))[0] == 200
    assert (await ask(apis, RESPONSES, input="a", model=7))[0] == 400
    assert (await ask(apis, MESSAGES, messages=[], model=None))[0] == 400


def kept(store: Responses, name: str, text: str, previous: str | None = None) -> bool:
    """Store one; False if what it continues is not known."""
    from vllm.bidir.router.clients.request import parse_request

    body = {"input": text, "previous_response_id": previous}
    request, asked = store.expand("", parse_request(RESPONSES, json.dumps(body).encode()))
    if asked is None:
        return False
    said = said_in(json.dumps({"id": name, "output": [text]}).encode())
    assert said is not None
    store.keep(asked, said)
    return request.bypass is None


def test_memory_is_bounded_in_bytes_and_what_is_used_stays() -> None:
    store = Responses(100_000, 1 << 20)
    assert kept(store, "root", "x" * 1000)
    for number in range(500):
        assert kept(store, f"r{number}", "x" * 1000)
        assert kept(store, f"c{number}", "y", "root")
    assert store.bytes <= 100_000
    assert not kept(store, "z", "z", "r0") and kept(store, "z", "z", "c499")


def test_a_chain_with_a_missing_link_is_not_expanded() -> None:
    store = Responses(6000, 1 << 20)
    assert kept(store, "a", "x" * 1000) and kept(store, "b", "y", "a")
    for number in range(3):
        kept(store, f"r{number}", "x" * 1000)
    assert not kept(store, "c", "z", "b")


def test_responses_that_continue_each_other_are_no_endless_history() -> None:
    store = Responses(9999, 1 << 20)
    assert kept(store, "a", "x") and kept(store, "b", "y", "a") and kept(store, "a", "z", "b")
    assert not kept(store, "c", "w", "a")


async def test_a_history_that_is_too_long_is_refused_however_short_the_request(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(max_body=1500)
    speak_all(setup.decode[0])
    assert (await ask(setup, RESPONSES, input="x" * 1000))[0] == 200
    status, body, _ = await ask(setup, RESPONSES, input="y" * 500, previous_response_id="resp_1")
    assert status == 413 and json.loads(body)["error"]["param"] == "previous_response_id"


def test_nothing_is_kept_where_the_limit_is_zero() -> None:
    store = Responses(0, 1 << 20)
    assert kept(store, "a", "x") and len(store) == 0 and store.bytes == 0
    assert not kept(store, "b", "x", "a")


def test_the_same_response_twice_is_counted_once() -> None:
    store = Responses(9999, 1 << 20)
    for _ in range(3):
        kept(store, "a", "x")
    assert len(store) == 1 and 400 < store.bytes < 500


@pytest.mark.parametrize(
    "whole", [b"", b"{}", b"[1]", b'{"id":7,"output":[]}', b'{"id":"a"}', b"\xff", b"[" * 100_000]
)
def test_an_answer_that_says_nothing_usable_is_not_kept(whole: bytes) -> None:
    assert said_in(whole) is None


@pytest.mark.parametrize("output_items", [b"7", b'"x"', b"{}", b"null"])
def test_an_output_that_is_no_list_is_harmless(output_items: bytes) -> None:
    import msgspec
    from vllm.bidir.router.turns.responses import Asked

    store = Responses(9999, 1 << 20)
    store.keep(Asked("", None, b"1"), Said("a", msgspec.Raw(output_items)))
    assert len(store) == (output_items == b'"x"')


def test_a_stream_says_what_to_keep_however_it_is_cut() -> None:
    whole = b"".join(responses_stream(1, d_params(1)))
    for size in (1, 7, len(whole)):
        taken = ResponsesFilter()
        out = b"".join(taken.feed(whole[at : at + size]) for at in range(0, len(whole), size))
        assert out + taken.finish() == without_params(responses_stream(1, d_params(1)))
        assert taken.params == d_params(1)
        assert taken.said is not None and taken.said.id == "resp_1"
        assert json.loads(bytes(taken.said.output)) == output(1)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/messages/count_tokens"])
async def test_side_calls_reach_a_d_that_answers(make_setup: MakeSetup, path: str) -> None:
    setup = await make_setup(decode=2)
    await setup.decode[0].stop()

    async def tokens(request: web.Request, body: dict[str, Any]) -> web.Response:
        assert body == {"model": "m", "prompt": "x"}
        return web.json_response({"path": request.path}, status=418, headers={"Retry-After": "3"})

    setup.decode[1].script = tokens
    for _ in range(2):
        given = {"Authorization": "Bearer t", "X-Request-Id": "abc"}
        status, body, headers = await ask(setup, path, given, prompt="x")
        assert status == 418 and json.loads(body) == {"path": path}
        assert headers["Retry-After"] == "3" and headers["X-Request-Id"] == "abc"
    assert setup.decode[1].headers[0]["Authorization"] == "Bearer t"
    await setup.decode[1].stop()
    assert (await ask(setup, path, prompt="x"))[0] == 503
    assert (await ask(setup, path, kv_transfer_params={"a": 1}))[0] == 400


@pytest.mark.parametrize("how", ["takes too long", "goes down"])
async def test_a_d_that_hangs_does_not_keep_the_models_from_a_client(
    make_setup: MakeSetup, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_calls, "_GET_S", 0.1 if how == "takes too long" else 3600.0)
    setup = await make_setup(decode=2, health_interval=0.05)
    hanging = setup.decode[0]
    hanging.hangs = True
    asking = [asyncio.create_task(setup.client.get(setup.url + "/v1/models")) for _ in range(2)]
    await until(lambda: hanging.asked_for_models == 1)
    if how == "goes down":
        hanging.health = 503
    for one in asking:
        async with await one as response:
            assert response.status == 200 and (await response.json())["data"][0]["id"] == "m"


async def test_head_asks_a_d_as_get_does(setup: Setup) -> None:
    url = setup.url + "/v1/models"
    async with setup.client.head(url) as response, setup.client.get(url) as whole:
        assert response.status == 200 and await response.read() == b""
        assert response.headers["Content-Length"] == whole.headers["Content-Length"]
    assert setup.decode[0].asked_for_models == 2 and setup.decode[0].asked == []


async def test_version_names_the_release(setup: Setup) -> None:
    async with setup.client.get(setup.url + "/version") as response:
        assert response.status == 200 and set(await response.json()) == {"version"}


async def test_a_conversation_says_what_is_kept_of_it(setup: Setup) -> None:
    url = setup.url + "/conversations/a/b"
    async with setup.client.get(url) as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == 404
    await setup.ask(conversation_id="a/b")
    setup.decode[0].leases.duration_s = 60.0
    await setup.ask("/v1/chat/completions", messages=["x"], conversation_id="a/b")
    async with setup.client.get(url) as response:
        told = await response.json()
    node = str(setup.decode[0].address)
    assert told["object"] == "conversation" and len(told["lines"]) == 1
    assert told["lines"][0] == {"kept": True, "node": node, "leased": True, "seconds_left": None}
    async with setup.client.get(url, headers={"Authorization": "other"}) as response:
        assert response.status == 404


async def test_a_conversation_says_why_nothing_is_kept(make_setup: MakeSetup) -> None:
    setup = await make_setup(conversation_ttl=0.0)
    await setup.ask(conversation_id="c")
    async with setup.client.get(setup.url + "/conversations/c") as response:
        assert (await response.json())["lines"] == [{"kept": False, "reason": "expired"}]


async def reuse_of(setup: Setup, path: str = "/v1/completions", **body: Any) -> str:
    status, _, headers = await ask(setup, path, **{"prompt": "x", **body})
    assert status == 200
    return str(headers["x-kv-reuse"])


@pytest.mark.parametrize("stream", [True, False])
async def test_each_answer_says_what_was_reused(apis: Setup, stream: bool) -> None:
    async def ask_one(**body: Any) -> str:
        return await reuse_of(apis, stream=stream, **body)

    assert await ask_one() == "miss; reason=no_conversation"
    assert await ask_one(conversation_id="c") == "miss; reason=first_turn"
    assert await ask_one(conversation_id="c") == "hit"
    assert await ask_one(conversation_id="c", n=2) == "miss; reason=bypass_n"


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 12}}, "hit; tokens=12"),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, "miss; tokens=0"),
        ({"prompt_tokens_details": None}, "hit"),
        ({"input_tokens_details": {"cached_tokens": 3}}, "hit; tokens=3"),
        ({"cache_read_input_tokens": 4}, "hit; tokens=4"),
        ({"cache_read_input_tokens": "many"}, "hit"),
        (None, "hit"),
        (7, "hit"),
    ],
)
async def test_tokens_are_those_that_p_says(setup: Setup, usage: Any, said: str) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.Response:
        params = {"readback": 1, "remote_engine_id": "p", "remote_port": 1}
        return web.json_response({"choices": [], "usage": usage, "kv_transfer_params": params})

    setup.prefill[0].script = script
    await reuse_of(setup, conversation_id="c")
    assert await reuse_of(setup, conversation_id="c") == said


async def test_a_read_back_that_did_not_come_about_is_no_hit(setup: Setup) -> None:
    async def stock(request: web.Request, body: dict[str, Any]) -> web.Response:
        params = {key: value for key, value in P_PARAMS.items() if key != "readback"}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    async def fails(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        blocks = body["kv_transfer_params"]["remote_block_ids"]
        return web.Response(status=500) if blocks else None

    await reuse_of(setup, conversation_id="c")
    setup.prefill[0].script = fails
    assert await reuse_of(setup, conversation_id="c") == "miss; reason=transfer_failed"
    setup.prefill[0].script = stock
    await reuse_of(setup, conversation_id="c")
    assert await reuse_of(setup, conversation_id="c") == "miss; reason=unsupported"
    await setup.prefill[0].stop()
    assert await reuse_of(setup, conversation_id="c") == "miss; reason=peer_gone"


async def test_errors_have_the_shape_of_their_api(make_setup: MakeSetup) -> None:
    setup = await make_setup(
        max_body=3000, security=Security(client_keys=frozenset((key_digest("k"),)))
    )
    key = {"X-API-Key": "k"}
    cases = [
        (MESSAGES, {}, {}, 401, "authentication_error"),
        (MESSAGES + "/nope", {}, key, 404, "not_found_error"),
        (MESSAGES, {"model": 7}, key, 400, "invalid_request_error"),
        (MESSAGES, {"messages": "x" * 4000}, key, 413, "request_too_large"),
        ("/nope", {}, key, 404, None),
        (RESPONSES, {"model": 7}, key, 400, None),
    ]
    for path, body, headers, status, kind in cases:
        got, text, _ = await ask(setup, path, {**headers, "X-Request-Id": "abc"}, **body)
        error = json.loads(text)
        assert got == status
        if kind is None:
            assert error["error"]["code"] == status
        else:
            assert error["type"] == "error" and error["error"]["type"] == kind
    await setup.decode[0].stop()
    await setup.prefill[0].stop()
    got, text, headers = await ask(setup, MESSAGES, {**key, "X-Request-Id": "abc"}, messages=[])
    assert got == 503 and json.loads(text)["error"]["type"] == "overloaded_error"
    assert headers["X-Request-Id"] == "abc" and headers["Retry-After"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "sent", [b"event: x\ndata: {}\n\n", b"event: x\ndata: {}\n", b"data: {}\n\ndat"]
)
async def test_a_stream_that_breaks_ends_with_an_event_of_its_own(
    setup: Setup, path: str, sent: bytes
) -> None:
    async def breaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sent)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    setup.decode[0].script = breaks
    status, body, _ = await ask(setup, path, stream=True, input="a", messages=[user("a")])
    assert status == 200
    *_, last = body.strip().split(b"\n\n")
    lines = last.split(b"\n")
    error = json.loads(lines[-1].removeprefix(b"data: "))
    if path == "/v1/chat/completions":
        assert len(lines) == 1 and error["error"]["code"] == 502
    else:
        assert lines[0] == b"event: error" and error["type"] == "error"
