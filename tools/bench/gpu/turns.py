"""Conversations of two turns through one set's P and D."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tools.bench.gpu import plan
from tools.bench.gpu.client import (
    FIRST,
    RequestError,
    body,
    encode,
    first_token,
    to_read_back,
    whole,
)
from tools.bench.gpu.counters import PrefillLog, Transfer, settled, transfer
from tools.bench.gpu.plan import Kept, Kind, Plan, SetName
from tools.bench.gpu.rows import Row, numbers
from tools.cluster import Engine
from tools.demo.errors import DemoError
from tools.demo.metrics import read_metrics


@dataclass
class PairOfNodes:
    """A running set: P and D of one release, and what its D keeps. token_ids: prompts' material."""

    name: SetName
    prefill: Engine
    decode: Engine
    kept: Kept
    log: PrefillLog
    token_ids: Sequence[int]
    rng: random.Random
    contacted: bool = field(default=False)

    def prompt(self, tokens: int) -> list[int]:
        """Random ids, of no prompt before."""
        return self.rng.choices(self.token_ids, k=tokens)


@dataclass(frozen=True)
class Finished:
    """A first turn: prompt and answer together, D's params, and which of Kept it is."""

    history: list[int]
    params: Mapping[str, Any]
    key: int
    handover: Transfer | None = None


def measure(nodes: PairOfNodes, what: Plan, kind: Kind, length: int, repeat: int) -> Row:
    """A conversation of its own: its first turn, then the second one, which is the row.

    A failure is a row that says so.
    """
    request_id = uuid.uuid4().hex
    try:
        return _measure(nodes, what, kind, length, repeat, request_id)
    except (RequestError, DemoError) as error:
        return Row(nodes.name, kind, length, repeat, request_id, error=str(error)[:600])


def _measure(
    nodes: PairOfNodes, what: Plan, kind: Kind, length: int, repeat: int, request_id: str
) -> Row:
    prefill, decode = nodes.prefill.url, nodes.decode.url
    nodes.kept.wait_for(length + plan.SECOND_ANSWER)
    reads = kind == "read_back"
    first = nodes.prompt(what.first_prompt(length))
    if reads:
        before_turn = read_metrics(decode)
        turn = first_turn(nodes, first, what.output_tokens)
        before_decode = settled(decode, before_turn)
        first_handover = transfer(before_turn, before_decode)
        given = to_read_back(turn.params)
    else:
        # To D alone, which then keeps nothing for anybody: only its prefix cache has the history,
        # as it would have after a turn that nobody reads back.
        turn = alone(nodes, first, what.output_tokens)
        before_decode, first_handover, given = read_metrics(decode), None, dict(FIRST)
    prompt = encode(turn.history + nodes.prompt(length - len(turn.history)))
    content = body(prompt, 1, given)
    before_prefill = read_metrics(prefill)
    first_contact = reads and not nodes.contacted
    at_s = time.monotonic()
    answer, prefill_ms = whole(prefill, content, request_id)
    content = body(prompt, plan.SECOND_ANSWER, params_of(answer), stream=True)
    decode_ms = first_token(decode, content, request_id)
    nodes.contacted |= reads
    if reads and nodes.name == "stock":
        nodes.kept.release(turn.key)
    logged = nodes.log.read_back(request_id) if reads and nodes.name == "ours" else {}
    moved = reads and logged.get("outcome", "read") == "read"
    return Row(
        nodes.name,
        kind,
        length,
        repeat,
        request_id,
        at_s=at_s,
        first_contact=first_contact,
        prefill_ms=round(prefill_ms, 3),
        decode_ms=round(decode_ms, 3),
        pull=transfer(before_prefill, settled(prefill, before_prefill, moved)) if reads else None,
        handover=transfer(before_decode, settled(decode, before_decode)),
        first_handover=first_handover,
        log=numbers(logged),
    )


def first_turn(nodes: PairOfNodes, prompt: list[int], answer_tokens: int) -> Finished:
    """P computes it, D answers, and keeps it."""
    text = encode(prompt)
    handed, _ = whole(nodes.prefill.url, body(text, 1, FIRST))
    content = body(text, answer_tokens, params_of(handed), return_token_ids=True)
    answer, _ = whole(nodes.decode.url, content)
    key = nodes.kept.keep(len(prompt) + answer_tokens)
    return Finished(prompt + token_ids(answer), params_of(answer), key)


def alone(nodes: PairOfNodes, prompt: list[int], answer_tokens: int) -> Finished:
    """D computes and answers it, and keeps it in its prefix cache only."""
    content = body(encode(prompt), answer_tokens, return_token_ids=True)
    answer, _ = whole(nodes.decode.url, content)
    return Finished(prompt + token_ids(answer), {}, 0)


def at_once(nodes: PairOfNodes, lengths: Sequence[int], answer_tokens: int) -> None:
    """First turns of these lengths, several at a time. Raises RequestError."""
    prompts = [nodes.prompt(length) for length in lengths]
    nodes.kept.wait_for(sum(lengths) + answer_tokens * len(lengths))
    with ThreadPoolExecutor(plan.FRAGMENTS_AT_ONCE) as pool:
        list(pool.map(lambda prompt: first_turn(nodes, prompt, answer_tokens), prompts))


def fragment(nodes: PairOfNodes, count: int, seed: int) -> None:
    """Leave both caches as `count` conversations of different lengths at once leave them."""
    lengths = plan.fragment_lengths(count, seed)
    for start in range(0, count, plan.FRAGMENTS_AT_ONCE):
        at_once(nodes, lengths[start : start + plan.FRAGMENTS_AT_ONCE], plan.SHORT_ANSWER)


def params_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine has told about its blocks; raises RequestError if it has not."""
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise RequestError("an answer came without kv_transfer_params")
    return params


def token_ids(answer: Mapping[str, Any]) -> list[int]:
    """The tokens of a whole answer."""
    return [int(token) for token in answer["choices"][0]["token_ids"]]
