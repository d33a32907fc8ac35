# SPDX-License-Identifier: Apache-2.0
"""A kept turn as it is remembered: what it says, in 80 bytes.

Objects for its parts would take three times as much, and the garbage collector would look at
each of them. What a turn asks of a record most often is read without making such objects.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from typing import Any

import msgspec
from vllm.bidir.router.nodes.params import as_offered

_LEASE_ID = re.compile(r"d(0|[1-9][0-9]{0,8})-([0-9a-f]{32})")
# Node, flags, rank, used, time, tokens, stamp, lease: one byte more, and Python takes 96.
_LAYOUT = struct.Struct("<HBIddII16s")
_NUMBER_AND_FLAGS = struct.Struct("<HB")
_USED, _USED_AT = struct.Struct("<d"), struct.calcsize("<HBI")
_STAMP, _STAMP_AT = struct.Struct("<I"), struct.calcsize("<HBIddI")
_NAMED, _RENEWED = 1, 2
_MOST = (1 << 32) - 1


class KeptTurn(msgspec.Struct, frozen=True, gc=False):
    """A finished turn whose blocks `node` keeps: `tokens` of them, 0 if that is not known.

    `lease_id`: by which D can be asked for it; None if D does not say. `renewed_s`: the lease runs
    so long without renewal, and as long as it is renewed the turn is kept; None where D keeps it
    for a fixed time, until `expires`. `stamp`: when it was kept, in seconds since 1970, and later
    than what it follows. `encoded`: D's kv_transfer_params as P is offered them; None while they
    are not at hand.
    """

    node: str
    encoded: bytes | None = None
    lease_id: str | None = None
    renewed_s: float | None = None
    expires: float = 0.0
    tokens: int = 0
    stamp: int = 0

    def with_params(self, params: dict[str, Any]) -> KeptTurn:
        """The same turn, with its params at hand."""
        return msgspec.structs.replace(self, encoded=as_offered(params))


def is_lease_id(text: object) -> bool:
    """Whether it is the name of a lease as D makes them."""
    return isinstance(text, str) and _LEASE_ID.fullmatch(text) is not None


class Records:
    """Packs kept turns without their params. A node's name is kept once, while records name it."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._counts: Counter[int] = Counter()

    def pack(self, turn: KeptTurn, used: float) -> bytes:
        """`used`: when the conversation was last heard of. Each record is to be dropped once."""
        number = self._numbers.get(turn.node)
        if number is None:
            number = next(free for free in range(1 << 16) if free not in self._names)
            self._names[number], self._numbers[turn.node] = turn.node, number
        self._counts[number] += 1
        flags = rank = 0
        digits = b""
        if turn.lease_id is not None:
            found = _LEASE_ID.fullmatch(turn.lease_id)
            assert found is not None  # whoever made the turn has looked
            flags, rank, digits = _NAMED, int(found[1]), bytes.fromhex(found[2])
        time = turn.expires
        if turn.renewed_s is not None:
            flags, time = flags | _RENEWED, turn.renewed_s
        tokens, stamp = min(turn.tokens, _MOST), min(turn.stamp, _MOST)
        return _LAYOUT.pack(number, flags, rank, used, time, tokens, stamp, digits)

    def unpack(self, record: bytes) -> KeptTurn:
        """The turn again, without params."""
        number, flags, rank, _, time, tokens, stamp, digits = _LAYOUT.unpack(record)
        lease_id = f"d{rank}-{digits.hex()}" if flags & _NAMED else None
        renewed = time if flags & _RENEWED else None
        return KeptTurn(
            self._names[number],
            None,
            lease_id,
            renewed,
            0.0 if renewed is not None else time,
            tokens,
            stamp,
        )

    def used(self, record: bytes) -> float:
        """When the conversation was last heard of."""
        used: float = _USED.unpack_from(record, _USED_AT)[0]
        return used

    def stamp(self, record: bytes) -> int:
        """When the turn was kept, as `KeptTurn` says it."""
        stamp: int = _STAMP.unpack_from(record, _STAMP_AT)[0]
        return stamp

    def renewed_on(self, record: bytes) -> str | None:
        """The node with which the turn's lease is to be renewed; None if it is not."""
        number, flags = _NUMBER_AND_FLAGS.unpack_from(record)
        return self._names[number] if flags & _RENEWED else None

    def touched(self, record: bytes, used: float) -> bytes:
        """The same record, used now."""
        return record[:_USED_AT] + _USED.pack(used) + record[_USED_AT + _USED.size :]

    def drop(self, record: bytes) -> None:
        """This record is gone."""
        number: int = _NUMBER_AND_FLAGS.unpack_from(record)[0]
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._counts[number]
            del self._numbers[self._names.pop(number)]
