# SPDX-License-Identifier: Apache-2.0
"""Whether an answer of 200 is one: engines say 200 to a stream before they know.

What they say first only opens the stream. What follows may be an error, an end without a word, or
that the turn has been aborted: so end the turns of an engine that is shut down.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from vllm.bidir.router.clients.errors import error_body
from vllm.bidir.router.nodes.reply import AnswerError, Reply
from vllm.bidir.router.turns.stream import event_payload

# Responses' first two events repeat what was asked. What is longer is handed on unseen.
_MAX_OPENINGS = 8 << 20
_DONE = b"[DONE]"
_ROLE = b'"delta":{"role":"assistant","content":""}'
_TYPES = ("message_start", "response.created", "response.in_progress")
_MAY_BE_ABORTED = re.compile(
    rb'"(?:finish_reason|status|output_tokens)"\s*:\s*(?:"abort"|"cancelled"|0\b)'
)


class AbortedError(ConnectionError):
    """A node has given a turn up, or has answered it with nothing."""


@dataclass(frozen=True)
class Failed:
    """What a node has said instead of an answer. `kind` is for metrics."""

    status: int
    body: bytes
    kind: str
    content_type: str = "application/json"


class Beginning:
    """A stream up to the first event that says something: `data`, and `failed` if it is no answer.

    `path` is the API's, in whose shape a failure is told.
    """

    def __init__(self, path: str) -> None:
        self.opened = False
        self.failed: Failed | None = None
        self._path = path
        self._pieces: list[bytes] = []
        self._size = 0
        self._rest: list[bytes] = []

    @property
    def data(self) -> bytes:
        return b"".join(self._pieces)

    def feed(self, piece: bytes) -> bool:
        """What comes next, b"" at the stream's end; whether it is known now what it is."""
        if not piece:
            if not self._says([b"".join(self._rest)]):
                self.fail(AbortedError())
            return True
        self._pieces.append(piece)
        self._size += len(piece)
        if b"\n" in piece:
            *lines, rest = b"".join([*self._rest, piece]).split(b"\n")
            self._rest = [rest]
            if self._says(lines):
                return True
        else:
            self._rest.append(piece)
        return self._size > _MAX_OPENINGS

    def fail(self, error: ConnectionError) -> None:
        """It has ended like that."""
        self.failed = _no_answer(self._path, type(error).__name__)

    def _says(self, lines: list[bytes]) -> bool:
        for line in lines:
            if line.startswith(b":"):
                return True  # the engine keeps the client's connection alive with such lines
            payload = event_payload(line)
            if payload is None:
                continue
            event = _decoded(payload)
            if event is None or not event.opens(payload):
                self.failed = self._failure(payload, event)
                return True
            self.opened = True
        return False

    def _failure(self, payload: bytes, event: _Said | None) -> Failed | None:
        if payload == _DONE or (event is not None and event.aborted()):
            return _no_answer(self._path, AbortedError.__name__)
        if event is None or event.error is None:
            return None
        # Anthropic's shape has no code; an error of the request itself is no stream.
        status = event.error.code if event.type is None else 500
        return Failed(status, payload, str(status)) if 500 <= status < 600 else None


async def read_beginning(upstream: Reply, path: str) -> Beginning:
    """Read a stream until it is known what it is. AnswerError if it breaks off before anything."""
    beginning = Beginning(path)
    try:
        while not beginning.feed(await upstream.read_some()):
            pass
    except AnswerError as error:
        # Of Responses an engine breaks off where it tells of its fault on other APIs.
        if not beginning.opened:
            raise
        beginning.fail(error)
    if not beginning.data:
        raise AnswerError("a stream without a byte")
    return beginning


def whole_failure(body: bytes, path: str) -> Failed | None:
    """Why a whole answer of 200 is none. What has been aborted is none however far it has come."""
    if _MAY_BE_ABORTED.search(body) is None:
        return None
    said = _decoded(body)
    aborted = said is not None and said.aborted()
    return _no_answer(path, AbortedError.__name__) if aborted else None


def _no_answer(path: str, kind: str) -> Failed:
    told = error_body(502, "The node has aborted its answer before it said anything.", None, path)
    return Failed(502, told, kind)


class _Usage(msgspec.Struct):
    output_tokens: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: int = 0


class _Response(msgspec.Struct):
    usage: _Usage | None = None
    status: str | None = None

    def aborted(self) -> bool:
        """Responses and messages say no more than that not one token was made."""
        none = self.usage is not None and self.usage.output_tokens == 0
        return none or self.status == "cancelled"


class _Said(_Response):
    """An event, or a whole answer, of any API."""

    type: str | None = None
    choices: list[_Choice] | None = None
    error: _Error | None = None
    response: _Response | None = None

    def opens(self, payload: bytes) -> bool:
        """Whether it says no more than that somebody answers, or what that has cost."""
        if self.choices:
            return self.error is None and _ROLE in payload
        return self.type in _TYPES or (self.choices is not None and self.usage is not None)

    def aborted(self) -> bool:
        """Whether it says that the turn has been given up."""
        if self.response is not None:
            return self.response.aborted()
        return super().aborted() or "abort" in [one.finish_reason for one in self.choices or ()]


_SAID = msgspec.json.Decoder(_Said)


def _decoded(data: bytes) -> _Said | None:
    try:
        return _SAID.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
