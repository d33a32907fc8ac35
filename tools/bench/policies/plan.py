"""The load: which conversations there are, how long they are, and when they say what."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tools.bench.errors import BenchError

DECODE = ("sticky", "least-loaded", "round-robin")
PREFILL = ("least-tokens", "prefix-affine", "round-robin")


@dataclass(frozen=True)
class Pair:
    """One choice of policies."""

    decode: str
    prefill: str

    def __str__(self) -> str:
        return f"{self.decode} + {self.prefill}"

    def args(self) -> tuple[str, ...]:
        """What the router is told."""
        return ("--decode-policy", self.decode, "--prefill-policy", self.prefill)


PAIRS = tuple(Pair(decode, prefill) for decode, prefill in product(DECODE, PREFILL))


def pairs_of(decode: str, prefill: str) -> tuple[Pair, ...]:
    """All pairs of these policies, each a list with commas; BenchError for an unknown one."""
    for given, known in ((decode, DECODE), (prefill, PREFILL)):
        unknown = set(given.split(",")) - set(known)
        if unknown:
            raise BenchError("no such policy", expected=", ".join(known), found=sorted(unknown))
    chosen = product(decode.split(","), prefill.split(","))
    return tuple(Pair(*one) for one in chosen)


@dataclass(frozen=True)
class Kind:
    """Conversations of one sort; tokens. `share`: of all conversations."""

    name: str
    share: float
    turns: int
    first_tokens: int


# Questions and answers, agents, and agents that begin with much context.
KINDS = (
    Kind("short", 0.5, 2, 160),
    Kind("medium", 0.3, 5, 512),
    Kind("long", 0.2, 8, 1536),
)


@dataclass(frozen=True)
class Talk:
    """One conversation. `new_tokens`: of each turn's prompt beyond the history, the first's too;
    `thinks_s`: before each turn."""

    number: int
    kind: Kind
    new_tokens: tuple[int, ...]
    thinks_s: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """Sizes in tokens, times in seconds; the same for all pairs.

    clients: conversations at a time, each client one after the other. new_tokens, think_s: of a
    turn, the least and the most; an agent's next prompt comes when its tool has answered.
    passes: how often each pair has its turn, in an order of its own each time, so that their
    differences tell what chance does.
    """

    clients: int = 8
    conversations: int = 24
    new_tokens: tuple[int, int] = (32, 224)
    answer_tokens: int = 24
    think_s: tuple[float, float] = (0.05, 0.8)
    passes: int = 2
    block_size: int = 32
    lease_s: float = 15.0
    seed: int = 0

    def talks(self) -> list[Talk]:
        """All conversations in the order in which they begin."""
        kinds = [kind for kind in KINDS for _ in range(round(kind.share * self.conversations))]
        chance = random.Random(f"{self.seed}-talks")
        chance.shuffle(kinds)
        return [self._talk(number, kind, chance) for number, kind in enumerate(kinds)]

    def _talk(self, number: int, kind: Kind, chance: random.Random) -> Talk:
        fresh = [chance.randint(*self.new_tokens) for _ in range(kind.turns)]
        fresh[0] = kind.first_tokens + chance.randint(-kind.first_tokens // 4, 0)
        pauses = [chance.uniform(*self.think_s) for _ in range(kind.turns)]
        return Talk(number, kind, tuple(fresh), tuple(pauses))

    @property
    def turns(self) -> int:
        """Of one pass of one pair."""
        return sum(len(talk.new_tokens) for talk in self.talks())

    @property
    def max_model_len(self) -> int:
        most = max(
            kind.first_tokens + kind.turns * (self.new_tokens[1] + self.answer_tokens)
            for kind in KINDS
        )
        return -(-(most + 1) // self.block_size) * self.block_size

    def order(self, pairs: tuple[Pair, ...]) -> Iterator[tuple[int, Pair]]:
        """The passes, each of all pairs, there and back: what drifts meets each pair alike."""
        for number in range(self.passes):
            for pair in pairs if number % 2 == 0 else reversed(pairs):
                yield number, pair
