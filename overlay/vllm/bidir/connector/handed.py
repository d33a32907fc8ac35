# SPDX-License-Identifier: Apache-2.0
"""P's list of prompts that it has computed for a D, and what it answers to the D that reads one.

The base lets D read what P may have freed: when D comes after P's time is over, or when a router
has sent the same params to a second D after the first. What D then finds in those blocks is another
prompt's, and D answers from it.

Here D claims what it reads, by a token that P's params carry, and says which blocks of which
request it was told to read, and for which prompt (binding.py). The scheduler writes the list; the
side channel's thread reads it. An entry ends before its blocks go back to the pool, in the same
call of the scheduler: so a reader who is told, after reading, that the entry stands has read what P
computed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from vllm.bidir.reasons import Reason

# Where the token is in P's params: they say with it that P answers CLAIM.
PARAM = "claim"
_TOKEN_BYTES = 16


def parse_token(value: object) -> str | None:
    """The token of untrusted params, or None."""
    return value if isinstance(value, str) and len(value) == 2 * _TOKEN_BYTES else None


@dataclass
class _Handover:
    token: str
    until: float
    binding: bytes
    reader: str | None = None


class HandedOver:
    """Handovers of one engine core. Safe to use from two threads; no call waits for long."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` is the one that `until` is of, in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._by_request: dict[str, _Handover] = {}
        self._by_token: dict[str, _Handover] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, request_id: str, until: float, binding: bytes) -> str:
        """The workers keep its blocks until then, and longer if D asks them to; the token.

        `binding` names what its params say.
        """
        made = _Handover(secrets.token_hex(_TOKEN_BYTES), until, binding)
        with self._lock:
            self._by_request[request_id] = self._by_token[made.token] = made
        return made.token

    def end(self, request_id: str) -> None:
        """The request's blocks are about to be freed."""
        if request_id in self._by_request:  # only the scheduler changes which there are
            with self._lock:
                del self._by_token[self._by_request.pop(request_id).token]

    def claim(self, token: str, reader: str, binding: bytes) -> float | Reason:
        """Seconds for which the blocks stay at the least, 0 when that is not known beforehand;
        EXPIRED when they are gone, or are another reader's, NOT_HANDED_OVER when `binding` names
        something else.

        Before that time they end only when all of the reader's ranks have told the workers that
        they may. So there is one reader: a second could have them freed under it by the first.
        """
        with self._lock:
            found = self._by_token.get(token)
            if found is None:
                return Reason.EXPIRED
            if binding != found.binding:
                return Reason.NOT_HANDED_OVER
            if found.reader not in (None, reader):
                return Reason.EXPIRED
            found.reader = reader
            return max(0.0, found.until - self._clock())
