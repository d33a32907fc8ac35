# SPDX-License-Identifier: Apache-2.0
"""D's kv_transfer_params of the turns that were used last; D is asked for all others."""

from __future__ import annotations

from collections import OrderedDict

# Of an entry's places in the table and of the objects around its bytes.
_ENTRY_BYTES = 200


class KeptParams:
    """At most `limit` bytes, the least recently used go first. By conversation."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def set(self, key: bytes, encoded: bytes) -> None:
        """Keep these; what is larger than the limit alone is not kept."""
        self.drop(key)
        self._kept[key] = encoded
        self.bytes += len(encoded) + _ENTRY_BYTES
        while self.bytes > self._limit:
            self.drop(next(iter(self._kept)))

    def get(self, key: bytes) -> bytes | None:
        """What is kept, used now; None where it has gone."""
        encoded = self._kept.get(key)
        if encoded is not None:
            self._kept.move_to_end(key)
        return encoded

    def look(self, key: bytes) -> bytes | None:
        """The same, without using it."""
        return self._kept.get(key)

    def drop(self, key: bytes) -> None:
        """The turn is not kept any more."""
        encoded = self._kept.pop(key, None)
        if encoded is not None:
            self.bytes -= len(encoded) + _ENTRY_BYTES
