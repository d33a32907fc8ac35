"""What is asked, in which order, and whether it fits. Pure."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tools.bench.errors import BenchError

SetName = Literal["ours", "stock"]
Kind = Literal["recompute", "read_back"]
KINDS: tuple[Kind, ...] = ("recompute", "read_back")
GIB = 2**30
# Conversations of the fragmenting, in tokens of their first prompt, and how many run at once.
FRAGMENTS = (300, 4000)
FRAGMENTS_AT_ONCE = 8
# Answers of fragmenting and held conversations, tokens.
SHORT_ANSWER = 8
# A stream straight to D, tokens of its prompt and of its answer.
STREAM_PROMPT, STREAM_ANSWER = 512, 200
# Tokens that a second turn would generate if its client did not leave after the first.
SECOND_ANSWER = 64
# A block or two of each sequence that is not full, and the next token's.
_MARGIN = 256
# After this the engine has given a turn's blocks back.
_EXPIRY_MARGIN_S = 1.0


@dataclass(frozen=True)
class Arm:
    """One of a set's two ways to compute a second turn."""

    set_name: SetName
    kind: Kind

    @property
    def name(self) -> str:
        return f"{self.set_name} {self.kind}"


@dataclass(frozen=True)
class Plan:
    """Lengths are those of the second turn's prompt; all in tokens. ttl_s: that D keeps a turn."""

    lengths: tuple[int, ...]
    new_tokens: int
    output_tokens: int
    hold: tuple[int, ...]
    hold_tokens: int
    fragment: int
    ttl_s: float

    def first_prompt(self, length: int) -> int:
        """Tokens of the first turn's prompt, so that the second one is `length` long."""
        return length - self.new_tokens - self.output_tokens

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all."""
        found = [length + SECOND_ANSWER for length in self.lengths]
        if self.fragment:
            found.append(FRAGMENTS[1] + SHORT_ANSWER)
        if any(self.hold):
            found.append(self.hold_tokens + SHORT_ANSWER)
        if self.hold:
            found.append(STREAM_PROMPT + STREAM_ANSWER)
        return max(found)


def arms(sets: Sequence[SetName]) -> tuple[Arm, ...]:
    """All arms; those of one kind stand together, so that what is compared runs close together."""
    return tuple(Arm(name, kind) for kind in KINDS for name in sets)


def order(all_arms: Sequence[Arm], repeat: int) -> tuple[Arm, ...]:
    """The arms in this repeat: each time another one begins, and every other goes backwards."""
    start = (repeat // 2) % len(all_arms)
    turned = (*all_arms[start:], *all_arms[:start])
    return turned if repeat % 2 == 0 else turned[::-1]


def check_plan(plan: Plan, longest_possible: int) -> None:
    """Raise BenchError for lengths that cannot be."""
    least = plan.new_tokens + plan.output_tokens + 1
    for length in plan.lengths:
        if plan.first_prompt(length) < 1:
            raise BenchError(
                f"a second turn of {length} tokens has no first one",
                expected=f"at least {least} tokens: answer, new tokens, and a prompt",
                found=length,
                next_step="give greater --lengths, or fewer --new-tokens or --output-tokens",
            )
    if plan.longest > longest_possible:
        raise BenchError(
            "the model does not take prompts of that length",
            expected=f"at most {longest_possible} tokens, {SECOND_ANSWER} of them generated",
            found=plan.longest,
            next_step="give smaller --lengths",
        )


def kv_needs(plan: Plan) -> tuple[int, int]:
    """Tokens that P's and D's caches must hold at one time.

    P: the longest prompt, or the fragmenting conversations that run at once. D: the same, or all
    held conversations and a stream beside them. That finished turns which D still keeps leave room
    for the next is seen to while it runs: see Kept.
    """
    longest = max(plan.lengths, default=0) + SECOND_ANSWER
    at_once = min(plan.fragment, FRAGMENTS_AT_ONCE) * (FRAGMENTS[1] + SHORT_ANSWER)
    held = max(plan.hold, default=0) * (plan.hold_tokens + SHORT_ANSWER + 16)
    stream = STREAM_PROMPT + STREAM_ANSWER if plan.hold else 0
    # Prompts of held conversations pass P eight at a time.
    passing = min(max(plan.hold, default=0), FRAGMENTS_AT_ONCE) * plan.hold_tokens
    prefill = max(longest, at_once, passing) + _MARGIN
    # Of conversations that fragment all but those that run are finished, and kept.
    decode = max(longest, at_once, held + stream) + _MARGIN
    return prefill, decode


def check_kv(
    plan: Plan, bytes_per_token: int, prefill_gib: int, decode_gib: int
) -> tuple[int, int]:
    """Tokens that P's and D's caches take at most; BenchError if that is too little."""
    needs = kv_needs(plan)
    room = prefill_gib * GIB // bytes_per_token, decode_gib * GIB // bytes_per_token
    for option, gib, need, has in zip(
        ("--prefill-kv-gib", "--decode-kv-gib"),
        (prefill_gib, decode_gib),
        needs,
        room,
        strict=True,
    ):
        if need > has:
            least = -(-need * bytes_per_token // GIB)
            raise BenchError(
                "the KV cache would be too small",
                expected=f"{need:,} tokens of {bytes_per_token:,} bytes: {option} {least}",
                found=f"{option} {gib}: {has:,} tokens",
                next_step=f"raise {option}, or lower --lengths, --fragment, --hold, --hold-tokens",
            )
    return room


@dataclass
class Kept:
    """What one D keeps, as its client knows: when a turn ended, and how many tokens it has.

    Before a turn begins it waits until there is room, so that no turn finds a full cache, and none
    that is to be read back loses its blocks.
    """

    capacity: int
    ttl_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    waited_s: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _turns: dict[int, tuple[float, int]] = field(default_factory=dict)
    _number: int = 0

    def tokens(self) -> int:
        """Kept at this moment."""
        with self._lock:
            now = self.clock()
            self._turns = {key: turn for key, turn in self._turns.items() if turn[0] > now}
            return sum(tokens for _, tokens in self._turns.values())

    def keep(self, tokens: int) -> int:
        """A turn has ended; returns how to speak of it to `release`."""
        with self._lock:
            self._number += 1
            self._turns[self._number] = self.clock() + self.ttl_s + _EXPIRY_MARGIN_S, tokens
            return self._number

    def release(self, key: int) -> None:
        """Its reader has freed it."""
        with self._lock:
            self._turns.pop(key, None)

    def soonest(self) -> float | None:
        """When the next turn is given back; None if nothing is kept."""
        with self._lock:
            return min((end for end, _ in self._turns.values()), default=None)

    def wait_until_empty(self) -> None:
        """Wait until all turns have been given back."""
        while (soonest := self.soonest()) is not None and self.tokens():
            self.sleep(max(0.01, soonest - self.clock()))

    def wait_for(self, tokens: int) -> float:
        """Wait until so many tokens more have room; seconds that it took."""
        begin = self.clock()
        while self.tokens() + tokens > self.capacity and (soonest := self.soonest()) is not None:
            self.sleep(max(0.01, soonest - self.clock()))
        waited = self.clock() - begin
        self.waited_s += waited
        return waited


def fragment_lengths(count: int, seed: int) -> list[int]:
    """First prompts of the conversations that fragment the caches, tokens."""
    rng = random.Random(seed)
    return [rng.randint(*FRAGMENTS) for _ in range(count)]
