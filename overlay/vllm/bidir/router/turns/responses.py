# SPDX-License-Identifier: Apache-2.0
"""Responses' `previous_response_id`: the router keeps the items, and expands them for both legs.

An engine's own store is per process and off by default: P could not know what D has stored, nor
another D. A response is kept as its own input and output and the id of the one before it, so that
a long conversation is kept once. Within the limit the least recently used go first; a response
of which an ancestor has gone cannot be expanded.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace
from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.request import MAX_ID, TurnRequest, items_of
from vllm.bidir.router.conversations.conversations import Key, conversation_key
from vllm.bidir.router.turns.stream import NEEDLE, StreamFilter, event_payload

PATH = "/v1/responses"
PREVIOUS = "previous_response_id"
# A response's last event is one of these.
_LAST = (b'"response.completed"', b'"response.incomplete"')
# In one pass: each line may have any of them.
_LOOKED_INTO = re.compile(b"|".join(map(re.escape, (NEEDLE, *_LAST))))
# Of an entry's two keys, its places and its objects.
_ENTRY_BYTES = 400
# One behind the other: no conversation has as many, and each request would walk them all.
_MOST_BEHIND = 10_000


@dataclass(frozen=True)
class Asked:
    """A request whose answer is to be kept: for whom, after which response, and its own items."""

    tenant: str
    previous: Key | None
    items: bytes


class Said(msgspec.Struct):
    """What is read of an answer."""

    id: str
    output: msgspec.Raw


class _Event(msgspec.Struct):
    response: Said


@dataclass(frozen=True)
class _Kept:
    previous: Key | None
    items: bytes


_SAID = msgspec.json.Decoder(Said)
_EVENT = msgspec.json.Decoder(_Event)
_ID = msgspec.json.Decoder(str | None)
_FLAG = msgspec.json.Decoder(bool | None)


class Responses:
    """Kept responses of all tenants, at most `limit` bytes. `longest`: of an expanded history."""

    def __init__(self, limit: int, longest: int) -> None:
        self._limit = limit
        self._longest = longest
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def expand(self, tenant: str, request: TurnRequest) -> tuple[TurnRequest, Asked | None]:
        """The request with all earlier items in place of an id, and what to keep of its answer.

        What cannot be expanded goes as it is to D alone, which may know it; nor are answers kept
        that the client does not want stored, or that come later (`background`). ClientError 413
        where a short request would become one that is too long.
        """
        items = items_of(request.fields.get("input"))
        if request.path != PATH or items is None:
            return request, None
        fields = request.fields
        if _flag(fields.get("background")):
            return replace(request, bypass=Reason.BYPASS_STORED), None
        asked = Asked(tenant, None, items)
        named = fields.get(PREVIOUS)
        if named is not None and bytes(named) != b"null":
            previous = self._key(tenant, named)
            earlier = self._chain(previous)
            if earlier is None:
                return replace(request, bypass=Reason.BYPASS_STORED), None
            asked = Asked(tenant, previous, items)
            if sum(map(len, earlier)) + len(items) > self._longest:
                raise ClientError(
                    413, f"The whole history exceeds {self._longest} bytes.", PREVIOUS
                )
            whole = b",".join(part for part in (*earlier, items) if part)
            fields = {key: value for key, value in fields.items() if key != PREVIOUS}
            fields["input"] = msgspec.Raw(b"[" + whole + b"]")
            request = replace(request, fields=fields, continues=True)
        stored = _flag(fields.get("store"))
        return request, None if stored is False else asked

    def keep(self, asked: Asked, said: Said) -> Key | None:
        """Keep an answered request; it is expanded for the tenant who asked only.

        Under which key it is kept; None if it is not.
        """
        output = items_of(said.output)
        if output is None or not 0 < len(said.id) <= MAX_ID:
            return None
        key = conversation_key(asked.tenant, said.id)
        # A copy: else the whole body that it is a part of would stay.
        items = b",".join(part for part in (asked.items, output) if part)
        self.adopt(key, asked.previous, items)
        return key if key in self._kept else None

    def adopt(self, key: Key, previous: Key | None, items: bytes) -> None:
        """Keep a response's own items, behind those of the one before it."""
        self._drop(key)
        self._kept[key] = _Kept(previous, items)
        self.bytes += len(items) + _ENTRY_BYTES
        while self.bytes > self._limit:
            self._drop(next(iter(self._kept)))

    def named(self, tenant: str, request: TurnRequest) -> Key | None:
        """The response that a request continues; None if it names none."""
        named = request.fields.get(PREVIOUS)
        return None if request.path != PATH or named is None else self._key(tenant, named)

    def items(self, key: Key) -> bytes | None:
        """A response's own items; None if it is not kept."""
        kept = self._kept.get(key)
        return None if kept is None else kept.items

    def line(self, key: Key) -> tuple[list[Key], Key | None]:
        """A response and those before it as far as they are kept; the one that is missing."""
        line: dict[Key, None] = {}
        at: Key | None = key
        while at is not None and at not in line and len(line) < _MOST_BEHIND:
            kept = self._kept.get(at)
            if kept is None:
                return list(line), at
            line[at] = None
            at = kept.previous
        return list(line), None

    def _key(self, tenant: str, raw: msgspec.Raw) -> Key | None:
        try:
            name = _ID.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return conversation_key(tenant, name) if name and len(name) <= MAX_ID else None

    def _chain(self, key: Key | None) -> list[bytes] | None:
        """The items of a response and all before it, the first first; None if one is missing."""
        chain: list[bytes] = []
        seen: set[Key] = set()
        while key is not None:
            kept = self._kept.get(key)
            # A client can name its responses (`request_id`), and bite its own tail.
            if kept is None or key in seen or len(seen) == _MOST_BEHIND:
                return None
            seen.add(key)
            # From the last to the first: those that others build on are the last to go.
            self._kept.move_to_end(key)
            chain.append(kept.items)
            key = kept.previous
        return chain[::-1] or None

    def _drop(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.bytes -= len(kept.items) + _ENTRY_BYTES


class ResponsesFilter(StreamFilter):
    """A stream filter that also notes what was said: the whole response in the last event."""

    words = (*StreamFilter.words, *_LAST)

    def __init__(self) -> None:
        super().__init__()
        self.said: Said | None = None

    def has_found(self) -> bool:
        return self.said is not None or super().has_found()

    def _find(self, lines: bytes, start: int) -> int:
        found = _LOOKED_INTO.search(lines, start)
        return -1 if found is None else found.start()

    def _strip_line(self, line: bytes) -> bytes:
        payload = event_payload(line)
        if payload is not None and any(word in payload for word in _LAST):
            try:
                self.said = _EVENT.decode(payload).response
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.said = None
        return super()._strip_line(line)


def said_in(whole: bytes) -> Said | None:
    """What an answer that was not streamed said."""
    try:
        return _SAID.decode(whole)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _flag(raw: msgspec.Raw | None) -> bool | None:
    try:
        return None if raw is None else _FLAG.decode(raw)
    except msgspec.DecodeError:
        return None
