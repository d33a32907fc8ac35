"""Keys, tenants, headers, TLS, and what a client may not send."""

from __future__ import annotations

import hmac
import json
import logging
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from vllm.bidir.router.clients.security import Security, key_digest
from vllm.bidir.router.router import Router

from tests.router.conftest import BODY, JSON, MakeSetup, RouterServer, Setup, another_router
from tests.router.fake_engine import FakeEngine
from tests.router.test_http import send
from tests.router.tls import make_certificate

KEYS = Security(client_keys=frozenset(map(key_digest, ("one", "two"))))
PARAMS = {"remote_host": "evil"}


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": PARAMS},
        {"ec_transfer_params": PARAMS},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"extra_body": {"kv_transfer_params": PARAMS}},
        {"messages": [{"role": "user", "content": "x", "kv_transfer_params": PARAMS}]},
        {"messages": [{"role": "user", "content": [{"a": {"kv_transfer_params": PARAMS}}]}]},
        {"input": [{"role": "user", "content": "x", "kv_transfer_params": PARAMS}]},
    ],
)
async def test_params_of_a_client_are_refused_wherever_they_stand(
    setup: Setup, body: dict[str, Any]
) -> None:
    plain = json.dumps({**BODY, **body})
    for text in (plain, plain.replace("transfer", "t\\u0072ansfer"), plain.replace(":", " : ")):
        async with setup.client.post(
            setup.url + "/v1/chat/completions", data=text, headers=JSON
        ) as response:
            assert response.status == 400
            assert "transfer_params" in (await response.json())["error"]["param"]
    assert setup.prefill[0].asked == setup.decode[0].asked == []


@pytest.mark.parametrize(
    "beside",
    [b"1e999", b"NaN", b'"\xff"', b"[" * 2000 + b"]" * 2000, b"9" * 6000, b"1}", b'"\\ud800"'],
)
async def test_nothing_beside_params_hides_them(setup: Setup, beside: bytes) -> None:
    """Each of these an engine may read, or a decoder skip."""
    text = b'{"model":"m","prompt":"x","y":' + beside + b',"vllm_xargs":{"kv_transfer_params":"z"}}'
    for path in ("/v1/completions", "/tokenize"):
        async with setup.client.post(setup.url + path, data=text, headers=JSON) as response:
            assert response.status == 400
    assert setup.prefill[0].asked == setup.decode[0].asked == []


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": 'set "kv_transfer_params": {} \\u006b'},
        {"kv_transfer_params": None},
        {"messages": [{"role": "user", "content": "kv_transfer_params"}]},
        {"tools": [{"input_schema": {"properties": {"kv_transfer_params": {}}}}]},
        {"messages": [{"content": [{"type": "tool_use", "input": {"kv_transfer_params": 1}}]}]},
        {"response_format": {"json_schema": {"kv_transfer_params": {}}}},
    ],
)
async def test_text_tools_and_schemas_may_speak_of_params(
    setup: Setup, fields: dict[str, Any]
) -> None:
    assert (await setup.ask(**fields))[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"X-API-Key": "two"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer three"}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "one"}, 401),
        ({"Authorization": "Bearer \u00fc"}, 401),
        ({"Authorization": "Bearer three", "X-API-Key": "one"}, 401),
    ],
)
async def test_only_who_has_a_key_may_ask(
    make_setup: MakeSetup, headers: dict[str, str], status: int
) -> None:
    setup = await make_setup(security=KEYS)
    got, body = await setup.ask(headers=headers)
    assert got == status
    if status == 401:
        assert json.loads(body)["error"]["code"] == 401
        # Of this route, and not of one that nobody knows.
        assert setup.metric("bidir_router_answers_total", route="/v1/completions", status="401")
        assert setup.prefill[0].asked == setup.decode[0].asked == []


async def test_probes_and_scrapers_need_no_key_and_all_else_does(make_setup: MakeSetup) -> None:
    setup = await make_setup(security=KEYS)
    for path, status in (("/health", 200), ("/metrics", 200), ("/v1/models", 401), ("/x", 401)):
        async with setup.client.get(setup.url + path) as response:
            assert response.status == status
    async with setup.client.delete(setup.url + "/conversations/c") as response:
        assert response.status == 401


async def test_every_key_is_compared_in_constant_time(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = await make_setup(security=KEYS)
    compare, calls = hmac.compare_digest, 0

    def counted(a: bytes, b: bytes) -> bool:
        nonlocal calls
        calls += 1
        return compare(a, b)

    monkeypatch.setattr("hmac.compare_digest", counted)
    for key in ("one", "two", "three"):
        await setup.ask(headers={"Authorization": f"Bearer {key}"})
    assert calls == 6


@pytest.mark.parametrize(
    ("security", "engine_key", "seen"),
    [
        (Security(), None, "Bearer one"),
        (Security(), "e", "Bearer one"),
        (KEYS, None, "Bearer one"),
        (KEYS, "e", "Bearer e"),
        (replace(KEYS, engine_authorization="forward"), "e", "Bearer one"),
        (Security(engine_authorization="replace"), "e", "Bearer e"),
        (Security(engine_authorization="replace"), None, None),
    ],
)
@pytest.mark.parametrize("header", ["Authorization", "X-API-Key"])
async def test_engines_get_the_clients_key_or_their_own(
    make_setup: MakeSetup,
    security: Security,
    engine_key: str | None,
    seen: str | None,
    header: str,
) -> None:
    setup = await make_setup(security=security, engine_api_key=engine_key)
    value = "Bearer one" if header == "Authorization" else "one"
    assert (await setup.ask(headers={header: value}))[0] == 200
    for engine in (*setup.prefill, *setup.decode):
        assert engine.headers[0].get("Authorization") == seen
        assert "X-API-Key" not in engine.headers[0]


@pytest.mark.parametrize("trusted", [True, False])
async def test_conversations_are_kept_apart_by_the_tenant_header_only_where_it_is_trusted(
    make_setup: MakeSetup, trusted: bool
) -> None:
    setup = await make_setup(security=Security(tenant_header=trusted))
    asked = (("k1", "t"), ("k2", "t"), ("k1", "u"), ("k2", "t"))
    for key, tenant in asked:
        headers = {"Authorization": key, "X-Tenant-ID": tenant}
        assert (await setup.ask(conversation_id="c", headers=headers))[0] == 200
    offered = [
        bool(one["kv_transfer_params"]["remote_block_ids"]) for one in setup.prefill[0].asked
    ]
    assert offered == ([False, True, False, True] if trusted else [False, False, True, True])


async def test_a_key_is_no_tenant_and_a_tenant_no_key(make_setup: MakeSetup) -> None:
    setup = await make_setup(security=Security(tenant_header=True))
    for headers in ({"Authorization": "t"}, {"X-Tenant-ID": "t"}):
        await setup.ask(conversation_id="c", headers=headers)
    assert len(setup.router.conversations) == 2


async def test_a_tenant_that_is_none_is_refused(make_setup: MakeSetup) -> None:
    setup = await make_setup(security=Security(tenant_header=True))
    for tenant in ("", "x" * 513):
        status, body = await setup.ask(conversation_id="c", headers={"X-Tenant-ID": tenant})
        assert status == 400 and json.loads(body)["error"]["param"] == "X-Tenant-ID"


async def test_only_named_headers_cross_the_router(setup: Setup) -> None:
    kept = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "a=b",
        "baggage": "c=d",
        "X-Request-Id": "abc",
        "X-Vllm-Priority": "3",
    }
    dropped = {
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
        "Cookie": "a=b",
        "X-data-parallel-rank": "1",
        "Forwarded": "for=x",
    }
    assert (await setup.ask(headers={**kept, **dropped}))[0] == 200
    for engine in (*setup.prefill, *setup.decode):
        got = engine.headers[0]
        assert {name: got[name] for name in kept} == kept
        assert not [name for name in dropped if name != "Connection" and name in got]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_refusal_says_when_to_try_again(setup: Setup, leg: str) -> None:
    async def busy(request: web.Request, body: dict[str, Any]) -> web.Response:
        headers = {"Retry-After": "7", "Set-Cookie": "a=b", "Keep-Alive": "x"}
        return web.json_response({"error": {}}, status=429, headers=headers)

    getattr(setup, leg)[0].script = busy
    async with setup.client.post(setup.url + "/v1/completions", json=BODY) as response:
        assert response.status == 429 and response.headers["Retry-After"] == "7"
        assert not {"Set-Cookie", "Keep-Alive"} & set(response.headers)
        assert response.headers["X-Request-Id"]


async def test_a_fault_of_the_router_is_a_500_in_openais_shape(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.bidir.router.turns.turns.parse_request", lambda *args: 1 / 0)
    status, body = await setup.ask()
    assert status == 500 and json.loads(body)["error"]["type"] == "server_error"


async def test_an_error_has_the_request_id_that_its_log_lines_have(
    setup: Setup, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the client has given none, or none of use."""
    caplog.set_level("INFO")
    for engine in (*setup.prefill, *setup.decode):
        await engine.stop()
    for given in ({}, {"X-Request-Id": "x" * 999}, {"X-Request-Id": "mine"}):
        async with setup.client.post(
            setup.url + "/v1/completions", json=BODY, headers=given
        ) as response:
            named = response.headers["X-Request-Id"]
            assert response.status == 503
            assert f"[{named}]" in caplog.text
            assert named != "x" * 999 and given.get("X-Request-Id") in (None, "x" * 999, named)
    async with setup.client.get(setup.url + "/nowhere") as response:
        assert response.status == 404 and response.headers["X-Request-Id"]


async def test_no_key_prompt_id_or_params_are_ever_logged(
    make_setup: MakeSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """At the finest level, for what goes well and for what fails in every way."""
    caplog.set_level(logging.DEBUG)
    setup = await make_setup(
        security=Security(client_keys=frozenset((key_digest("SECRET-key"),))),
        engine_api_key="SECRET-engine-key",
    )
    # Of these only the request's id is meant to be found, and no more of it than names it.
    request_id = "request-" + "i" * 28 + "SECRET"
    headers = {
        "Authorization": "Bearer SECRET-key",
        "X-Tenant-ID": "SECRET-tenant",
        "X-Session-ID": "SECRET-session",
        "X-Request-Id": request_id,
    }
    text = "SECRET prompt"

    async def refuses(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": f"SECRET {body}"}}, status=500)

    async def garbage(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.Response(body=b'{"kv_transfer_params": {"remote_port": "SECRET"}, "x": [')

    async def elsewhere(request: web.Request, body: dict[str, Any]) -> web.Response:
        params = {"remote_host": "SECRET", "remote_port": 7, "remote_engine_id": "SECRET"}
        return web.json_response({"choices": [], "kv_transfer_params": params})

    async def all_ways() -> None:
        for stream in (True, False):
            fields = {"conversation_id": "SECRET-conversation", "prompt": text, "stream": stream}
            await setup.ask(headers=headers, **fields)
            await setup.ask(headers=headers, **{**fields, "n": 2})
            await setup.ask(headers=headers, **{**fields, "conversation_id": "SECRET" * 1000})
            await setup.ask(headers=headers, **{**fields, "stream": "SECRET"})
            await setup.ask(headers=headers, kv_transfer_params={"remote_host": "SECRET"})
            await setup.ask(headers={"Authorization": "Bearer SECRET-other"}, prompt=text)

    await all_ways()
    for engine in (setup.prefill[0], setup.decode[0]):
        for script in (refuses, garbage, elsewhere):
            engine.script = script
            await all_ways()
        engine.script = None
    await send(setup, b"GET / HTTP/1.1\r\nSECRET: a\r\nX: " + b"SECRET" * 9999 + b"\r\n\r\n")
    await setup.decode[0].stop()
    await all_ways()
    await setup.prefill[0].stop()
    await all_ways()
    assert "cache MISS" in caplog.text and "leg failed" in caplog.text
    assert f"[{request_id[:36]}]" in caplog.text
    ours = [record for record in caplog.records if not record.name.startswith("asyncio")]
    assert not [record for record in ours if "SECRET" in logging.Formatter().format(record)]


async def test_clients_and_engines_may_speak_tls(setup: Setup, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    security = Security(tls=(cert, key), engine_ca=cert)
    engine = await FakeEngine("decode").start(tls=security.server_context())
    address = engine.address
    assert address.scheme == "https"
    options = replace(setup.router.options, decode=(address,), security=security)
    server = RouterServer(Router(options))
    await server.start_server()
    trusting = ssl.create_default_context(cafile=cert)
    url = server.url + "/v1/completions"
    try:
        async with setup.client.post(url, json=BODY, ssl=trusting) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await setup.client.post(url, json=BODY)
        distrusts = replace(security, engine_ca=None, tls=None)
        async with another_router(setup, decode=(address,), security=distrusts) as other:
            assert (await other.ask())[0] == 503
    finally:
        await server.close()
        await engine.stop()
    assert len(engine.asked) == 1
