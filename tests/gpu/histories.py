"""What clients do to a history between two turns, and how much of it may then be read back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.gpu.shapes import VOCABULARY

New = Callable[[int], list[int]]
# Turn 2 out of turn 1: its prompt h, D's answer out, and a source of new tokens.
Second = Callable[[list[int], list[int], New], list[int]]

ROWS: dict[str, Second] = {
    "append": lambda h, out, new: h + out + new(100),
    "edited_front": lambda h, out, new: new(400) + h[400:] + out + new(100),
    "edited_middle": lambda h, out, new: h[:400] + new(50) + h[450:] + out + new(100),
    "truncated": lambda h, out, new: h[:300] + new(20),
    "reasoning_stripped": lambda h, out, new: h + out[20:] + new(100),
    "other_conversation": lambda h, out, new: new(900),
    "regenerated": lambda h, out, new: h,
}
ROW_PROMPT, ROW_ANSWER = 700, 40
KINDS = ("append", "edit", "insert", "delete", "truncate", "duplicate", "strip", "same")


@dataclass(frozen=True)
class Conversation:
    """A first prompt, the length of its answer, and what becomes of both."""

    name: str
    prompt: list[int]
    generate: int
    second: Second


def source(rng: random.Random) -> New:
    """Token ids that no model treats in a special way."""
    return lambda count: [rng.randrange(1, VOCABULARY) for _ in range(count)]


def row_conversations(rng: random.Random) -> list[Conversation]:
    new = source(rng)
    return [Conversation(name, new(ROW_PROMPT), ROW_ANSWER, ROWS[name]) for name in ROWS]


def random_conversations(rng: random.Random, count: int, least: int = 80) -> list[Conversation]:
    """Conversations of all lengths, each changed once or twice.

    least: tokens of a first prompt. A turn that is shorter than a block is not kept.
    """
    new, found = source(rng), []
    for number in range(count):
        kinds = rng.choices(KINDS, k=rng.choice((1, 1, 2)))
        found.append(
            Conversation(
                f"{number}:{'+'.join(kinds)}",
                new(rng.randrange(least, 1400)),
                rng.randrange(8, 41),
                _changes(kinds, rng.randrange(1 << 30)),
            )
        )
    return found


def _changes(kinds: Sequence[str], seed: int) -> Second:
    def second(h: list[int], out: list[int], new: New) -> list[int]:
        rng, told = random.Random(seed), h + out
        for kind in kinds:
            told = h + told[len(h) + 4 :] if kind == "strip" else change(kind, rng, told, new)
        return told or new(1)

    return second


def change(kind: str, rng: random.Random, told: list[int], new: New) -> list[int]:
    """One change of `kind` at a random place."""
    at, span = rng.randrange(len(told) + 1), rng.randrange(1, max(2, len(told) // 3))
    if kind == "append":
        return told + new(span)
    if kind == "edit":
        return told[:at] + new(span) + told[at + span :]
    if kind == "insert":
        return told[:at] + new(span) + told[at:]
    if kind == "delete":
        return told[:at] + told[at + span :]
    if kind == "truncate":
        return told[:at]
    if kind == "duplicate":
        return told[:at] + told[max(0, at - span) : at] + told[at:]
    return list(told)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that two histories share."""
    pairs = zip(one, other, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def expected_read(told: Sequence[int], prompt: Sequence[int], block: int, threshold: int) -> int:
    """Tokens that P, with nothing cached, reads back for `prompt` after a turn that `told`.

    The KV of the last generated token is nowhere. Whole blocks are verified by their hashes, and
    the tokens behind the last whole block one by one, if all before them are the same. One
    token at least is computed.
    """
    held = list(told[:-1])
    whole, shared = len(held) // block, common(held, prompt)
    if whole == 0:
        return 0
    verified = shared if shared >= whole * block else shared // block * block
    tokens = min(verified, len(prompt) - 1)
    return tokens if tokens >= threshold else 0


def counted_wrong(name: str, block: int) -> bool:
    """Whether a read by token count, as the base release's, gives this row wrong KV.

    Content that was appended to is right. A prompt that only became shorter is right as long as
    it has as many blocks as were kept: else blocks are paired from the end.
    """
    if name == "regenerated":
        kept = ROW_PROMPT + ROW_ANSWER - 1
        return -(-ROW_PROMPT // block) != -(-kept // block)
    return name != "append"


def with_another_block(prompt: list[int], block: int, rng: random.Random) -> list[int] | None:
    """The prompt with one whole block of other tokens, not its last; None if there is none."""
    blocks = (len(prompt) - 1) // block
    if blocks == 0:
        return None
    start = rng.randrange(blocks) * block
    return prompt[:start] + source(rng)(block) + prompt[start + block :]
