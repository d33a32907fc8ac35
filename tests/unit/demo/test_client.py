from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tools.demo.client import Answer, added, events, stream_chat
from tools.demo.errors import DemoError

PAUSE_S = 0.3


def event(text: str | None, completion: int) -> dict[str, Any]:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return {
        "choices": choices,
        "usage": {"prompt_tokens": 12, "completion_tokens": completion},
    }


@contextmanager
def server(*steps: bytes | float, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answers a POST with pieces of a stream, and sleeps where a number stands."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for step in steps:
                if isinstance(step, bytes):
                    self.wfile.write(step)
                    self.wfile.flush()
                else:
                    time.sleep(step)

        def log_message(self, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", bodies
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def sse(*items: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in items)


DONE = b"data: [DONE]\n\n"


def test_ttft_is_the_time_to_the_first_text() -> None:
    """The event that only opens the answer does not count, nor what comes after the text."""
    opening, text, rest = sse(event("", 0)), sse(event("ab", 1)), sse(event("c", 2), event(None, 2))
    seen: list[Answer] = []
    begun = time.monotonic()
    with server(opening, PAUSE_S, text, PAUSE_S, rest + DONE) as (url, bodies):
        answer = stream_chat(url, {"model": "m"}, seen.append)
    whole = time.monotonic() - begun
    assert answer.ttft_s is not None
    # Half a pause is for a machine that does other things, too.
    assert PAUSE_S <= answer.ttft_s <= whole - PAUSE_S / 2
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("abc", 12, 2)
    assert [a.text for a in seen] == ["", "ab", "abc", "abc"]
    assert bodies[0]["stream"] is True
    assert bodies[0]["stream_options"]["include_usage"] is True


def test_refusal_shows_status_and_body() -> None:
    """A status other than 200 is an error that carries what the server said."""
    with (
        server(b'{"error": "no such model"}', status=404) as (url, _),
        pytest.raises(DemoError, match=r"404, expected 200: .*no such model"),
    ):
        stream_chat(url, {}, lambda _: None)


def test_error_event_ends_the_answer() -> None:
    """An error in the middle of a stream is not taken for its end."""
    with (
        server(sse(event("ab", 1), {"error": {"message": "gone"}})) as (url, _),
        pytest.raises(DemoError, match="gone"),
    ):
        stream_chat(url, {}, lambda _: None)


def test_stream_that_breaks_off_is_an_error() -> None:
    """Without [DONE] the answer may lack its end."""
    with server(sse(event("ab", 1))) as (url, _), pytest.raises(DemoError, match=r"before \[DONE"):
        stream_chat(url, {}, lambda _: None)


def test_answer_without_text_is_an_error() -> None:
    """There is no time to first token without a token."""
    with server(sse(event(None, 0)) + DONE) as (url, _), pytest.raises(DemoError, match="any text"):
        stream_chat(url, {}, lambda _: None)


def test_nobody_listening_is_named() -> None:
    """A refused connection is one error with the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(DemoError, match=url):
            stream_chat(url, {}, lambda _: None)


def test_comments_and_empty_lines_are_no_events() -> None:
    """Only data lines carry events."""
    lines = [
        b": ping\n",
        b"\n",
        b"event: x\n",
        b'data: {"a": 1}\n',
        b"data: [DONE]\n",
        b"data: x\n",
    ]
    assert list(events(iter(lines))) == [{"a": 1}]


def test_usage_stays_when_an_event_has_none() -> None:
    """An event without usage does not reset the counts."""
    before = Answer("a", 12, 1, 0.5)
    after = added(before, {"choices": [{"delta": {"content": "b"}}], "usage": None}, 0.9)
    assert after == Answer("ab", 12, 1, 0.5)
