"""What D reads of P is used only if P still had it: real engines, and a P that needs its blocks.

The base answers from whatever those blocks hold by then, with 200.
"""

from __future__ import annotations

from typing import Any

import httpx

from tests.e2e.oracle import IDS, Compared, ask
from tests.e2e.turns import http, metric
from tests.faults.conftest import BLOCKS
from tests.faults.turns import FIRST_TURN, check_right, clear_cache, prefill, rests, tokens
from tools.cluster import Cluster, Engine

# Tokens of a block (an engine on CPUs), and of a prompt that fits the engines' length.
BLOCK, LONG = 128, 1900


def post(d: Engine, prompt: list[int], params: Any) -> httpx.Response:
    body = {"model": d.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    with http() as client:
        return client.post(
            f"{d.url}/v1/completions", json={**body, "kv_transfer_params": params}, timeout=120
        )


def overwrite(p: Engine) -> None:
    """Other prompts take all blocks that P has."""
    for number in range(BLOCKS * BLOCK // LONG + 1):
        ask(p, IDS, tokens(("other", number), LONG), max_tokens=1)


def lost(d: Engine) -> float:
    return metric(d, "vllm:bidir_lost_handovers_total", reason="expired")


def refused(d: Engine, prompt: list[int], params: Any, compared: Compared) -> None:
    """D does not answer from what it finds; the default policy for a failed load is an error, with
    which our router has D compute."""
    before = lost(d)
    answer = post(d, prompt, params)
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR, answer.text
    assert lost(d) == before + 1
    rests(d)
    check_right(d, prompt, compared)


def test_a_d_that_comes_too_late_does_not_use_what_it_finds(
    faulty: Cluster, compared: Compared
) -> None:
    p, d = faulty.prefill[0], faulty.decode[0]
    prompt = tokens("late", 600)
    handed = prefill(p, prompt, FIRST_TURN)
    rests(p)
    overwrite(p)
    refused(d, prompt, handed, compared)


def test_a_handover_that_was_read_is_not_read_again(faulty: Cluster, compared: Compared) -> None:
    """As a router does whose first D has died."""
    p, d = faulty.prefill[0], faulty.decode[0]
    prompt = tokens("twice", 600)
    handed = prefill(p, prompt, FIRST_TURN)
    assert post(d, prompt, handed).status_code == httpx.codes.OK
    rests(p)
    overwrite(p)
    rests(d)
    clear_cache(d)
    refused(d, prompt, handed, compared)
