"""Handovers that must not be used, sent to D without a router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from tests.e2e.oracle import IDS, Compared, ask
from tests.e2e.turns import http, metric
from tests.faults.conftest import BLOCKS
from tests.faults.turns import FIRST_TURN, check_right, decode, prefill, rests, tokens
from tools.cluster import Cluster, Engine

# Tokens of a block (an engine on CPUs), and of a prompt that fits the engines' length.
BLOCK, LONG = 128, 1900

# What somebody may make of the params that he was given himself, and of what he can guess of those
# that somebody else was given.
Forge = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
FORGED: dict[str, Forge] = {
    "another's blocks": lambda own, others: {**own, "remote_block_ids": others["remote_block_ids"]},
    "another's request": lambda own, others: {
        **own,
        "remote_request_id": others["remote_request_id"],
    },
    "all of another's but the token": lambda own, others: {**others, "claim": own["claim"]},
    "no token": lambda own, others: {name: others[name] for name in others if name != "claim"},
}


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


def lost(d: Engine, reason: str = "expired") -> float:
    return metric(d, "vllm:bidir_lost_handovers_total", reason=reason)


def fails(d: Engine, prompt: list[int], params: Any, compared: Compared) -> None:
    """D does not answer from what it finds; the default policy for a failed load is an error, with
    which our router has D compute."""
    answer = post(d, prompt, params)
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR, answer.text
    rests(d)
    check_right(d, prompt, compared)


def refused(d: Engine, prompt: list[int], params: Any, compared: Compared) -> None:
    """It fails since P says that it has it no longer."""
    before = lost(d)
    fails(d, prompt, params, compared)
    assert lost(d) == before + 1


def comes_too_late(pair: Cluster, compared: Compared) -> None:
    """P has freed the prompt's blocks, and used them for others, before D reads them."""
    p, d = pair.prefill[0], pair.decode[0]
    prompt = tokens("late", 600)
    handed = prefill(p, prompt, FIRST_TURN)
    rests(p)
    overwrite(p)
    refused(d, prompt, handed, compared)


def names_anothers(pair: Cluster, compared: Compared, forged: str) -> None:
    """P keeps two prompts, and D is sent for the one what was handed over with the other."""
    p = pair.prefill[0]
    prompt, private = tokens(("own", forged), 600), tokens(("another's", forged), 600)
    others = prefill(p, private, FIRST_TURN)
    own = prefill(p, prompt, FIRST_TURN)
    _not_handed_over(pair, compared, (prompt, FORGED[forged](own, others)), (private, others))


def names_another_prompt(pair: Cluster, compared: Compared) -> None:
    """D is sent for one prompt what was handed over with another, which is as long: it would keep
    that under the wrong prompt, too."""
    prompt, other = tokens("handed over", 600), tokens("not handed over", 600)
    own = prefill(pair.prefill[0], prompt, FIRST_TURN)
    _not_handed_over(pair, compared, (other, own), (prompt, own))


def _not_handed_over(
    pair: Cluster,
    compared: Compared,
    sent: tuple[list[int], dict[str, Any]],
    given: tuple[list[int], dict[str, Any]],
) -> None:
    """D refuses the one, and still takes over the other: a prompt each, and params."""
    p, d = pair.prefill[0], pair.decode[0]
    before = lost(d, "not_handed_over")
    answer = post(d, *sent)
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR, answer.text
    said, _ = decode(d, *given)
    rests(p)
    rests(d)
    check_right(d, sent[0], compared)
    check_right(d, given[0] + said[:1], compared)
    assert lost(d, "not_handed_over") == before + 1
