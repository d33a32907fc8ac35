"""A P and a D that compute nothing, on loopback: `python -m tools.bench.router.engines`.

P answers at once. D sends its first event at once and the others at the interval that the request
asks for: by a clock of the stream's own, or in D's steps, in each of which all streams get one, as
in an engine's. Each is written by itself; the last one that has a choice carries
kv_transfer_params. Just enough HTTP for clients that keep their connections and send
Content-Length.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections.abc import Callable
from typing import cast

from tools.bench.router.script import (
    content_event,
    decode_params,
    encoded,
    event,
    numbered,
    prefill_params,
    whole_answer,
)

Answer = Callable[["Connection", str, bytes], None]

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One kept connection; requests come one after another."""

    transport: asyncio.Transport

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._pending = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._pending += data
        head, found, rest = self._pending.partition(b"\r\n\r\n")
        if not found:
            return
        length = _content_length(head)
        if len(rest) < length:
            return
        self._pending = rest[length:]
        path = head.split(b" ", 2)[1].decode("latin-1")
        self._answer(self, path, rest[:length])

    def write_json(self, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )


def _content_length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


class Engines:
    """Both roles; `tokens` is the length of every history."""

    def __init__(self, tokens: int, lease_s: float | None) -> None:
        self._prefilled = whole_answer(prefill_params(tokens))
        self._first = content_event("")
        self._middle = content_event(" word")
        self._last = content_event("", "stop", kv_transfer_params={"?": 0})
        params = encoded(decode_params(tokens, lease_s))
        text = self._last.split(b"\r\n")[1][len(b"data: ") : -2]
        self._last_text = text.replace(b'{"?":0}', params)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens + 1, "completion_tokens": 1}
        self._closing = (
            event(encoded({"id": "chatcmpl-1", "choices": [], "usage": usage})),
            event(b"[DONE]"),
        )
        self._turns = 0

    def prefill(self, connection: Connection, path: str, body: bytes) -> None:
        connection.write_json(b"{}" if path == "/health" else self._prefilled)

    def decode(self, connection: Connection, path: str, body: bytes) -> None:
        if path == "/health":
            connection.write_json(b"{}")
        elif path.startswith("/v1/kv_leases/"):
            connection.write_json(b'{"renewed":{},"released":[],"lost":[]}')
        else:
            script = json.loads(body)["bench"]
            self._turns += 1
            last = event(numbered(self._last_text, self._turns))
            events = [self._middle] * (script["chunks"] - 2) + [last, *self._closing]
            interval_s = script["interval_ms"] / 1000
            _Stream(connection.transport, self._first, events, interval_s, script["steps"])


class _Stream:
    """What is left to send of one answer, and when."""

    def __init__(
        self,
        transport: asyncio.Transport,
        first: bytes,
        events: list[bytes],
        interval_s: float,
        steps: bool,
    ) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._events = iter(events)
        self._left = len(events)
        self._interval_s = interval_s
        self._due = self._loop.time()
        if steps and interval_s:
            # The last step that has been: the same times for all streams.
            self._due -= self._due % interval_s
        transport.write(_STREAM_HEAD + first)
        self._wait()

    def _wait(self) -> None:
        # What closes a stream comes right behind its last token.
        if self._interval_s and self._left > 2:
            self._due += self._interval_s
            self._loop.call_at(self._due, self._next)
        else:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        self._left -= 1
        if self._left:
            self._transport.write(next(self._events))
            self._wait()
        else:
            self._transport.write(next(self._events) + _END)


async def serve(prefill_port: int, decode_port: int, tokens: int, lease_s: float | None) -> None:
    """Serve both until cancelled."""
    engines, loop = Engines(tokens, lease_s), asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Connection(engines.prefill), "127.0.0.1", prefill_port),
        await loop.create_server(lambda: Connection(engines.decode), "127.0.0.1", decode_port),
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m tools.bench.router.engines", description=__doc__)
    made.add_argument("--prefill-port", type=int, required=True)
    made.add_argument("--decode-port", type=int, required=True)
    made.add_argument("--tokens", type=int, default=1000, help="of each history (default 1000)")
    made.add_argument("--lease", type=float, help="seconds that D grants (default: fixed mode)")
    args = made.parse_args()
    gc.disable()  # nothing here makes cycles, and a pause would look like a slow router
    asyncio.run(serve(args.prefill_port, args.decode_port, args.tokens, args.lease))


if __name__ == "__main__":
    main()
