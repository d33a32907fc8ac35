"""Histories of conversations as data, and two engines that live through one.

A history is a value: hypothesis makes it, shrinks it and prints it. Texts have few token values,
so that blocks repeat, and begin alike when they have the same number, so that conversations meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import islice
from typing import Any

import hypothesis
from hypothesis import strategies as st
from vllm.bidir.connector.proof import parse_proof
from vllm.v1.request import Request

from tests.connector.sim import Engine
from tests.unit.connector.histories import common_prefix, longest_allowed

KINDS = ("append", "edit", "delete", "truncate", "duplicate")
D_TURN = {"do_remote_prefill": False, "do_remote_decode": False}


class _Short:
    """Values that show only what differs from the defaults."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Text(_Short):
    """The first `count` tokens of text number `text`."""

    text: int = 0
    count: int = 1

    def tokens(self) -> list[int]:
        return list(_stream(self.text)[: self.count])


@dataclass(frozen=True, repr=False)
class Change(_Short):
    """An operation on a history; `at` is taken modulo its length."""

    kind: str
    at: int = 0
    text: Text = Text()

    def __call__(self, tokens: list[int]) -> list[int]:
        at, count, piece = self.at % (len(tokens) + 1), self.text.count, self.text.tokens()
        if self.kind == "append":
            return tokens + piece
        if self.kind == "edit":
            return tokens[:at] + piece + tokens[at + count :]
        if self.kind == "delete":
            return tokens[:at] + tokens[at + count :]
        if self.kind == "truncate":
            return tokens[:at]
        return tokens[:at] + tokens[max(0, at - count) : at] + tokens[at:]


@dataclass(frozen=True, repr=False)
class Turn(_Short):
    """Conversation `of` is changed, P reads back and D answers.

    `fork`: a new conversation goes on from there, and what it came from stays as it was.
    `swap`: P gets the params of that conversation instead. `salt`: another one from here on.
    `gone`: D's time is over before P asks.
    """

    of: int = 0
    fork: bool = False
    swap: int | None = None
    salt: str | None = None
    gone: bool = False
    changes: tuple[Change, ...] = ()
    answer: Text = Text()


@dataclass(frozen=True, repr=False)
class History(_Short):
    """`begin` are the first prompts of conversations, each with its salt."""

    begin: tuple[tuple[Text, str | None], ...]
    turns: tuple[Turn, ...]
    decode_caching: bool = False


@lru_cache(maxsize=64)
def _stream(number: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(5) for _ in range(2600))


# One draw for each value: drawing costs as much as serving does.
_SALTS = st.sampled_from((None, None, None, None, "a", "b"))
# At a block's edge, beside it and anywhere.
_PLACES = st.sampled_from([0, 1, 15, 16, 17, *range(32, 700, 16), *range(33, 700, 37)])
_PIECES = st.sampled_from([Text(text, count) for count in (1, 2, 15, 16, 40) for text in range(5)])
_ANSWERS = st.sampled_from([Text(text, count) for count in (1, 2, 3, 9, 18) for text in range(5)])
_PROMPTS = st.sampled_from(
    [Text(text, count) for count in (1, 17, 48, 90, 160, 301, 701, 2600) for text in range(3)]
)
_CHANGES = st.builds(Change, st.sampled_from(KINDS), _PLACES, _PIECES)
_HOW = st.sampled_from(
    [*[{}] * 5, *[{"fork": True}] * 3, *[{"swap": k} for k in range(3)], {"gone": True}]
)
_TURNS = st.builds(
    lambda how, **rest: Turn(**how, **rest),
    how=_HOW,
    of=st.integers(0, 3),
    salt=_SALTS,
    changes=st.lists(_CHANGES, max_size=3).map(tuple),
    answer=_ANSWERS,
)
HISTORIES = st.builds(
    History,
    begin=st.lists(st.tuples(_PROMPTS, _SALTS), min_size=1, max_size=2).map(tuple),
    turns=st.lists(_TURNS, min_size=1, max_size=5).map(tuple),
    decode_caching=st.booleans(),
)


@dataclass(frozen=True)
class Kept:
    """A turn that D has finished: where its conversation is, and what a proof of it allows."""

    tokens: list[int]
    salt: str | None
    params: dict[str, Any]
    request_id: str

    def allowed(self, prompt: list[int], salt: str | None) -> int:
        """How many tokens of a prompt may be read: all that checkpoints reach, none beyond."""
        proof = parse_proof(self.params.get("prefix_proof"))
        if proof is None or salt != self.salt:
            return 0
        common = common_prefix(self.tokens[: len(self.tokens) - 1], prompt)
        return min(longest_allowed(proof, common), len(prompt) - 1)


class Engines:
    """Pairs of P and D, by whether D caches prefixes; one that failed is not used again."""

    def __init__(self, make: Callable[[bool], tuple[Engine, Engine]]) -> None:
        self._make = make
        self._pairs: dict[bool, tuple[Engine, Engine]] = {}

    def play(self, history: History, crowd: int = 1) -> int:
        pair = self._pairs.pop(history.decode_caching, None) or self._make(history.decode_caching)
        read = play(*pair, history, crowd)
        self._pairs[history.decode_caching] = pair
        return read


def run(engines: Engines, count: int, seed: int, crowd: int = 1, shrink: bool = True) -> int:
    """Live through `count` random histories; in how many of them something was read back."""
    reads = 0
    phases = {hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(HISTORIES)
    def each(history: History) -> None:
        nonlocal reads
        reads += engines.play(history, crowd) > 0

    each()
    return reads


def play(p: Engine, d: Engine, history: History, crowd: int = 1) -> int:
    """Live through a history, `crowd` turns at a time; how many tokens were read back.

    AssertionError, WrongKVError among them, when something is read that must not be, or when
    something is not read that should be, or when a block is lost.
    """
    begun = [(text.tokens()[: p.longest], salt, Text()) for text, salt in history.begin]
    conversations = list(_answer(d, begun))
    turns = iter(history.turns)
    while group := list(islice(turns, crowd)):
        indexes: list[int] = []
        asked: list[tuple[list[int], str | None, Text]] = []
        requests: list[tuple[Request, list[int], str | None, Kept]] = []
        for turn in group:
            index = turn.of % len(conversations)
            state = kept = conversations[index]
            if turn.fork:
                index = len(conversations)
                conversations.append(state)
            if turn.swap is not None:
                kept = conversations[turn.swap % len(conversations)]
            if turn.gone and kept.request_id in d.scheduler.requests:
                d.expire(kept.request_id)
            prompt = state.tokens
            for change in turn.changes:
                prompt = change(prompt)
            prompt = prompt[: p.longest] or [1]
            salt = turn.salt or state.salt
            request = p.add(prompt, kept.params, salt=salt, source=d)
            requests.append((request, prompt, salt, kept))
            indexes.append(index)
            asked.append((prompt, salt, turn.answer))
        p.serve(*(request for request, *_ in requests))
        for request, prompt, salt, kept in requests:
            check(p, d, request.request_id, kept.allowed(prompt, salt), kept)
        for index, kept in zip(indexes, _answer(d, asked), strict=True):
            conversations[index] = kept
    read = sum(order.total - order.local for order in p.orders)
    p.forget()
    d.forget()
    return read


def check(p: Engine, d: Engine, name: str, allowed: int, kept: Kept) -> None:
    order = p.ordered.get(name)
    if order is None:
        own_cache = p.config.cache_config.enable_prefix_caching
        assert own_cache or allowed < max(1, p.bidir.kv_recompute_threshold), (
            f"{name}: {allowed} tokens could have been read"
        )
        return
    assert order.total == allowed, f"{name}: {order.total} tokens read, {allowed} are allowed"
    assert order.local < order.total
    assert (name in p.loaded) == (kept.request_id in d.scheduler.requests)


def _answer(d: Engine, asked: list[tuple[list[int], str | None, Text]]) -> Iterator[Kept]:
    """D serves these prompts together."""
    requests = [
        d.add(prompt, {**D_TURN}, max_tokens=answer.count, answer=answer.tokens(), salt=salt)
        for prompt, salt, answer in asked
    ]
    params = d.serve(*requests)
    for request, found, (_, salt, _) in zip(requests, params, asked, strict=True):
        yield Kept(list(request.all_token_ids), salt, found or {**D_TURN}, request.request_id)
