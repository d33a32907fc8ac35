"""Turns through a router to engines with a key, and what D says of its leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from tests.e2e.turns import http, metric
from tests.leases.conftest import KEY
from tools.cluster import Cluster, Engine
from tools.cluster.router import RouterProcess

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
ANSWER = 24


def say(
    server: RouterProcess | Engine,
    prompt: Sequence[int],
    conversation: str | None = None,
    max_tokens: int = ANSWER,
    **headers: str,
) -> list[int]:
    """A streamed turn of token ids; the history with its answer."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if conversation is not None:
        body["conversation_id"] = conversation
    with http() as client:
        answer = client.post(
            f"{server.url}/v1/completions", json=body, headers={**AUTHORIZED, **headers}
        )
    assert answer.status_code == httpx.codes.OK, answer.text
    return [*prompt, *answer.json()["choices"][0]["token_ids"]]


def leases(engine: Engine) -> dict[str, Any]:
    """D's totals."""
    with http() as client:
        answer = client.get(f"{engine.url}/v1/kv_leases", headers=AUTHORIZED)
    assert answer.status_code == httpx.codes.OK, answer.text
    totals: dict[str, Any] = answer.json()
    return totals


def reads(pair: Cluster) -> float:
    """How many turns P has read back."""
    return metric(pair.prefill[0], "vllm:bidir_read_back_total", outcome="read")
