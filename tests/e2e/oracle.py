"""The oracle: what an engine answers without any transfer, greedy and in float32.

A difference is excused only where the plain recompute's two best log-probs lie within 1e-4, at
most once in 2,000 compared tokens, and each such place is printed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.turns import MODEL, http
from tools.cluster import Engine
from tools.cluster.router import RouterProcess

MAX_TOKENS = 16
TIE = 1e-4
# 1 excused place in so many compared tokens.
TOKENS_PER_EXCUSE = 2000


@dataclass
class Compared:
    """What a session has compared, and the near-ties that excused a difference."""

    tokens: int = 0
    excused: list[str] = field(default_factory=list)

    def summary(self) -> str:
        places = "".join(f"\n  {place}" for place in self.excused)
        return f"{self.tokens} tokens compared, {len(self.excused)} near-ties excused{places}"

    def check(self) -> None:
        assert len(self.excused) <= self.tokens // TOKENS_PER_EXCUSE, self.summary()


@dataclass(frozen=True)
class Kind:
    """One API: how a history becomes a body, and an answer a list of pieces to compare."""

    name: str
    path: str
    body: Callable[[Any], dict[str, Any]]
    pieces: Callable[[dict[str, Any]], list[Any]]
    logprobs: dict[str, Any]
    gap: Callable[[dict[str, Any], int], float]


def completion_gap(answer: dict[str, Any], at: int) -> float:
    best = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][at].values())[-2:]
    return float(best[1] - best[0])


def chat_gap(answer: dict[str, Any], at: int) -> float:
    tops = answer["choices"][0]["logprobs"]["content"][at]["top_logprobs"]
    return float(tops[0]["logprob"] - tops[1]["logprob"])


IDS = Kind(
    "ids",
    "/v1/completions",
    lambda prompt: {"prompt": prompt, "return_token_ids": True},
    lambda answer: list(answer["choices"][0]["token_ids"]),
    {"logprobs": 2},
    completion_gap,
)
TEXT = Kind(
    "text",
    "/v1/completions",
    lambda prompt: {"prompt": prompt},
    lambda answer: list(answer["choices"][0]["text"]),
    {"logprobs": 2},
    completion_gap,
)
CHAT = Kind(
    "chat",
    "/v1/chat/completions",
    lambda messages: {"messages": messages},
    lambda answer: list(answer["choices"][0]["message"]["content"]),
    {"logprobs": True, "top_logprobs": 2},
    chat_gap,
)


def ask(server: Engine | RouterProcess, kind: Kind, history: Any, **extra: Any) -> dict[str, Any]:
    body = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, **kind.body(history)}
    with http() as client:
        response = client.post(server.url + kind.path, json={**body, **extra})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def compare(
    kind: Kind,
    engine: Engine,
    history: Any,
    answer: dict[str, Any],
    salted: bool,
    seen: Compared,
    **extra: Any,
) -> None:
    """The answer equals the recompute's; a near-tie of the recompute may excuse a difference.

    ``extra`` are the request's fields beyond the usual ones.
    """
    if salted:
        extra["cache_salt"] = uuid.uuid4().hex
    oracle = ask(engine, kind, history, **extra)
    found, wanted = kind.pieces(answer), kind.pieces(oracle)
    seen.tokens += len(wanted)
    if found == wanted:
        return
    pairs = zip(found, wanted, strict=False)
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
    detailed = ask(engine, kind, history, **kind.logprobs, **extra)
    gap = kind.gap(detailed, at)
    assert gap <= TIE, f"{kind.name}: differs at token {at}, gap {gap:.2g}: {found} / {wanted}"
    seen.excused.append(f"near-tie: {kind.name}, token {at}, gap {gap:.2g}")
