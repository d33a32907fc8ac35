# SPDX-License-Identifier: Apache-2.0
"""How long a READ may take before it is given up: bytes by the rate that the peer has shown."""

from __future__ import annotations

# Of a peer that nothing has been read from yet: a gigabit's worth, slower than any link that
# disaggregation is worth its while on.
UNKNOWN_MB_S = 100.0
# The rate is an average, and several READs share a link.
SLACK = 4.0
_WEIGHT = 0.3


class Pace:
    """Measured rates by engine id. MB are 10^6 bytes."""

    def __init__(self, least_s: float) -> None:
        """`least_s` is the shortest bound, whatever the rate."""
        self._least_s = least_s
        self._rates: dict[str, float] = {}

    def bound(self, engine_id: str, megabytes: float) -> float:
        """Seconds that a READ of so many MB may take."""
        rate = self._rates.get(engine_id, UNKNOWN_MB_S)
        return max(self._least_s, SLACK * megabytes / rate)

    def measured(self, engine_id: str, megabytes: float, seconds: float) -> None:
        """A READ has finished."""
        if seconds <= 0 or megabytes <= 0:
            return
        rate = megabytes / seconds
        before = self._rates.get(engine_id, rate)
        self._rates[engine_id] = before + _WEIGHT * (rate - before)

    def forget(self, engine_id: str) -> None:
        """The engine is gone."""
        self._rates.pop(engine_id, None)
