"""Turns through the router, and what their answers are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tests.gpu.client import EngineError, complete, reset_prefix_cache, tokens_read
from tests.gpu.compare import Difference, difference
from tests.gpu.histories import Conversation, expected_read, source, with_another_block
from tests.gpu.measure import THRESHOLD, Measured, in_two_pieces, new_salt
from tests.gpu.topology.load import Sent, send
from tools.bench.gpu.counters import kv_capacity

_ANSWER = 8


@dataclass(frozen=True)
class Nodes:
    """URLs of the router and of the engines that run."""

    router: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]


def converse(conversation: Conversation, nodes: Nodes, rng: random.Random) -> Measured:
    """Two turns of a named conversation; EngineError when one is not answered."""
    name = new_salt()
    first = _turn(nodes, name, conversation.prompt, conversation.generate)
    told = first.prompt + first.tokens
    prompt = conversation.second(first.prompt, first.tokens, source(rng))
    for url in nodes.prefill:
        reset_prefix_cache(url)
    before = _read(nodes)
    second = _turn(nodes, name, prompt, _ANSWER, last=True)
    read = _read(nodes) - before
    _, block = kv_capacity(nodes.decode[0])
    case = compare(conversation.name, second, nodes, block)
    case.read, case.expected = read, expected_read(told, prompt, block, THRESHOLD)
    changed = with_another_block(prompt, block, rng)
    if changed is not None:
        plain = complete(nodes.prefill[0], prompt, salt=new_salt())
        other = complete(nodes.prefill[0], changed, salt=new_salt())
        case.controls["another_block"] = difference(other.first, plain.first)
    return case


def compare(name: str, turn: Sent, nodes: Nodes, block: int) -> Measured:
    """A turn's first token beside a plain recompute; nothing is said of what was read."""
    ask = partial(complete, nodes.prefill[0])
    plain = ask(turn.prompt, salt=new_salt()).first
    cut = max(1, (len(turn.prompt) - 1) // 2)
    noise: dict[str, Difference] = {
        "two_pieces": difference(in_two_pieces(ask, turn.prompt, cut).first, plain),
    }
    for url in (*nodes.prefill[1:], *nodes.decode):
        other = complete(url, turn.prompt, salt=new_salt()).first
        noise[f"other_engine_{len(noise)}"] = difference(other, plain)
    case = Measured(name, len(turn.prompt), block, 0, 0, noise=noise)
    case.checks = {"decode": difference(turn.first, plain)}
    return case


def _turn(nodes: Nodes, name: str, prompt: Sequence[int], answer: int, last: bool = False) -> Sent:
    turn = Sent(list(prompt), 0.0)
    send(nodes.router, name, turn, answer, last)
    if turn.error is not None:
        raise EngineError(f"{nodes.router}: {turn.error}")
    return turn


def _read(nodes: Nodes) -> int:
    return sum(tokens_read(url) for url in nodes.prefill)
