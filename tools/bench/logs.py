"""What the router, the sample proxy and P wrote about each request.

All name the request by the id that its client gave in X-Request-Id, or made one themselves: the
engines build their own ids around it. Where the client gave none, the conversation is named, whose
turns come one after the other: by the router with a digest, by the sample proxy as it is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container
from dataclasses import dataclass, field, replace

_ROUTER = re.compile(r"\[(?P<id>[^\]]+)\] conv=(?P<conversation>\S+): (?P<what>.*)$")
_LOOKED_UP = re.compile(r"cache (HIT|MISS) \(([^)]*)\)")
_ALONE = re.compile(r"decode node alone \(([^)]*)\)")
_PREFILL = re.compile(r"Prefill done in (\d+(?:\.\d+)?)ms")
_WITHHELD = "does not verify read-backs"
_PROXY_TURN = re.compile(
    r"\[([0-9a-f-]{36})\] conv=(\S+): (?:(cache MISS)|sending D's cached blocks to P)"
)
_PROXY_PREFILL = re.compile(r"\[([0-9a-f-]{36})\] Prefill done in (\d+(?:\.\d+)?)ms")
_READ_BACK = re.compile(r"read-back (req=\S+ .*outcome=.*)$")
_PAIR = re.compile(r"(\w+)=(\S+)")
# The router cuts ids at this length.
ID_LENGTH = 36


@dataclass(frozen=True)
class Routed:
    """One turn in the router's log. `decision`: hit, miss, withheld, alone; "" if not said."""

    decision: str = ""
    reason: str = ""
    prefill_ms: float | None = None
    failed_legs: int = 0
    request_id: str = ""


@dataclass(frozen=True)
class ReadBack:
    """One decision of P. Tokens, ms, bytes."""

    outcome: str
    reason: str
    prompt: int
    local: int
    verified: int
    read: int
    computed: int
    bytes_moved: int = 0
    hold_ms: float = 0.0
    transfer_ms: float = 0.0
    confirm_ms: float = 0.0


@dataclass
class ReadBacks:
    """P's decisions by request; `repeated` had several, `strangers` are of nobody's requests."""

    by_request: dict[str, ReadBack] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    strangers: list[ReadBack] = field(default_factory=list)

    @property
    def every(self) -> list[ReadBack]:
        return [*self.by_request.values(), *self.strangers]


@dataclass
class Router:
    """The router's turns, by request id and by conversation digest and number, from 1."""

    by_request: dict[str, Routed] = field(default_factory=dict)
    by_turn: dict[tuple[str, int], str] = field(default_factory=dict)

    def of_turn(self, digest: str, number: int) -> Routed | None:
        return self.by_request.get(self.by_turn.get((digest, number), ""))


def conversation_digest(tenant: str, conversation: str) -> str:
    """How the router's log names a conversation; `tenant` is the Authorization header."""
    text = len(tenant).to_bytes(8, "little") + tenant.encode() + conversation.encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()[:8]


def read_router(text: str) -> Router:
    """All turns of a router's log."""
    router = Router()
    found, numbers = router.by_request, dict[str, int]()
    for line in text.splitlines():
        match = _ROUTER.search(line)
        if match is None:
            continue
        name, what = match["id"], match["what"]
        if name not in found:
            digest = match["conversation"]
            numbers[digest] = numbers.get(digest, 0) + 1
            router.by_turn[digest, numbers[digest]] = name
        turn = found.get(name, Routed(request_id=name))
        if looked := _LOOKED_UP.match(what):
            hit = looked[1] == "HIT"
            turn = replace(turn, decision="hit" if hit else "miss", reason="" if hit else looked[2])
        elif alone := _ALONE.match(what):
            turn = replace(turn, decision="alone", reason=alone[1])
        elif _WITHHELD in what:
            turn = replace(turn, decision="withheld")
        elif done := _PREFILL.match(what):
            turn = replace(turn, prefill_ms=float(done[1]))
        elif " leg failed on " in what:
            turn = replace(turn, failed_legs=turn.failed_legs + 1)
        found[name] = turn
    return router


def read_sample_proxy(text: str) -> dict[tuple[str, int], Routed]:
    """Turns by conversation id and number, from 1."""
    numbers: dict[str, int] = {}
    places: dict[str, tuple[str, int]] = {}
    found: dict[tuple[str, int], Routed] = {}
    for line in text.splitlines():
        if turn := _PROXY_TURN.search(line):
            number = numbers[turn[2]] = numbers.get(turn[2], 0) + 1
            places[turn[1]] = turn[2], number
            found[turn[2], number] = Routed("miss" if turn[3] else "hit")
        elif done := _PROXY_PREFILL.search(line):
            place = places.get(done[1])
            if place is not None:
                found[place] = replace(found[place], prefill_ms=float(done[2]))
    return found


def read_prefill(text: str, known: Container[str]) -> ReadBacks:
    """P's decisions, by those of the request ids that are `known`."""
    found = ReadBacks()
    for line in text.splitlines():
        fields = read_back_fields(line)
        if fields is None:
            continue
        try:
            decision = _decision(fields)
        except (KeyError, ValueError):
            continue
        name = client_id(fields["req"], known)
        if name is None:
            found.strangers.append(decision)
        elif name in found.by_request:
            found.repeated.add(name)
            found.strangers.append(decision)
        else:
            found.by_request[name] = decision
    return found


def read_back_fields(line: str) -> dict[str, str] | None:
    """All that P's line about a read-back says, by name; None for any other line."""
    match = _READ_BACK.search(line)
    return None if match is None else dict(_PAIR.findall(match[1]))


def client_id(engine_id: str, known: Container[str]) -> str | None:
    """The id that the client gave to what the engine calls `engine_id`; None if it is not known.

    The engine puts the API's prefix before it, and the number of the prompt and random digits
    behind it.
    """
    rest = engine_id.partition("-")[2]
    while rest:
        if rest in known:
            return rest
        rest = rest.rpartition("-")[0]
    return None


def _decision(fields: dict[str, str]) -> ReadBack:
    return ReadBack(
        outcome=fields["outcome"],
        reason=fields.get("reason", ""),
        prompt=int(fields["prompt"]),
        local=int(fields["local"]),
        verified=int(fields["verified"]),
        read=int(fields["read"]),
        computed=int(fields["computed"]),
        bytes_moved=round(float(fields.get("mb", "0")) * 1e6),
        hold_ms=float(fields.get("hold_ms", "0")),
        transfer_ms=float(fields.get("transfer_ms", "0")),
        confirm_ms=float(fields.get("confirm_ms", "0")),
    )
