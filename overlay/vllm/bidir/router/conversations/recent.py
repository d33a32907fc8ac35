# SPDX-License-Identifier: Apache-2.0
"""A dict in the order of use, for as many entries as there are conversations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

# Below this a copy saves nothing worth having.
_SMALL = 1_000
# Beyond a limit so much more goes at once: finding the oldest entry passes all that have gone.
_BATCH = 256


class Recent(Generic[Key, Value]):
    """At most `limit` entries (None: any number), the least recently set or touched first.

    A dict alone would double its table as soon as entries come and go, since it makes room for
    those that were deleted as well. It is copied before: 52 bytes an entry instead of 105, and 120
    of an OrderedDict.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._entries: dict[Key, Value] = {}
        self._written = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        """The keys, the oldest first; nothing may be set meanwhile."""
        return iter(self._entries)

    def get(self, key: Key) -> Value | None:
        """The entry, which keeps its place; None without one."""
        return self._entries.get(key)

    def items(self) -> list[tuple[Key, Value]]:
        """All entries, the oldest first."""
        return list(self._entries.items())

    def set(self, key: Key, value: Value) -> None:
        """Make it the most recent entry."""
        self._entries.pop(key, None)
        self._entries[key] = value
        self._written += 1
        if self._written > _SMALL and self._written > len(self._entries) // 2:
            entries: dict[Key, Value] = {}
            entries.update(self._entries)
            self._entries, self._written = entries, 0

    def replace(self, key: Key, value: Value) -> None:
        """Change an entry in its place. KeyError without one."""
        if key not in self._entries:
            raise KeyError(key)
        self._entries[key] = value

    def pop(self, key: Key) -> Value | None:
        """Take an entry out; None without one."""
        return self._entries.pop(key, None)

    def excess(self) -> list[Key]:
        """The keys that are to go, none within the limit; taking them out is the caller's."""
        if self._limit is None or len(self._entries) <= self._limit:
            return []
        more = len(self._entries) - self._limit + self._limit // _BATCH
        return list(islice(self._entries, more))
