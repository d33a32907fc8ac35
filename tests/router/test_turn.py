"""What crosses the wire in a turn: bodies to P and D, bytes to the client, and failures."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients.request import bypass_reason
from vllm.bidir.router.options import Address
from vllm.bidir.router.router import Router

from tests.router.conftest import BODY, JSON, MakeSetup, RouterServer, Setup
from tests.router.fake_engine import P_PARAMS, FakeEngine, as_client_sees, d_params, event
from tools.bench.logs import conversation_digest, read_router


async def test_p_computes_one_token_and_d_gets_the_clients_request(setup: Setup) -> None:
    status, _ = await setup.ask(
        stream=True,
        stream_options={"include_usage": True},
        min_tokens=4,
        max_completion_tokens=9,
        temperature=0.5,
        conversation_id="c",
    )
    assert status == 200
    (to_p,), (to_d,) = setup.prefill[0].asked, setup.decode[0].asked
    assert to_p["stream"] is False and to_p["max_tokens"] == 1 and to_p["temperature"] == 0.5
    assert not {"stream_options", "min_tokens", "max_completion_tokens"} & set(to_p)
    assert to_p["kv_transfer_params"]["do_remote_decode"] is True
    assert to_p["kv_transfer_params"]["remote_block_ids"] is None
    assert to_d["stream_options"] == {"include_usage": True} and to_d["max_tokens"] == 8
    assert to_d["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]
    assert to_d["kv_transfer_params"]["remote_host"] == "127.0.0.1"
    assert "conversation_id" not in to_p and "conversation_id" not in to_d


async def test_the_stream_passes_unchanged_but_for_the_params(setup: Setup) -> None:
    status, body = await setup.ask(stream=True, conversation_id="c")
    assert status == 200
    assert body == as_client_sees(d_params(1))


async def test_a_whole_answer_keeps_everything_but_the_params(setup: Setup) -> None:
    status, body = await setup.ask(conversation_id="c")
    assert status == 200
    answer = json.loads(body)
    assert answer["choices"][0]["tool_calls"] == [1] and answer["usage"] == {"n": 2}
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["body", "header"])
async def test_the_next_turn_of_a_conversation_reads_back_what_d_kept(
    setup: Setup, stream: bool, where: str
) -> None:
    fields: dict[str, Any] = {"conversation_id": "c"} if where == "body" else {}
    headers = {"X-Session-ID": "c"} if where == "header" else None
    for _ in range(3):
        assert (await setup.ask(stream=stream, headers=headers, **fields))[0] == 200
    first, second, third = (asked["kv_transfer_params"] for asked in setup.prefill[0].asked)
    assert first["remote_block_ids"] is None
    assert second == {**d_params(1), "remote_host": "127.0.0.1"}
    assert third == {**d_params(2), "remote_host": "127.0.0.1"}
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 2
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="first_turn") == 1


async def test_conversations_and_tenants_do_not_mix(setup: Setup) -> None:
    for token, conversation in (("a", "c"), ("b", "c"), ("a", "other"), ("", "c")):
        headers = {"Authorization": f"Bearer {token}"} if token else None
        await setup.ask(conversation_id=conversation, headers=headers)
    assert [
        asked["kv_transfer_params"]["remote_block_ids"] for asked in setup.prefill[0].asked
    ] == [None] * 4


async def test_without_a_conversation_every_turn_is_a_miss_with_its_reason(setup: Setup) -> None:
    for _ in range(2):
        await setup.ask()
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="no_conversation") == 2


async def test_an_expired_entry_is_a_miss_with_its_reason(make_setup: MakeSetup) -> None:
    setup = await make_setup(conversation_ttl=0.0)
    for _ in range(2):
        await setup.ask(conversation_id="c")
    assert setup.prefill[0].asked[1]["kv_transfer_params"]["remote_block_ids"] is None
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="expired") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_of_which_d_kept_nothing_is_a_miss_with_its_reason(
    setup: Setup, stream: bool
) -> None:
    """As with a D that has the option off, or that does not say in a stream what it keeps."""

    async def keeps_nothing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chunk = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}
        if not stream:
            return web.json_response(chunk)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event(chunk) + event("[DONE]"))
        return response

    setup.decode[0].script = keeps_nothing
    for _ in range(3):
        assert (await setup.ask(stream=stream, conversation_id="c"))[0] == 200
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="first_turn") == 1
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="no_params") == 2
    setup.decode[0].script = None
    for _ in range(2):
        await setup.ask(stream=stream, conversation_id="c")
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 1


async def test_the_entry_survives_a_prefill_that_fails(setup: Setup) -> None:
    """Also when the whole turn fails: the next attempt still finds what D kept."""
    await setup.ask(conversation_id="c")
    address = setup.prefill[0].address
    await setup.prefill[0].stop()

    async def broken(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(status=500, text="no")

    setup.decode[0].script = broken
    assert (await setup.ask(conversation_id="c"))[0] == 500
    assert len(setup.router.conversations) == 1
    setup.decode[0].script = None
    assert address.port
    assert (await setup.ask(conversation_id="c"))[0] == 200


async def test_a_prefill_that_fails_with_read_back_is_computed_without(setup: Setup) -> None:
    await setup.ask(conversation_id="c")

    async def no_reads(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        blocks = body["kv_transfer_params"]["remote_block_ids"]
        return web.Response(status=500, text="lost") if blocks else None

    setup.prefill[0].script = no_reads
    status, body = await setup.ask(conversation_id="c", stream=True)
    assert status == 200 and body == as_client_sees(d_params(2))
    assert len(setup.prefill[0].asked) == 3


async def test_a_stock_p_is_never_given_what_d_kept(setup: Setup) -> None:
    """It would match by count, and answer wrong when the history has changed."""

    async def stock(request: web.Request, body: dict[str, Any]) -> web.Response:
        params = {key: value for key, value in P_PARAMS.items() if key != "readback"}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    setup.prefill[0].script = stock
    for _ in range(3):
        assert (await setup.ask(conversation_id="c"))[0] == 200
    assert [
        asked["kv_transfer_params"]["remote_block_ids"] for asked in setup.prefill[0].asked
    ] == [None] * 3
    assert setup.metric("bidir_router_withheld_total") == 2


async def test_a_p_that_was_downgraded_is_noticed_at_its_next_answer(setup: Setup) -> None:
    for _ in range(2):
        await setup.ask(conversation_id="c")

    async def stock(request: web.Request, body: dict[str, Any]) -> web.Response:
        params = {key: value for key, value in P_PARAMS.items() if key != "readback"}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    setup.prefill[0].script = stock
    for _ in range(2):
        await setup.ask(conversation_id="c")
    last = setup.prefill[0].asked[-1]["kv_transfer_params"]
    assert last["remote_block_ids"] is None


async def test_a_forked_turn_reads_the_same_parent(setup: Setup) -> None:
    """A read ends nothing: what D kept is offered again until the next turn supersedes it."""
    await setup.ask(conversation_id="c")

    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {}}, status=400)

    setup.decode[0].script = refuse
    for _ in range(2):
        assert (await setup.ask(conversation_id="c"))[0] == 400
    offered = [asked["kv_transfer_params"] for asked in setup.prefill[0].asked[1:]]
    assert [params["remote_request_id"] for params in offered] == ["turn-1"] * 2


async def test_without_any_p_the_decode_node_serves_alone(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=2)
    for engine in setup.prefill:
        await engine.stop()
    status, _ = await setup.ask(conversation_id="c")
    assert status == 200
    assert "kv_transfer_params" not in setup.decode[0].asked[0]
    assert setup.metric("bidir_router_decode_alone_total", reason="peer_gone") == 1


async def test_a_p_that_hands_nothing_over_is_counted_and_said(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is right: without that nobody would know that all is computed twice."""

    async def nothing(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 9}})

    setup.prefill[0].script = nothing
    async with setup.client.post(setup.url + "/v1/completions", json=BODY) as response:
        assert response.status == 200
        assert response.headers["x-kv-reuse"] == "miss; reason=no_params"
    assert "kv_transfer_params" not in setup.decode[0].asked[0]
    assert setup.metric("bidir_router_decode_alone_total", reason="no_params") == 1
    (said,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert str(setup.prefill[0].address) in said and "without kv_transfer_params" in said


async def test_another_p_takes_over(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=2)
    await setup.prefill[0].stop()
    for _ in range(3):
        assert (await setup.ask())[0] == 200
    assert len(setup.prefill[1].asked) == 3
    assert all("kv_transfer_params" in asked for asked in setup.decode[0].asked)


async def test_a_refusal_of_p_reaches_the_client_as_it_is(setup: Setup) -> None:
    async def refuse(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    setup.prefill[0].script = refuse
    status, body = await setup.ask(stream=True)
    assert (status, json.loads(body)) == (400, {"error": {"message": "too long"}})
    assert setup.decode[0].asked == []


async def test_decode_sticks_to_the_node_that_keeps_the_kv(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=3)
    for _ in range(4):
        await setup.ask(conversation_id="c")
    assert sorted(len(engine.asked) for engine in setup.decode) == [0, 0, 4]


async def test_another_d_takes_over_before_the_first_byte(make_setup: MakeSetup) -> None:
    setup = await make_setup(decode=2)
    await setup.decode[0].stop()
    for _ in range(2):
        assert (await setup.ask(stream=True))[0] == 200
    assert len(setup.decode[1].asked) == 2


async def test_no_d_at_all_is_a_503_with_retry_after(setup: Setup) -> None:
    await setup.decode[0].stop()
    async with setup.client.post(setup.url + "/v1/completions", json=BODY) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "decode node" in (await response.json())["error"]["message"]


async def test_a_stream_that_breaks_ends_with_an_error_event(setup: Setup) -> None:
    async def breaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices": []}\n\n')
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    setup.decode[0].script = breaks
    status, body = await setup.ask(stream=True)
    assert status == 200
    first, last = body.strip().split(b"\n\n")
    assert first == b'data: {"choices": []}'
    assert json.loads(last[len(b"data: ") :])["error"]["code"] == 502


async def test_a_proxy_in_front_is_told_not_to_gather_a_stream(setup: Setup) -> None:
    body = {**BODY, "stream": True}
    async with setup.client.post(setup.url + "/v1/completions", json=body) as response:
        assert response.headers["X-Accel-Buffering"] == "no"


async def test_each_piece_goes_out_at_once(setup: Setup) -> None:
    """The first token is not held until the second comes."""
    release = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await release.wait()
        await response.write(b"data: 2\n\n")
        return response

    setup.decode[0].script = slow
    body = {**BODY, "stream": True}
    async with setup.client.post(setup.url + "/v1/completions", json=body) as response:
        assert await asyncio.wait_for(response.content.readany(), 5) == b"data: 1\n\n"
        release.set()
        assert await asyncio.wait_for(response.content.read(), 5) == b"data: 2\n\n"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_goes_away_ends_the_leg(setup: Setup, leg: str) -> None:
    started = asyncio.Event()

    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if leg == "decode":
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
        started.set()
        await asyncio.sleep(60)
        return response

    engine = getattr(setup, leg)[0]
    engine.script = hang
    asking = asyncio.create_task(setup.ask(stream=True))
    await asyncio.wait_for(started.wait(), 5)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(engine.gone.wait(), 5)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": 2}, "bypass_n"),
        ({"use_beam_search": True}, "bypass_n"),
        ({"prompt": ["a", "b"]}, "bypass_list"),
        ({"prompt": [[1, 2], [3]]}, "bypass_list"),
        ({"echo": True}, "bypass_logprobs"),
        ({"prompt_logprobs": 1}, "bypass_logprobs"),
    ],
)
async def test_what_p_and_d_cannot_serve_right_goes_to_d_alone(
    setup: Setup, fields: dict[str, Any], reason: str
) -> None:
    assert (await setup.ask(conversation_id="c", **fields))[0] == 200
    assert setup.prefill[0].asked == []
    assert "kv_transfer_params" not in setup.decode[0].asked[0]
    assert setup.metric("bidir_router_decode_alone_total", reason=reason) == 1


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], []])
async def test_one_prompt_goes_through_p(setup: Setup, prompt: Any) -> None:
    await setup.ask(prompt=prompt)
    assert len(setup.prefill[0].asked) == 1


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff", 400, "not valid JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b"null", 400, "must be a JSON object"),
        (b"[" * 100_000, 400, "JSON"),
        (b"{}", 400, "`model`"),
        (b'{"model": 3}', 400, "`model`"),
        (b'{"model": "m", "stream": "yes"}', 400, "`stream`"),
        (b'{"model": "m", "conversation_id": 7}', 400, "`conversation_id`"),
        (b'{"model": "m\xff"}', 400, "`model`"),
        (b'{"model": "m", "stream": 1e999}', 400, "`stream`"),
        (b'{"model": "m", "vllm_xargs": {"kv_transfer_params": "x"}}', 400, "kv_transfer_params"),
        (b'{"model": "m", "conversation_id": ""}', 400, "`conversation_id`"),
        (b'{"model": "m", "conversation_id": {"a": 1}}', 400, "`conversation_id`"),
        (b'{"model": "m", "conversation_id": "' + b"x" * 513 + b'"}', 400, "`conversation_id`"),
        (b'{"model": "m", "kv_transfer_params": {"remote_host": "h"}}', 400, "kv_transfer_params"),
        (b'{"model": "m", "prompt": "' + b"x" * 5000 + b'"}', 413, "--max-body"),
    ],
)
async def test_bad_input_is_refused_in_openais_shape(
    make_setup: MakeSetup, body: bytes, status: int, word: str
) -> None:
    setup = await make_setup(max_body=200_000 if body.startswith(b"[[") else 4000)
    async with setup.client.post(
        setup.url + "/v1/chat/completions", data=body, headers=JSON
    ) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert word in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert setup.prefill[0].asked == [] and setup.decode[0].asked == []


async def test_unknown_paths_and_methods_have_openais_shape_too(setup: Setup) -> None:
    for method, path, status in (("POST", "/v1/nope", 404), ("GET", "/v1/completions", 405)):
        async with setup.client.request(method, setup.url + path) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == status


async def test_models_health_and_metrics(setup: Setup) -> None:
    async with setup.client.get(setup.url + "/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "m"
    async with setup.client.get(setup.url + "/health") as response:
        assert response.status == 200
    await setup.ask(conversation_id="c")
    async with setup.client.get(setup.url + "/metrics") as response:
        text = await response.text()
    assert 'bidir_router_turns_total{outcome="miss",reason="first_turn"} 1.0' in text
    assert "bidir_router_conversations 1.0" in text


async def test_authorization_and_request_id_reach_both_nodes(setup: Setup) -> None:
    given = {"Authorization": "Bearer t", "X-Request-Id": "abc"}
    async with setup.client.post(
        setup.url + "/v1/completions", json=BODY, headers=given
    ) as response:
        assert response.headers["X-Request-Id"] == "abc"
    for engine in (*setup.prefill, *setup.decode):
        assert {key: engine.headers[0][key] for key in given} == given


async def test_the_router_starts_before_its_nodes_and_serves_once_they_come(
    make_setup: MakeSetup, caplog: pytest.LogCaptureFixture, unused_tcp_port: int
) -> None:
    caplog.set_level("INFO")
    setup = await make_setup(decode=1)
    late = Address("127.0.0.1", unused_tcp_port)
    options = replace(setup.router.options, decode=(late,))
    server = RouterServer(Router(options))
    await server.start_server()
    url = server.url + "/v1/completions"
    async with setup.client.post(url, json=BODY) as response:
        assert response.status == 503
    engine = FakeEngine("decode")
    app = web.Application()
    app.router.add_post("/v1/completions", engine._generate)
    app.router.add_get("/health", engine._health)
    node = TestServer(app, host="127.0.0.1", port=unused_tcp_port)
    await node.start_server()
    async with setup.client.post(url, json=BODY) as response:
        assert response.status == 200
    for _ in range(50):
        if f"decode node {late} is up" in caplog.text:
            break
        await asyncio.sleep(0.1)
    await server.close()
    await node.close()
    assert f"waiting for nodes that do not answer yet: decode {late}" in caplog.text
    assert f"decode node {late} is up" in caplog.text


async def test_operators_find_the_log_lines_they_know(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        await setup.ask(conversation_id="secret-id", prompt="secret prompt")
    assert "cache MISS" in caplog.text and "cache HIT" in caplog.text
    assert "Prefill done in " in caplog.text
    assert "secret" not in caplog.text


async def test_log_lines_of_a_turn_begin_with_the_clients_request_id(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """The benchmark joins by it, and by the conversation's digest where a client gives no id."""
    caplog.set_level("INFO")
    for name in ("turn-1", "turn-2"):
        await setup.ask(headers={"X-Request-Id": name}, conversation_id="c1")
    await setup.ask(headers={"Authorization": "Bearer on-0-2048"}, conversation_id="CONV_ID_0")
    router = read_router("\n".join(record.getMessage() for record in caplog.records))
    first, second = (router.by_request[name] for name in ("turn-1", "turn-2"))
    assert (first.decision, first.reason, second.decision) == ("miss", "first_turn", "hit")
    assert first.prefill_ms is not None and second.prefill_ms is not None
    own = conversation_digest("", "c1")
    assert [router.by_turn[own, number] for number in (1, 2)] == ["turn-1", "turn-2"]
    assert router.of_turn(conversation_digest("Bearer on-0-2048", "CONV_ID_0"), 1) is not None


async def test_many_turns_at_once_are_kept_apart(setup: Setup) -> None:
    async def conversation(number: int) -> None:
        for _ in range(3):
            status, _ = await setup.ask(conversation_id=f"c{number}", stream=True)
            assert status == 200

    await asyncio.gather(*(conversation(number) for number in range(40)))
    assert len(setup.router.conversations) == 40
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 80


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("n", b"2", Reason.BYPASS_N),
        ("n", b"1", None),
        ("use_beam_search", b"true", Reason.BYPASS_N),
        ("use_beam_search", b"false", None),
        ("prompt_logprobs", b"0", Reason.BYPASS_LOGPROBS),
        ("prompt_logprobs", b"null", None),
        ("echo", b"true", Reason.BYPASS_LOGPROBS),
        ("echo", b"false", None),
        ("prompt", b'["a", "b"]', Reason.BYPASS_LIST),
        ("prompt", b'"a"', None),
        ("temperature", b"2", None),
    ],
)
def test_each_field_alone_may_keep_a_turn_from_p(
    field: str, value: bytes, reason: Reason | None
) -> None:
    fields = {"model": msgspec.Raw(b'"m"'), field: msgspec.Raw(value)}
    assert bypass_reason(fields) is reason
