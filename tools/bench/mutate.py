"""What clients do to a history other than appending to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

Mutation = Literal["", "edit", "truncate", "strip", "swap"]

_Rng = random.Random


def _edit(history: list[int], reply: int, rng: _Rng, token_ids: Sequence[int]) -> list[int]:
    """One token is another one, as when a user corrects a word."""
    place = rng.randrange(len(history))
    others = [token for token in token_ids if token != history[place]]
    return [*history[:place], rng.choice(others), *history[place + 1 :]]


def _truncate(history: list[int], reply: int, rng: _Rng, token_ids: Sequence[int]) -> list[int]:
    """The oldest quarter is dropped, as when a context window is full."""
    return history[len(history) // 4 :]


def _strip(history: list[int], reply: int, rng: _Rng, token_ids: Sequence[int]) -> list[int]:
    """The first half of the last reply is dropped, as a client does with reasoning."""
    begin = len(history) - reply
    return [*history[:begin], *history[begin + -(-reply // 2) :]]


def _swap(history: list[int], reply: int, rng: _Rng, token_ids: Sequence[int]) -> list[int]:
    """Another conversation of the same length, under the same id."""
    return rng.choices(token_ids, k=len(history))


_KINDS: dict[Mutation, Callable[[list[int], int, _Rng, Sequence[int]], list[int]]] = {
    "edit": _edit,
    "truncate": _truncate,
    "strip": _strip,
    "swap": _swap,
}


def choose(share: float, seed: str) -> Mutation:
    """A mutation with probability `share`, none otherwise; the same for the same seed."""
    rng = random.Random(f"choose-{seed}")
    return rng.choice(list(_KINDS)) if rng.random() < share else ""


def mutate(
    kind: Mutation, history: Sequence[int], reply: int, seed: str, token_ids: Sequence[int]
) -> list[int]:
    """The history as the client sends it, whose last `reply` tokens the model has generated."""
    if not kind:
        return list(history)
    return _KINDS[kind](list(history), reply, random.Random(f"mutate-{seed}"), token_ids)
