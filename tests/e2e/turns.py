"""Turns of token ids as a client sends and sees them, and the counters that they move."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tools.cluster import Engine
from tools.cluster.router import RouterProcess
from tools.cluster.tokenizer import GENERATED_IDS

FIELD = "kv_transfer_params"
MODEL = "tiny"
MAX_TOKENS = 40
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Turn:
    """One answered turn. ``wire`` is the body of the answer as it came in."""

    prompt: list[int]
    generated: list[int]
    wire: str

    @property
    def history(self) -> list[int]:
        """What the next prompt begins with when nothing is edited."""
        return self.prompt + self.generated

    @property
    def kept(self) -> int:
        """Tokens whose KV the decode engine has: the last generated one was never fed to it."""
        return len(self.history) - 1


def tokens(count: int, seed: int) -> list[int]:
    """``count`` token ids that are the same for the same seed."""
    return random.Random(seed).choices(GENERATED_IDS, k=count)


def http() -> httpx.Client:
    """A client that ignores proxy settings: all servers are on this machine."""
    return httpx.Client(trust_env=False, timeout=TIMEOUT_S)


def ask(
    server: Engine | RouterProcess,
    prompt: Sequence[int],
    *,
    max_tokens: int = MAX_TOKENS,
    stream: bool = True,
    session: str | None = None,
    **fields: Any,
) -> Turn:
    """Send one greedy completion request and return what was generated, id by id.

    ``session`` goes into the X-Session-ID header, ``fields`` into the body.
    """
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "return_token_ids": True,
        "stream": stream,
        **fields,
    }
    headers = {} if session is None else {"X-Session-ID": session}
    with http() as client:
        response = client.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert response.status_code == httpx.codes.OK, response.text
    chunks = list(events(response.text)) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == list(prompt)
    generated = [token for choice in choices for token in choice["token_ids"] or []]
    assert len(generated) == max_tokens
    return Turn(list(prompt), generated, response.text)


def converse(
    server: Engine | RouterProcess, questions: Sequence[Sequence[int]], **fields: Any
) -> Iterator[Turn]:
    """A conversation that only appends: each prompt is all that was said before, and a question."""
    history: list[int] = []
    for question in questions:
        turn = ask(server, [*history, *question], **fields)
        yield turn
        history = turn.history


def wait_until(true: Callable[[], object], seconds: float, else_what: str) -> None:
    """`else_what`: what is wrong when it does not come true in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"after {seconds:.0f} s: {else_what}"
        time.sleep(0.1)


def events(wire: str) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, which must end with ``[DONE]``."""
    data = [line.removeprefix("data: ") for line in wire.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]", wire[-500:]
    return map(json.loads, data[:-1])


def metric(server: Engine | RouterProcess, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have these labels, 0 when there are none."""
    with http() as client:
        text = client.get(f"{server.url}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def by_outcome(server: Engine | RouterProcess, name: str) -> dict[str, int]:
    """Sums of a counter by its ``reason``, or by its ``outcome`` where it has none."""
    with http() as client:
        text = client.get(f"{server.url}/metrics").text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                became = sample.labels["reason"] or sample.labels["outcome"]
                found[became] += int(sample.value)
    return dict(found)


def outcomes(server: RouterProcess) -> dict[str, int]:
    """The router's count of turns: ``hit``, and the misses by reason."""
    return by_outcome(server, "bidir_router_turns_total")


@dataclass(frozen=True)
class KvCounters:
    """What an engine has counted so far; tokens and bytes.

    ``asked``: prompt tokens that the KV connector was asked for; ``read``: those that came from a
    peer; ``computed``: those that were computed here; ``moved``: bytes that NIXL has read.
    """

    asked: int
    read: int
    computed: int
    moved: int

    @classmethod
    def of(cls, engine: Engine) -> KvCounters:
        return cls(
            asked=int(metric(engine, "vllm:external_prefix_cache_queries_total")),
            read=int(metric(engine, "vllm:external_prefix_cache_hits_total")),
            computed=int(
                metric(engine, "vllm:prompt_tokens_by_source_total", source="local_compute")
            ),
            moved=int(metric(engine, "vllm:nixl_bytes_transferred_sum")),
        )

    def since(self, before: KvCounters) -> KvCounters:
        """What has been counted since ``before``."""
        return KvCounters(
            self.asked - before.asked,
            self.read - before.read,
            self.computed - before.computed,
            self.moved - before.moved,
        )
