# SPDX-License-Identifier: Apache-2.0
"""Which conversation a request belongs to, without the client having to be changed.

A client may name it: in the body, or in a header that agents send anyway. Within a named
conversation, or the tenant where nothing is named, the history says which line of turns goes on:
the messages of an earlier request are the beginning of this one's. Agents run several lines under
one name (subagents, titles, retries), and each must find its own last turn.

A wrong link costs a recompute and never a wrong answer: P compares contents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.parts import TooManyError, split_array
from vllm.bidir.router.clients.request import MAX_ID, TurnRequest
from vllm.bidir.router.conversations.conversations import DIGEST_BYTES, Key, conversation_key
from vllm.bidir.router.conversations.recent import Recent

# In this order. Which agent sends which: docs/router.md.
CONVERSATION_HEADERS = (
    "X-Session-ID",
    "X-Conversation-ID",
    "X-Claude-Code-Session-Id",
    "X-Opencode-Session",
    "X-Session-Affinity",
    "Thread-Id",
    "Session-Id",
    "conversation_id",
    "session_id",
)
# Lines of one named conversation beside its first.
_MOST_FORKS = 8
# Of a message on average: what is shorter than its own role is none, and each takes a digest.
_LEAST_BYTES = 16

# Anthropic's clients mark the last messages as worth caching, others in each turn, and turn a
# text into a list of one block to do so.
_MARK = b'"cache_control"'
_MARKED = re.compile(rb"\s*:\s*(?:\{[^{}]*\}|null)")
# In one message: clients set four in a whole request. And of white space before one.
_MOST_MARKS = 64
_MOST_SPACE = 64
_CONTENT = b'"content"'
_ONE_TEXT = re.compile(rb'(\s*:\s*)\[\s*\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*(?=")')
_ENDS = re.compile(rb"\s*\}\s*\]")


class Line(msgspec.Struct, eq=False, gc=False):
    """Turns of which each continues the one before.

    `key`: where the last one is kept. `tip`: the digest of its messages. `forks`: of a named
    conversation's first line, the others. `over`: ended, nothing links to it any more.
    """

    key: Key
    tip: bytes
    forks: list[Line] | None = None
    over: bool = False


class Trace(msgspec.Struct, frozen=True):
    """What a request says of where it belongs: `root`, the key of the conversation that it names,
    `by` what; and `chain`, for each number of its messages from the first on a digest of them."""

    by: str
    root: Key | None
    chain: Sequence[bytes] = ()


class Place(msgspec.Struct, frozen=True):
    """Where a request belongs. `key`: where its parent is kept, the last turn of its line.

    `by`: what said so. `root`: the key of the named conversation. `line` was found by the digest
    `matched` of some of the messages; `whole` is that of all. None: the request has no such.
    """

    key: Key
    by: str
    root: Key | None = None
    line: Line | None = None
    matched: bytes | None = None
    whole: bytes | None = None


class Settled(msgspec.Struct, frozen=True):
    """Where a turn that has ended is to be kept, and whose kept turns are over with it."""

    key: Key
    over: list[Key] = []


class Identities:
    """The lines of all conversations, found by digests of their messages; at most `limit`."""

    def __init__(self, limit: int) -> None:
        # By digest of messages, and by the key of a named conversation.
        self._lines: Recent[bytes, Line] = Recent(limit)

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, tenant: str, request: TurnRequest, headers: Mapping[str, str]) -> Place | None:
        """Where a request belongs; None if nothing says so. ClientError 400 for an unusable id."""
        return self.place(trace(tenant, request, headers))

    def place(self, trace: Trace) -> Place | None:
        """The same of what has been read of it already."""
        by, root, chain = trace.by, trace.root, trace.chain
        if not chain:
            return None if root is None else Place(root, by, root)
        for digest in reversed(chain):
            line = self._alive(digest)
            if line is not None:
                return Place(line.key, by, root, line, digest, chain[-1])
        return Place(root or chain[-1], by, root, whole=chain[-1])

    def adopt(self, key: Key, root: Key | None, tip: bytes, digests: Sequence[bytes] = ()) -> None:
        """Another router has gone on with this line, up to the messages of `tip`.

        It has been found by `digests` of earlier ones as well.
        """
        known = (self._alive(digest) for digest in (key, tip, *digests))
        line = next((one for one in known if one is not None and one.key == key), None)
        first = None if root is None else self._alive(root)
        if line is None and first is not None:
            line = next((one for one in first.forks or () if one.key == key), None)
        if line is None:
            line = Line(key, tip)
        line.tip = tip
        for digest in (*digests, tip):
            self._set(digest, line)
        if key == root:
            self._set(key, line)
        elif root is not None:
            first = first or Line(root, b"")
            self._set(root, first)
            first.forks = first.forks or []
            if line not in first.forks:
                first.forks.append(line)
                del first.forks[:-_MOST_FORKS]

    def part(self, place: Place) -> None:
        """Another router was the first to go on from here: this turn is a line of its own."""
        if place.line is not None and place.line.tip == place.matched:
            place.line.tip = b""
        if place.root is not None and self._alive(place.root) is None:
            self._set(place.root, Line(place.root, b""))

    def settle(self, place: Place) -> Settled:
        """A turn has ended: the next that begins with its messages will find it.

        Of requests that share a parent the first to end goes on with their line, the others are
        lines of their own from then on.
        """
        whole = place.whole
        if whole is None:
            return Settled(place.key)
        over: list[Key] = []
        line = self._continued(place)
        if line is None:
            line, over = self._new_line(place, whole)
        line.tip = whole
        self._set(whole, line)
        first = None if place.root is None else self._alive(place.root)
        if first is not None:
            # By the line's own copy of the name's key.
            self._set(first.key, first)
            if first.forks is not None and line in first.forks:
                first.forks.remove(line)
                first.forks.append(line)
        return Settled(line.key, over)

    def end(self, place: Place) -> list[Key]:
        """No turn follows: all keys of the named conversation, or that of the line."""
        if place.root is not None:
            return self.end_named(place.root)
        if place.line is not None:
            place.line.over = True
        return [place.key]

    def end_named(self, root: Key) -> list[Key]:
        """The same for a named conversation."""
        first = self._lines.pop(root)
        if first is None:
            return [root]
        lines = [first, *(first.forks or ())]
        for line in lines:
            line.over = True
        return [line.key for line in lines]

    def keys_of(self, root: Key) -> list[Key]:
        """Where the last turns of a named conversation's lines are kept."""
        first = self._alive(root)
        return [root] if first is None else [first.key, *(one.key for one in first.forks or ())]

    def _continued(self, place: Place) -> Line | None:
        for line in (place.line, self._alive(place.whole or b"")):
            if line is not None and not line.over and line.tip in (place.matched, place.whole):
                return line
        return None

    def _new_line(self, place: Place, whole: bytes) -> tuple[Line, list[Key]]:
        if place.root is None:
            return Line(whole if place.line is None else _fork(whole), whole), []
        first = self._alive(place.root)
        if first is None:
            first = Line(place.root, whole)
            self._set(place.root, first)
            return first, []
        line = Line(_fork(whole), whole)
        first.forks = first.forks or []
        first.forks.append(line)
        if len(first.forks) <= _MOST_FORKS:
            return line, []
        oldest = first.forks.pop(0)
        oldest.over = True
        return line, [oldest.key]

    def _alive(self, digest: bytes) -> Line | None:
        line = self._lines.get(digest)
        return None if line is None or line.over else line

    def _set(self, digest: bytes, line: Line) -> None:
        self._lines.set(digest, line)
        for old in self._lines.excess():
            self._lines.pop(old)


def trace(tenant: str, request: TurnRequest, headers: Mapping[str, str]) -> Trace:
    """What a request says of where it belongs. ClientError 400 for an id that is of no use."""
    name, by = _named(request, headers)
    root = None if name is None else conversation_key(tenant, name)
    messages = _messages(request.history)
    if not messages:
        return Trace(by, root)
    return Trace(by, root, _digests(root or conversation_key(tenant, ""), request, messages))


def _named(request: TurnRequest, headers: Mapping[str, str]) -> tuple[str | None, str]:
    """The name that a client has given its conversation, and where."""
    if request.conversation is not None:
        return request.conversation, "body"
    for header in CONVERSATION_HEADERS:
        name = headers.get(header)
        if name:
            if len(name) > MAX_ID:
                raise ClientError(400, f"`{header}` must not exceed {MAX_ID} characters.", header)
            return name, "header"
    return None, "previous_response" if request.continues else "history"


def _messages(raw: bytes | None) -> Sequence[msgspec.Raw | bytes]:
    """The messages of a history, undecoded; none if it is no list, which the engine will judge.

    None either of more, or shorter ones, than a history has: they would be looked at one by one.
    """
    if raw is None:
        return ()
    try:
        messages = split_array(raw)
    except (TooManyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
    if len(messages) * _LEAST_BYTES > len(raw):
        return ()
    return [_plain(bytes(one)) for one in messages] if _MARK in raw else messages


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: msgspec.Raw


class _OneText(msgspec.Struct):
    content: tuple[_Text]


_ONE_TEXT_MESSAGE = msgspec.json.Decoder(_OneText)


def _plain(message: bytes) -> bytes:
    """A message without marks, and its only text as a string."""
    message = _unmarked(message)
    at = message.find(_CONTENT) + len(_CONTENT)
    found = _ONE_TEXT.match(message, at)
    if found is None:
        return message
    try:
        text = bytes(_ONE_TEXT_MESSAGE.decode(message).content[0].text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return message
    end = _ENDS.match(message, found.end() + len(text))
    if end is None or not message.startswith(text, found.end()):
        return message
    return message[:at] + found[1] + text + message[end.end() :]


def _unmarked(message: bytes) -> bytes:
    kept = []
    start = at = 0
    for _ in range(_MOST_MARKS):
        at = message.find(_MARK, at)
        if at < 0:
            break
        comma = message.rfind(b",", max(start, at - _MOST_SPACE), at)
        marked = _MARKED.match(message, at + len(_MARK))
        at += len(_MARK)
        if comma >= 0 and marked is not None and not message[comma + 1 : at - len(_MARK)].strip():
            kept.append(message[start:comma])
            start = at = marked.end()
    return b"".join((*kept, message[start:])) if kept else message


def _digests(
    seed: bytes, request: TurnRequest, messages: Sequence[msgspec.Raw | bytes]
) -> list[bytes]:
    """For each number of messages from the first on, a digest of them."""
    rolling = hashlib.blake2b(seed, digest_size=DIGEST_BYTES)
    # Nothing is ever reused across these two.
    scope = [request.fields.get(name, b"") for name in ("model", "cache_salt")]
    chain = []
    for message in (*scope, *messages):
        view = memoryview(message)
        rolling.update(view.nbytes.to_bytes(8, "little"))
        rolling.update(view)
        chain.append(rolling.digest())
    return chain[len(scope) :]


def _fork(whole: bytes) -> Key:
    """A key for the line that begins here; `whole` itself may be that of another."""
    return hashlib.blake2b(whole, digest_size=DIGEST_BYTES, person=b"fork").digest()
