"""What is no proper request is refused in the shape of the API, and none of it shows in the log."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import suppress

import pytest
from vllm.bidir.router.clients.security import Security

from tests.router.conftest import BODY, JSON, MakeSetup, Setup

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
MALFORMED = {
    "tls": b"\x16\x03\x01secret\r\n\r\n",
    "unknown version": b"GET / HTTP/9.secret\r\nHost: x\r\n\r\n",
    "unknown method": b"SECRET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in url": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: x\r\nA: Bearer " + b"secret" * 200 + b"\r\n\r\n",
    "long url": b"GET /" + b"secret" * 200 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: secret\r\n" * 200 + b"\r\n",
    "header name": b"GET / HTTP/1.1\r\nHost: x\r\nsecret header: 1\r\n\r\n",
    "length": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: secret\r\n\r\n",
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nsecret",
    "length and chunks": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nsecret",
    "chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n\r\n",
    "second chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nsecret\r\n\r\n",
    "coding": POST
    + b"Content-Encoding: gzip\r\nConnection: close\r\nContent-Length: 6\r\n\r\nsecret",
}


async def send(setup: Setup, raw: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to these very bytes; the router ends the connection."""
    assert setup.server.port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.server.port)
    try:
        writer.write(raw)
        await writer.drain()
        head, _, body = (await asyncio.wait_for(reader.read(), 15)).partition(b"\r\n\r\n")
        return head, body
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_http_is_a_400_of_which_nothing_is_said(
    make_setup: MakeSetup, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    setup = await make_setup(security=Security(max_header=1000))
    head, body = await send(setup, raw)
    assert head.split(b" ")[1] == b"400", head
    assert b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == 400
    assert "secret" not in (caplog.text + error["message"]).lower()
    assert (await setup.ask())[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        b"/nowhere",
        b"/v1/completions/",
        b"//v1/completions",
        b"/%00%ff%F0%9F",
        b"/v1/chat/../completions?a=%zz",
        b"*",
        b"http://x/nowhere",
    ],
)
async def test_unknown_paths_are_a_404_in_json(setup: Setup, path: bytes) -> None:
    head, body = await send(
        setup, b"OPTIONS " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    assert head.split(b" ")[1] == b"404", head
    assert json.loads(body)["error"]["message"].startswith("Unknown path ")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/conversations/c", "DELETE, GET, HEAD"),
        ("/health", "GET, HEAD"),
    ],
)
@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE"])
async def test_other_methods_are_told_which_are_allowed(
    setup: Setup, path: str, allowed: str, method: str
) -> None:
    async with setup.client.request(method, setup.url + path) as response:
        assert response.status == 405 and response.headers["Allow"] == allowed
        assert (await response.json())["error"]["message"] == f"Use {allowed} for {path}."


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json5"},
        {"Content-Type": ""},
        {**JSON, "Content-Encoding": "compress"},
        {**JSON, "Content-Encoding": "gzip, gzip"},
    ],
)
async def test_only_json_is_taken_and_said_to_be(setup: Setup, headers: dict[str, str]) -> None:
    """Else any page could have a browser ask the router, as it may send plain text anywhere."""
    for path in ("/v1/completions", "/tokenize"):
        async with setup.client.post(
            setup.url + path, data=json.dumps(BODY), headers=headers
        ) as response:
            assert response.status == 415
            assert (await response.json())["error"]["param"] in ("Content-Type", "Content-Encoding")
    assert setup.decode[0].asked == []


async def test_json_may_be_named_in_any_case_and_come_compressed(setup: Setup) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps(BODY).encode())
    async with setup.client.post(
        setup.url + "/v1/completions", data=body, headers=headers
    ) as response:
        assert response.status == 200
    assert setup.decode[0].asked[0]["prompt"] == BODY["prompt"]


async def test_a_small_body_that_grows_too_large_is_refused(make_setup: MakeSetup) -> None:
    setup = await make_setup(max_body=1 << 20)
    headers = {**JSON, "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps({**BODY, "prompt": "x" * (1 << 20)}).encode())
    assert len(body) < 10_000
    async with setup.client.post(
        setup.url + "/v1/completions", data=body, headers=headers
    ) as response:
        assert response.status == 413
        assert "--max-body" in (await response.json())["error"]["message"]


async def test_a_client_that_waits_to_be_told_is_told_to_go_on(setup: Setup) -> None:
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.server.port)
    writer.write(POST + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(body))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == (
        b"HTTP/1.1 100 Continue\r\n\r\n"
    )
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"200"
    writer.close()


async def test_an_expectation_that_is_not_met_is_said_so_in_json(setup: Setup) -> None:
    body = json.dumps(BODY).encode()
    raw = POST + b"Content-Length: %d\r\nExpect: wonders\r\nConnection: close\r\n\r\n" % len(body)
    said, answer = await send(setup, raw + body)
    assert said.split(b" ")[1] == b"417"
    assert json.loads(answer)["error"]["code"] == 417


@pytest.mark.parametrize("size", [1_000, 130_000, 140_000, 255_000, 300_000, 1_000_000])
async def test_requests_that_come_together_are_all_answered(setup: Setup, size: int) -> None:
    """One after the other, however much of them has been read."""
    body = b'{"prompt":"%s"}' % (b"x" * size)
    one = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    head, rest = await send(setup, one * 3 + last)
    answers = head + b"\r\n\r\n" + rest
    assert answers.count(b"HTTP/1.1 400 ") == answers.count(b"`model` must be a string") == 3
    assert answers.endswith(b"ok\n")
