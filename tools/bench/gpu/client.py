"""Requests to one engine, timed: whole answers, first tokens, gaps between tokens."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

FIRST = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What P is told of a turn when there is nothing to read back: keep it for D."""
SERVED_NAME = "m"
_TIMEOUT_S = 200.0


class RequestError(Exception):
    """An engine did not answer as it must."""


def to_read_back(params: Mapping[str, Any]) -> dict[str, Any]:
    """D's params of the last turn as P takes them."""
    return {**params, "do_remote_decode": True, "do_remote_prefill": False}


def encode(prompt: Sequence[int]) -> str:
    """A prompt as JSON: made once, before any time is taken."""
    return json.dumps(list(prompt), separators=(",", ":"))


def body(
    prompt: str, max_tokens: int, params: Mapping[str, Any] | None = None, **more: Any
) -> bytes:
    """A greedy completion of exactly `max_tokens`; `prompt` as from `encode`."""
    fields: dict[str, Any] = {
        "model": SERVED_NAME,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
        **more,
    }
    if params is not None:
        fields["kv_transfer_params"] = dict(params)
    return f'{json.dumps(fields)[:-1]}, "prompt": {prompt}}}'.encode()


def whole(url: str, content: bytes, request_id: str = "") -> tuple[dict[str, Any], float]:
    """The answer, and the ms until it was there; raises RequestError."""
    with closing(_connected(url)) as connection:
        begin = time.perf_counter()
        try:
            text = _sent(connection, url, content, request_id).read()
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{url}: {type(error).__name__}: {error}") from error
        took = (time.perf_counter() - begin) * 1e3
    answer: dict[str, Any] = json.loads(text)
    return answer, took


def first_token(url: str, content: bytes, request_id: str = "") -> float:
    """ms until a stream's first token; the stream is then closed, which ends it on the engine."""
    with closing(_connected(url)) as connection:
        begin = time.perf_counter()
        for _ in _tokens(_sent(connection, url, content, request_id)):
            return (time.perf_counter() - begin) * 1e3
    raise RequestError(f"{url}: a stream ended without a token")


def gaps(url: str, content: bytes) -> list[float]:
    """ms between the tokens of a stream, up to its end."""
    with closing(_connected(url)) as connection:
        times = [time.perf_counter() for _ in _tokens(_sent(connection, url, content, ""))]
    return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def _connected(url: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        connection.connect()
    except OSError as error:
        raise RequestError(f"{url}: {error}") from error
    return connection


def _sent(
    connection: http.client.HTTPConnection, url: str, content: bytes, request_id: str
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
    try:
        connection.request("POST", "/v1/completions", content, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RequestError(f"{url}: {response.status} {response.read()[:300]!r}")
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"{url}: {type(error).__name__}: {error}") from error
    return response


def _tokens(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The stream's chunks that carry a choice, as they come."""
    try:
        for line in response:
            if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
                yield line
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"a stream broke off: {type(error).__name__}: {error}") from error
