"""Token-exact prompts: the same ids for the same seed, in every arm."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.errors import BenchError

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for in Mooncake's traces."""


@dataclass(frozen=True)
class Words:
    """Makes token ids out of those that prompts may contain."""

    token_ids: tuple[int, ...]

    def random(self, seed: str, count: int) -> list[int]:
        """`count` ids: the same for the same seed, and the first of those for a larger count."""
        return random.Random(seed).choices(self.token_ids, k=count)

    def block(self, hash_id: int) -> list[int]:
        """The tokens that a trace's hash id stands for: the same whenever the id comes again."""
        return self.random(f"block-{hash_id}", BLOCK_TOKENS)

    def of_blocks(self, hash_ids: Sequence[int], start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of a prompt that is made of whole blocks."""
        first, last = start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)
        tokens = [token for hash_id in hash_ids[first:last] for token in self.block(hash_id)]
        begin = first * BLOCK_TOKENS
        return tokens[start - begin : end - begin]


def exact(tokens: Sequence[int], fresh: Sequence[int], length: int) -> list[int]:
    """A history of `tokens`, made up to `length` by the beginning of `fresh`.

    BenchError if the history leaves no room for at least one new token, or `fresh` is too short.
    """
    missing = length - len(tokens)
    if not 0 < missing <= len(fresh):
        raise BenchError(
            "a prompt of this length cannot be made",
            expected=f"a history of {length - len(fresh)} to {length - 1} tokens",
            found=f"{len(tokens)} tokens",
            next_step="leave more tokens between the prompt lengths of two turns",
        )
    return [*tokens, *fresh[:missing]]
