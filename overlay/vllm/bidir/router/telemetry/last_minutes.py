# SPDX-License-Identifier: Apache-2.0
"""Counts of the last minutes, for somebody who has no Prometheus at hand."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

MINUTES = 10


class LastMinutes:
    """Counts words, and forgets them after MINUTES, a minute at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: deque[tuple[int, Counter[str]]] = deque()

    def count(self, word: str) -> None:
        now = int(self._clock() // 60)
        if not self._minutes or self._minutes[-1][0] != now:
            self._minutes.append((now, Counter()))
            self._forget(now)
        self._minutes[-1][1][word] += 1

    def totals(self) -> Counter[str]:
        """How often each word was counted in the last MINUTES, the present one included."""
        self._forget(self._minute())
        totals: Counter[str] = Counter()
        for _, counted in self._minutes:
            totals.update(counted)
        return totals

    def _minute(self) -> int:
        return int(self._clock() // 60)

    def _forget(self, now: int) -> None:
        while self._minutes and self._minutes[0][0] <= now - MINUTES:
            self._minutes.popleft()
