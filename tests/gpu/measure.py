"""One conversation of two turns over P and D, and all that its second turn is compared with."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.gpu.client import (
    FIRST,
    Answer,
    EngineError,
    complete,
    lease_ids,
    release,
    reset_prefix_cache,
    tokens_read,
)
from tests.gpu.compare import Difference, difference
from tests.gpu.histories import (
    Conversation,
    expected_read,
    source,
    with_another_block,
)

# The engine's default for kv_recompute_threshold, tokens.
THRESHOLD = 64
_SECOND_ANSWER = 8
# A completion on one engine; arguments as of `complete`, without the URL.
Ask = Callable[..., Answer]
_MEETING_S, _MEETING_TOKENS = 60.0, 300


@dataclass(frozen=True)
class Servers:
    """URLs of P, D, and a P that reads back by token count (None: not started).

    decode_rank: D's data-parallel rank of first turns, answer_rank: of second ones (None: D's
    choice).
    """

    prefill: str
    decode: str
    counting: str | None = None
    decode_rank: int | None = None
    answer_rank: int | None = None


@dataclass
class Measured:
    """Figures of one conversation; every Difference is to a plain recompute of its prompt on P.

    checks: with transfers, must be within the limit. noise: without any transfer, makes the
    limit. controls: of wrong KV or of another prompt, must be above the limit. alike: the read-back
    against computations that are cut where it is; where cutting alone makes noise they tell more.
    stranded: turns that D was to keep, and did not have when they were given back.
    """

    name: str
    prompt: int
    block: int
    read: int
    expected: int
    cached: dict[str, int | None] = field(default_factory=dict)
    checks: dict[str, Difference] = field(default_factory=dict)
    noise: dict[str, Difference] = field(default_factory=dict)
    controls: dict[str, Difference] = field(default_factory=dict)
    alike: dict[str, Difference] = field(default_factory=dict)
    counted: Difference | None = None
    stranded: int = 0


@dataclass(frozen=True)
class FirstTurn:
    """What D has answered and keeps. told: its whole history."""

    prompt: list[int]
    answer: Answer
    told: list[int]


def measure(conversation: Conversation, servers: Servers, rng: random.Random) -> Measured:
    """Run it. EngineError when an engine refuses or a turn was not kept."""
    turn = first_turn(conversation.prompt, conversation.generate, servers)
    found = second_turn(conversation, turn, servers, rng)
    stranded = give_back(servers.decode, turn.answer)
    if servers.counting is None:  # the base's read by count has had D free what it read
        found.stranded += stranded
    return found


def first_turn(prompt: list[int], generate: int, servers: Servers) -> FirstTurn:
    """Over P and D, so that D keeps it."""
    handed = complete(servers.prefill, prompt, params=FIRST)
    turn = complete(servers.decode, prompt, generate, params_of(handed), rank=servers.decode_rank)
    return FirstTurn(prompt, turn, prompt + turn.tokens)


def second_turn(
    conversation: Conversation, turn: FirstTurn, servers: Servers, rng: random.Random
) -> Measured:
    """The conversation's change of `turn`, read back, and all that it is compared with."""
    prefill, decode = servers.prefill, servers.decode
    first, given = turn.prompt, params_of(turn.answer)
    on_prefill = partial(complete, prefill)
    on_decode = partial(complete, decode, rank=servers.decode_rank)
    # Where the second turn goes, D's prefix cache gets its blocks.
    on_next = partial(complete, decode, rank=servers.answer_rank)
    prompt = conversation.second(first, turn.answer.tokens, source(rng))

    # P would else find the first turn's prompt in its own cache, and read next to nothing.
    reset_prefix_cache(prefill)
    before = tokens_read(prefill)
    read_back = on_prefill(prompt, params=given)
    read = tokens_read(prefill) - before
    answer = on_next(prompt, _SECOND_ANSWER, params_of(read_back))
    block = _block(turn.answer)
    counted = None
    if servers.counting is not None:
        counted = complete(servers.counting, prompt, params=given)

    plain = on_prefill(prompt, salt=new_salt())
    found = Measured(
        conversation.name,
        len(prompt),
        block,
        read,
        expected_read(turn.told, prompt, block, THRESHOLD),
        counted=None if counted is None else difference(counted.first, plain.first),
        stranded=give_back(decode, answer),
    )
    later = {"later_decode": on_next(prompt), "later_prefill": on_prefill(prompt)}
    found.cached = {name: one.cached for name, one in later.items()}
    compared: Mapping[str, Answer] = {"read_back": read_back, "decode": answer, **later}
    found.checks = {name: difference(one.first, plain.first) for name, one in compared.items()}
    first_plain = on_prefill(first, salt=new_salt())
    found.checks["handover"] = difference(turn.answer.first, first_plain.first)

    without_transfer = {
        "other_engine": on_decode(prompt, salt=new_salt()),
        "two_pieces": in_two_pieces(on_prefill, prompt, max(found.expected, block)),
        "own_turns": _two_turns_alone(on_decode, first, conversation.generate, prompt),
        # As an engine computes that has all whole blocks in its prefix cache.
        "last_block": in_two_pieces(on_decode, prompt, max(1, len(prompt) - 1)),
    }
    found.noise = {name: difference(a.first, plain.first) for name, a in without_transfer.items()}
    if len(prompt) > 1:
        # As D computes after a handover: all but one token loaded.
        found.noise["one_token"] = difference(_last_token_alone(on_decode, prompt), plain.first)
    if read:
        found.alike = {
            name: difference(read_back.first, without_transfer[name].first)
            for name in ("two_pieces", "own_turns")
        }
    changed = with_another_block(prompt, block, rng)
    if changed is not None:
        other = on_prefill(changed, salt=new_salt())
        found.controls["another_block"] = difference(other.first, plain.first)
    return found


def give_back(decode: str, *turns: Answer) -> int:
    """Release turns that nobody will read; how many of those that D was to keep it had not."""
    kept = lease_ids(*turns)
    return len(kept) - len(release(decode, kept)) if kept else 0


def meet(servers: Servers, rng: random.Random) -> None:
    """Turns until P has read one back: it computes while it meets D for the first time.

    EngineError if that takes longer than _MEETING_S.
    """
    new, end = source(rng), time.monotonic() + _MEETING_S
    while True:
        prompt = new(_MEETING_TOKENS)
        turn = first_turn(prompt, 8, servers)
        before = tokens_read(servers.prefill)
        reset_prefix_cache(servers.prefill)
        longer = turn.told + new(8)
        again = complete(servers.prefill, longer, params=params_of(turn.answer))
        answer = complete(servers.decode, longer, 1, params_of(again), rank=servers.answer_rank)
        give_back(servers.decode, turn.answer, answer)
        if tokens_read(servers.prefill) > before:
            return
        if time.monotonic() > end:
            raise EngineError(f"{servers.prefill} has read nothing back in {_MEETING_S:.0f} s")
        time.sleep(0.5)


def in_two_pieces(ask: Ask, prompt: list[int], end: int) -> Answer:
    """The engine's own prefix cache splits the prompt where a read-back would."""
    salt = new_salt()
    ask(prompt[:end], salt=salt)
    return ask(prompt, salt=salt)


def _last_token_alone(ask: Ask, prompt: list[int]) -> dict[int, float]:
    """The prompt's last token computed by itself, as if the engine had generated it.

    Its bias is not in the log-probabilities, which are the model's.
    """
    told = ask(prompt[:-1], 2, salt=new_salt(), logit_bias={str(prompt[-1]): 100.0})
    if told.tokens[0] != prompt[-1]:
        raise EngineError(f"{prompt[-1]} was not generated, but {told.tokens[0]}")
    return told.last


def _two_turns_alone(ask: Ask, first: list[int], generate: int, prompt: list[int]) -> Answer:
    """The same two turns on one engine: generated KV stays where it was made."""
    salt = new_salt()
    ask(first, generate, salt=salt)
    return ask(prompt, salt=salt)


def params_of(answer: Answer) -> dict[str, Any]:
    """An answer's params; EngineError if it has none."""
    if answer.params is None:
        raise EngineError("an answer came without kv_transfer_params")
    return answer.params


def _block(turn: Answer) -> int:
    proof = params_of(turn).get("prefix_proof")
    if not isinstance(proof, dict) or not isinstance(proof.get("block_size"), int):
        raise EngineError(f"D sent no proof: {sorted(params_of(turn))}")
    return int(proof["block_size"])


def new_salt() -> str:
    """Under which nothing is cached yet."""
    return uuid.uuid4().hex
