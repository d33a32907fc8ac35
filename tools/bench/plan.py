"""What is asked, in which order: the same for every arm, and the same again after an interruption.

A unit is run whole or not at all, since a conversation lives in the memory of engines that are
gone after an interruption. Its talks are conversations one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tools.bench.errors import BenchError
from tools.bench.mutate import Mutation, choose

Phase = Literal["sweep", "turns", "decode", "hold", "trace"]


@dataclass(frozen=True)
class Turn:
    """One request. Counts are in tokens, `gap_s` in seconds before it is sent.

    The prompt is the conversation so far, mutated or not, and then, up to `prompt_tokens`: `text`,
    or the content of a trace's `blocks`, or random tokens. With `threads` false it is the content
    of `blocks` alone. `held`: finished conversations that D keeps meanwhile, by this plan.
    """

    phase: Phase
    prompt_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    mutation: Mutation = ""
    held: int = 0
    text: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    threads: bool = True


@dataclass(frozen=True)
class Talk:
    """A conversation, begun `start_s` seconds after its unit's phase."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0


@dataclass(frozen=True)
class Unit:
    """What is run whole or not at all."""

    name: str
    talks: tuple[Talk, ...]

    @property
    def requests(self) -> int:
        return sum(len(talk.turns) for talk in self.talks)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(turn.prompt_tokens + turn.output_tokens for t in self.talks for turn in t.turns)


@dataclass(frozen=True)
class Workload:
    """What all arms are asked. Counts are in tokens.

    lengths: prompts of the second turns of the sweep. new_tokens: of each turn after the first.
    turns: of the growing conversation, which begins with first_tokens; 0 for none.
    hold_conversations: kept on D, of hold_tokens each, while a stream of stream_tokens is measured;
    0 for none. mutate_share: of the growing conversation's and a trace's turns after the first.
    """

    lengths: tuple[int, ...]
    new_tokens: int = 128
    output_tokens: int = 16
    turns: int = 6
    first_tokens: int = 512
    hold_conversations: int = 6
    hold_tokens: int = 512
    stream_tokens: int = 128
    mutate_share: float = 0.0
    seed: int = 1

    def as_json(self) -> dict[str, Any]:
        """The same as JSON has it, for comparison with what a file says."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def check(self) -> None:
        """BenchError for sizes that leave no room for what they are to hold."""
        least = self.new_tokens + self.output_tokens + 1
        short = [length for length in self.lengths if length < least]
        if short or not 0 <= self.mutate_share <= 1 or min(self.new_tokens, self.output_tokens) < 1:
            raise BenchError(
                "the workload contradicts itself",
                expected=f"prompt lengths of at least {least} tokens (new tokens, generated ones "
                "and one before), a share between 0 and 1",
                found=f"lengths {list(self.lengths)}, share {self.mutate_share}",
            )


def units(workload: Workload, repeat: int, trace: Sequence[Talk] = ()) -> list[Unit]:
    """The units of one repeat, in order; lengths come in another order in each repeat.

    The streams come first, while D keeps nothing but what warming up has left there.
    """
    workload.check()
    made = [_decode(workload)] if workload.hold_conversations else []
    lengths = list(workload.lengths)
    random.Random(f"{workload.seed}-order-{repeat}").shuffle(lengths)
    made += [_sweep(workload, length) for length in lengths]
    if workload.turns:
        made.append(_growing(workload, repeat))
    made += [Unit(f"trace-{number}", (talk,)) for number, talk in enumerate(trace)]
    return made


def with_mutations(talk: Talk, share: float, seed: str) -> Talk:
    """The same conversation with that share of its later turns on a changed history."""
    first, *later = talk.turns
    changed = [
        turn
        if not turn.threads
        else Turn(**{**vars(turn), "mutation": choose(share, f"{seed}-{number}")})
        for number, turn in enumerate(later)
    ]
    return Talk((first, *changed), talk.start_s)


def _sweep(workload: Workload, length: int) -> Unit:
    """A first turn as long as needed, and a second of exactly this length: new tokens are few."""
    first = length - workload.new_tokens - workload.output_tokens
    turns = [Turn("sweep", tokens, workload.output_tokens) for tokens in (first, length)]
    return Unit(f"sweep-{length}", (Talk(tuple(turns)),))


def _growing(workload: Workload, repeat: int) -> Unit:
    step = workload.output_tokens + workload.new_tokens
    turns = tuple(
        Turn("turns", workload.first_tokens + number * step, workload.output_tokens)
        for number in range(workload.turns)
    )
    seed = f"{workload.seed}-{repeat}-turns"
    return Unit("turns", (with_mutations(Talk(turns), workload.mutate_share, seed),))


def _decode(workload: Workload) -> Unit:
    """A stream while nothing is held, conversations that D keeps, and the stream again."""
    count = workload.hold_conversations

    def stream(held: int) -> Talk:
        return Talk((Turn("decode", workload.hold_tokens, workload.stream_tokens, held=held),))

    held = Talk((Turn("hold", workload.hold_tokens, workload.output_tokens),))
    # The first stream's own turn is kept as well.
    return Unit("decode", (stream(0), *[held] * count, stream(count + 1)))
