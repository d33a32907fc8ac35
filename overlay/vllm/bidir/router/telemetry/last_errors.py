# SPDX-License-Identifier: Apache-2.0
"""What has gone wrong lately and where, for somebody who looks: kinds, nodes and numbers only.

Nothing of a request stands here, no id and no text of an engine.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST_KINDS = 50
_LONGEST = 200


@dataclass
class LastError:
    """One kind of error on one node (empty: of the router itself), and how often.

    `what` has failed, `why` is a status or a word. `last`: when it did, in seconds since 1970.
    """

    what: str
    node: str
    why: str
    count: int
    last: float


class LastErrors:
    """The kinds of errors seen last, at most MOST_KINDS."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._seen: OrderedDict[tuple[str, str, str], LastError] = OrderedDict()

    def note(self, what: str, node: str, why: str) -> None:
        """It has happened, once more or for the first time."""
        key = (what, node[:_LONGEST], why[:_LONGEST])
        error = self._seen.setdefault(key, LastError(*key, 0, 0.0))
        error.count += 1
        error.last = self._clock()
        self._seen.move_to_end(key)
        if len(self._seen) > MOST_KINDS:
            self._seen.popitem(last=False)

    def newest_first(self) -> list[LastError]:
        return list(reversed(self._seen.values()))
