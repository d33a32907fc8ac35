# SPDX-License-Identifier: Apache-2.0
"""How long computing a prompt takes on P, by what prompts of like length have taken.

A short prompt leaves the machine half idle and a long one pays for attention, so that tokens per
second of the one say little about the other: each power of two has a rate of its own. Waiting in
the queue and sharing steps only ever make a prompt look slower; the best of the last samples is
nearest to what the machine can do, and goes when the machine has become slower.
"""

from __future__ import annotations

from collections import deque

# Below it a prompt takes about as long as a step, however many tokens it has.
LEAST_TOKENS = 64
# Samples of one length that the best is taken of.
SAMPLES = 32


class PrefillSpeed:
    """Tokens per second by length; times are monotonic seconds, as the caller reads them."""

    def __init__(self) -> None:
        self._computing: dict[str, tuple[int, float]] = {}
        self._rates: dict[int, deque[float]] = {}

    def __len__(self) -> int:
        """Prompts being computed."""
        return len(self._computing)

    def began(self, request_id: str, tokens: int, now: float) -> None:
        """Computing `tokens` of a prompt begins: without those that a cache or a peer had."""
        if tokens >= LEAST_TOKENS:
            self._computing[request_id] = (tokens, now)
        else:
            self.dropped(request_id)

    def ended(self, request_id: str, now: float) -> None:
        """The prompt has been computed, and the request has ended by itself."""
        tokens, began = self._computing.pop(request_id, (0, 0.0))
        if tokens == 0 or now <= began:
            return
        rates = self._rates.setdefault(_bucket(tokens), deque(maxlen=SAMPLES))
        rates.append(tokens / (now - began))

    def dropped(self, request_id: str) -> None:
        """The request was aborted or preempted: how long it took says nothing."""
        self._computing.pop(request_id, None)

    def seconds(self, tokens: int) -> float | None:
        """How long computing `tokens` tokens of a prompt takes; None while nothing is known."""
        if not self._rates:
            return None
        wanted = _bucket(tokens)
        # Of two that are equally far the longer: its rate owes less to what each step costs.
        nearest = min(self._rates, key=lambda bucket: (abs(bucket - wanted), -bucket))
        return tokens / max(self._rates[nearest])


def _bucket(tokens: int) -> int:
    """The power of two that `tokens` reaches: 6 for 64 to 127."""
    return tokens.bit_length() - 1
