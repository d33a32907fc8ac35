"""One conversation of two turns over P and D, and all that its second turn is compared with."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.gpu.client import FIRST, Answer, EngineError, complete, reset_prefix_cache, tokens_read
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
_MEETING_S, _MEETING_TOKENS = 60.0, 300


@dataclass(frozen=True)
class Servers:
    """URLs of P, D, and a P that reads back by token count (None: not started)."""

    prefill: str
    decode: str
    counting: str | None = None


@dataclass
class Measured:
    """Figures of one conversation; every Difference is to a plain recompute of its prompt on P.

    checks: with transfers, must be within the limit. noise: without any transfer, makes the
    limit. controls: of wrong KV or of another prompt, must be above the limit. alike: the read-back
    against computations that are cut where it is; where cutting alone makes noise they tell more.
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


def measure(conversation: Conversation, servers: Servers, rng: random.Random) -> Measured:
    """Run it. EngineError when an engine refuses or a turn was not kept."""
    prefill, decode = servers.prefill, servers.decode
    first = conversation.prompt
    handed = complete(prefill, first, params=FIRST)
    turn = complete(decode, first, conversation.generate, _given(handed))
    told = first + turn.tokens
    prompt = conversation.second(first, turn.tokens, source(rng))

    # P would else find the first turn's prompt in its own cache, and read next to nothing.
    reset_prefix_cache(prefill)
    before = tokens_read(prefill)
    read_back = complete(prefill, prompt, params=_given(turn))
    read = tokens_read(prefill) - before
    answer = complete(decode, prompt, _SECOND_ANSWER, _given(read_back))
    block = _block(turn)
    counted = None
    if servers.counting is not None:
        counted = complete(servers.counting, prompt, params=_given(turn))

    plain = complete(prefill, prompt, salt=_salt())
    found = Measured(
        conversation.name,
        len(prompt),
        block,
        read,
        expected_read(told, prompt, block, THRESHOLD),
        counted=None if counted is None else difference(counted.first, plain.first),
    )
    later = {"later_decode": complete(decode, prompt), "later_prefill": complete(prefill, prompt)}
    found.cached = {name: one.cached for name, one in later.items()}
    compared: Mapping[str, Answer] = {"read_back": read_back, "decode": answer, **later}
    found.checks = {name: difference(one.first, plain.first) for name, one in compared.items()}
    first_plain = complete(prefill, first, salt=_salt())
    found.checks["handover"] = difference(turn.first, first_plain.first)

    without_transfer = {
        "other_engine": complete(decode, prompt, salt=_salt()),
        "two_pieces": _in_two_pieces(prefill, prompt, max(found.expected, block)),
        "own_turns": _two_turns_alone(decode, first, conversation.generate, prompt),
        # As D computes after a handover, with nearly all loaded.
        "last_block": _in_two_pieces(decode, prompt, max(1, len(prompt) - 1)),
    }
    found.noise = {name: difference(a.first, plain.first) for name, a in without_transfer.items()}
    if read:
        found.alike = {
            name: difference(read_back.first, without_transfer[name].first)
            for name in ("two_pieces", "own_turns")
        }
    changed = with_another_block(prompt, block, rng)
    if changed is not None:
        other = complete(prefill, changed, salt=_salt())
        found.controls["another_block"] = difference(other.first, plain.first)
    return found


def meet(servers: Servers, rng: random.Random) -> None:
    """Turns until P has read one back: it computes while it meets D for the first time.

    EngineError if that takes longer than _MEETING_S.
    """
    new, end = source(rng), time.monotonic() + _MEETING_S
    while True:
        prompt = new(_MEETING_TOKENS)
        turn = complete(
            servers.decode, prompt, 8, _given(complete(servers.prefill, prompt, 1, FIRST))
        )
        before = tokens_read(servers.prefill)
        reset_prefix_cache(servers.prefill)
        again = complete(servers.prefill, prompt + turn.tokens + new(8), params=_given(turn))
        complete(servers.decode, prompt + turn.tokens, 1, _given(again))
        if tokens_read(servers.prefill) > before:
            return
        if time.monotonic() > end:
            raise EngineError(f"{servers.prefill} has read nothing back in {_MEETING_S:.0f} s")
        time.sleep(0.5)


def _in_two_pieces(url: str, prompt: list[int], end: int) -> Answer:
    """The engine's own prefix cache splits the prompt where a read-back would."""
    salt = _salt()
    complete(url, prompt[:end], salt=salt)
    return complete(url, prompt, salt=salt)


def _two_turns_alone(url: str, first: list[int], generate: int, prompt: list[int]) -> Answer:
    """The same two turns on one engine: generated KV stays where it was made."""
    salt = _salt()
    complete(url, first, generate, salt=salt)
    return complete(url, prompt, salt=salt)


def _given(answer: Answer) -> dict[str, object]:
    if answer.params is None:
        raise EngineError("an answer came without kv_transfer_params")
    return answer.params


def _block(turn: Answer) -> int:
    proof = _given(turn).get("prefix_proof")
    if not isinstance(proof, dict) or not isinstance(proof.get("block_size"), int):
        raise EngineError(f"D sent no proof: {sorted(_given(turn))}")
    return int(proof["block_size"])


def _salt() -> str:
    return uuid.uuid4().hex
