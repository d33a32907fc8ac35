"""How large all is, and that the two loads are what they are called."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from tools.bench.errors import BenchError

Phase = Literal["fit", "full"]
PHASES: tuple[Phase, ...] = ("fit", "full")
# Before a load, between the two, and after.
TURNS = 3


@dataclass(frozen=True)
class Plan:
    """Sizes in tokens, times in seconds; the same for all arms.

    first_tokens, new_tokens: of the prompt, beyond the history; answer_tokens: of each answer;
    warm_up_tokens: of a conversation before all others, since a first read costs handshakes.
    load_prompt, load_output: of each of the streams' requests, whose answers are up to a quarter
    shorter or longer, so that streams do not stay in step with each other: how many prompts meet
    in one engine step would else be settled by an arm's first moments. Short enough that more than
    one gap in a hundred is another stream's prompt: a 99th percentile at the edge of those would
    jump.
    cycles: times that a load begins anew, on one arm after the other; its `seconds` are those of
    all together. warm_s: of each, before it is measured. decode_blocks: KV blocks of D; block 0 is
    never used. lease_s: in the arm of leases.
    """

    conversations: int = 20
    first_tokens: int = 256
    new_tokens: int = 64
    answer_tokens: int = 32
    warm_up_tokens: int = 96
    streams_fit: int = 7
    streams_full: int = 36
    load_prompt: int = 128
    load_output: int = 384
    seconds: float = 40.0
    cycles: int = 5
    warm_s: float = 4.0
    decode_blocks: int = 464
    block_size: int = 32
    lease_s: float = 5.0
    seed: int = 0

    def prompt_tokens(self, turn: int) -> int:
        """Of a conversation's prompt, from turn 1."""
        return self.first_tokens + (turn - 1) * (self.new_tokens + self.answer_tokens)

    def kept_blocks(self, turn: int) -> int:
        """What all conversations together keep after that turn."""
        return self.conversations * self._blocks(self.prompt_tokens(turn) + self.answer_tokens)

    def streams(self, phase: Phase) -> int:
        return self.streams_fit if phase == "fit" else self.streams_full

    def output_tokens(self, name: str) -> int:
        """Of the load's request of that name: the same in every arm."""
        spread = self.load_output // 4
        return self.load_output + random.Random(f"{self.seed}-output-{name}").randint(
            -spread, spread
        )

    @property
    def longest_output(self) -> int:
        return self.load_output + self.load_output // 4

    def order(self, cycle: int, arms: int) -> Sequence[int]:
        """In which order the arms are loaded: all orders after each other, to and fro."""
        orders = list(permutations(range(arms)))
        back, number = cycle % 2, cycle // 2 % len(orders)
        return orders[-1 - number if back else number]

    def load_blocks(self, phase: Phase) -> int:
        """What the streams keep at most, all of them at their longest and about to end."""
        return self.streams(phase) * self._blocks(self.load_prompt + self.longest_output)

    @property
    def usable_blocks(self) -> int:
        return self.decode_blocks - 1

    @property
    def budget(self) -> float:
        """Share of D's blocks, of which the engine takes whole ones: all turns fit, and for each
        conversation a block, since a turn is kept before the one that it follows is given back."""
        warm_up = self._blocks(self.warm_up_tokens + 2 * self.answer_tokens)
        blocks = self.kept_blocks(TURNS) + self.conversations + warm_up
        return math.ceil(1000 * blocks / self.usable_blocks) / 1000

    @property
    def max_model_len(self) -> int:
        longest = max(
            self.prompt_tokens(TURNS) + self.answer_tokens, self.load_prompt + self.longest_output
        )
        return max(512, self._blocks(longest + 1) * self.block_size)

    def check(self) -> None:
        """BenchError unless one load fits beside the budget and the other does not beside what is
        kept then."""
        if self.cycles < 1 or self.seconds <= 0:
            raise BenchError(
                "a load is measured for no time",
                expected="--cycles of at least 1, and --seconds above 0",
                found=f"{self.cycles} cycles, {self.seconds:g} s",
            )
        beside = self.usable_blocks - math.floor(self.budget * self.usable_blocks)
        if self.budget > 1 or self.load_blocks("fit") > beside:
            raise BenchError(
                "the smaller load does not fit beside the budget",
                expected=f"at most {max(0, beside)} blocks beside the budget of "
                f"{self.budget:.1%} of {self.usable_blocks}",
                found=f"{self.streams_fit} streams of {self.load_blocks('fit')} blocks in all",
                next_step="raise --decode-blocks, or lower --streams-fit or --conversations",
            )
        left = self.usable_blocks - self.kept_blocks(TURNS - 1)
        if self.load_blocks("full") <= left:
            raise BenchError(
                "the larger load does not need all of the memory",
                expected=f"more than the {left} blocks that are left beside "
                f"{self.kept_blocks(TURNS - 1)} kept ones",
                found=f"{self.streams_full} streams of {self.load_blocks('full')} blocks in all",
                next_step="raise --streams-full, or lower --decode-blocks",
            )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
