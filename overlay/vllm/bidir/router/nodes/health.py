# SPDX-License-Identifier: Apache-2.0
"""Whether one node may be given turns, by what its /health says and how its turns end.

Checks say `up` or not. Turns that fail one after the other before their first byte eject the node
for a while, and for twice as long each time that it fails again at once. What comes back is given
little at first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# A node that is up may miss one check: its server may be busy with a long prompt.
_FAILED_CHECKS = 2
_LONGEST_EJECTION_S = 60.0
_LEAST_SHARE = 0.1


@dataclass(frozen=True)
class HealthRules:
    """`eject_after` failures in a row eject for `eject_s` seconds, 0 never; a node that has come
    back has its full share after `slow_start_s` seconds."""

    eject_after: int = 3
    eject_s: float = 1.0
    slow_start_s: float = 10.0


class Health:
    """One node's health. `up` is None until the first check. `fresh`: it starts slowly."""

    def __init__(self, rules: HealthRules, clock: Callable[[], float], fresh: bool = False) -> None:
        self.up: bool | None = None
        self._rules = rules
        self._clock = clock
        self._failed_checks = 0
        self._failures = 0
        self._ejection_s = 0.0
        self._ejected_until = -math.inf
        self._slow_from = clock() if fresh else -math.inf

    def usable(self, now: float) -> bool:
        return self.up is not False and now >= self._ejected_until

    def state(self, now: float) -> str:
        """One word for logs and pages: up, down, ejected or unknown."""
        if self.up is False:
            return "down"
        if now < self._ejected_until:
            return "ejected"
        return "unknown" if self.up is None else "up"

    def share(self, now: float) -> float:
        """How much of its full load it may be given, 0.1 to 1."""
        since, whole = now - self._slow_from, self._rules.slow_start_s
        return 1.0 if since >= whole else max(since / whole, _LEAST_SHARE)

    def checked(self, passed: bool) -> bool:
        """A check has ended; whether the node has gone down or come up by it."""
        before = self.up
        if passed:
            self._failed_checks = 0
            self.up = True
            if before is False:
                self._come_back()
        else:
            self._failed_checks += 1
            if before is not True or self._failed_checks >= _FAILED_CHECKS:
                self.up = False
        return self.up is not before

    def turn_succeeded(self) -> None:
        self._failures = 0
        # Forgiven once it has served for as long as it was out.
        if self._ejection_s and self._clock() >= self._ejected_until + self._ejection_s:
            self._ejection_s = 0.0

    def turn_failed(self) -> bool:
        """A turn has failed before its first byte; whether the node is ejected by it."""
        now = self._clock()
        if not self._rules.eject_after or now < self._ejected_until:
            return False
        self._failures += 1
        if not self._ejection_s and self._failures < self._rules.eject_after:
            return False
        self._failures = 0
        again = min(self._ejection_s * 2, _LONGEST_EJECTION_S)
        self._ejection_s = again or self._rules.eject_s
        self._ejected_until = self._slow_from = now + self._ejection_s
        return True

    def _come_back(self) -> None:
        # It has been started anew: what the process before did wrong says nothing.
        self._failures, self._ejection_s, self._ejected_until = 0, 0.0, -math.inf
        self._slow_from = self._clock()
