# SPDX-License-Identifier: Apache-2.0
"""Take kv_transfer_params out of what D answers, and leave every other byte as it is."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.bidir.router.clients.parts import TooManyError, split_object
from vllm.bidir.router.clients.request import PARAMS
from vllm.bidir.router.nodes.params import decode_params

# As a key, the word is followed by a plain quote; inside a JSON string both quotes are escaped,
# so that no text of a model or a tool can be mistaken for it.
_WORD = PARAMS.encode()
NEEDLE = b'"' + _WORD + b'"'
_DATA = b"data:"
_MAX_LINE = 64 << 20
_ENCODER = msgspec.json.Encoder()


class StreamFilter:
    """Feed D's bytes in any pieces; get back whole lines for the client, params taken out.

    `params` is what D said last, None before and once it has been taken away. An event that carries
    the field is written anew without it; all other lines are the very bytes that came in.
    """

    # What has none of these has nothing to be looked into, and may pass while nothing is held.
    words: tuple[bytes, ...] = (_WORD,)

    def __init__(self) -> None:
        self.params: dict[str, Any] | None = None
        # Of a line that has not ended yet; the same list all the time.
        self.held: list[bytes] = []
        self._held_bytes = 0

    def has_found(self) -> bool:
        """Whether there is something that has not been taken away yet."""
        return self.params is not None

    def passes(self, piece: bytes) -> bool:
        """Whether a piece may go out as it is: whole lines that have nothing to be looked into.

        Nearly all are; what is not must be fed.
        """
        has_word = any(piece.find(word) >= 0 for word in self.words)
        return not has_word and piece.endswith(b"\n") and not self.held

    def feed(self, piece: bytes) -> bytes:
        """Bytes that may go out now; ValueError if a line never ends."""
        end = piece.rfind(b"\n") + 1
        lines = piece[:end]
        if end and self.held:
            lines = self._take_held() + lines
        if end < len(piece):
            self.held.append(piece[end:])
            self._held_bytes += len(piece) - end
        if self._held_bytes > _MAX_LINE:
            raise ValueError(f"a line of D's stream exceeds {_MAX_LINE} bytes")
        return self._strip(lines)

    def finish(self) -> bytes:
        """What is left when D's stream has ended."""
        return self._strip(self._take_held()) if self.held else b""

    def _take_held(self) -> bytes:
        held = b"".join(self.held)
        self.held.clear()
        self._held_bytes = 0
        return held

    def _find(self, lines: bytes, start: int) -> int:
        """Where the next line is that must be looked into: somewhere in it, -1 if there is none."""
        return lines.find(NEEDLE, start)

    def _strip(self, lines: bytes) -> bytes:
        # A lone \r does not end a line here.
        kept: list[bytes] = []
        done = 0
        while (at := self._find(lines, done)) >= 0:
            begin = lines.rfind(b"\n", done, at) + 1 or done
            end = lines.find(b"\n", at) + 1 or len(lines)
            kept += (lines[done:begin], self._strip_line(lines[begin:end]))
            done = end
        return b"".join((*kept, lines[done:])) if kept else lines

    def _strip_line(self, line: bytes) -> bytes:
        payload = event_payload(line)
        if payload is None or NEEDLE not in payload:
            return line
        body = line[len(_DATA) :]
        stripped, params = take_params(payload)
        if params is not None:
            self.params = params
        start = len(body) - len(body.lstrip())
        return _DATA + body[:start] + stripped + body[start + len(payload) :]


def event_payload(line: bytes) -> bytes | None:
    """What a data line of a stream carries, None for any other line."""
    return line[len(_DATA) :].strip() if line.startswith(_DATA) else None


def take_params(payload: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """A JSON object without its kv_transfer_params, and those params if they are an object.

    In Responses' last event they lie inside `response`. What is not a JSON object comes back as
    it is.
    """
    opened = _open(payload)
    if opened is None:
        return payload, None
    fields, inner = opened
    if inner is not None:
        stripped, params = take_params(inner)
        fields["response"] = msgspec.Raw(stripped)
        return _ENCODER.encode(fields), params
    raw = fields.pop(PARAMS, None)
    if raw is None:
        return payload, None
    # The answer is right without them, such as where a number is beyond all numbers.
    return _ENCODER.encode(fields), decode_params(raw)


def find_params(payload: bytes) -> dict[str, Any] | None:
    """The same params, where nobody needs the rest."""
    opened = _open(payload)
    if opened is None:
        return None
    fields, inner = opened
    if inner is not None:
        return find_params(inner)
    raw = fields.get(PARAMS)
    return None if raw is None else decode_params(raw)


def _open(payload: bytes) -> tuple[dict[str, msgspec.Raw], bytes | None] | None:
    """Its fields, and the response among them if that has the params; None if it is no object."""
    try:
        fields = split_object(payload)
    except (TooManyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    inner = fields.get("response")
    if PARAMS in fields or inner is None or NEEDLE not in bytes(inner):
        return fields, None
    return fields, bytes(inner)
