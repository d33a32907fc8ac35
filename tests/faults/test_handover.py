"""What D reads of P is used only if P still had it, and has handed over just this: real engines.

The base answers from whatever those blocks hold, with 200.
"""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.oracle import Compared
from tests.faults.handovers import (
    FORGED,
    comes_too_late,
    lost,
    names_another_prompt,
    names_anothers,
    overwrite,
    post,
    refused,
)
from tests.faults.turns import FIRST_TURN, check_right, clear_cache, prefill, rests, tokens, turn
from tools.cluster import Cluster


def test_a_d_that_comes_too_late_does_not_use_what_it_finds(
    faulty: Cluster, compared: Compared
) -> None:
    comes_too_late(faulty, compared)


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


@pytest.mark.parametrize("forged", FORGED)
def test_nobody_is_answered_from_anothers_prompt(
    faulty: Cluster, compared: Compared, forged: str
) -> None:
    names_anothers(faulty, compared, forged)


def test_no_prompt_is_answered_from_another_one(faulty: Cluster, compared: Compared) -> None:
    names_another_prompt(faulty, compared)


def test_what_d_keeps_is_handed_over_to_nobody(faulty: Cluster, compared: Compared) -> None:
    """P, too, would read whatever params of a handover name."""
    p, d = faulty.prefill[0], faulty.decode[0]
    private, prompt = tokens("kept by D", 600), tokens("sent to P", 600)
    _, kept = turn(faulty, private)
    before = lost(p, "not_handed_over")
    params = {**kept, "do_remote_prefill": True, "do_remote_decode": False}
    answer = post(p, prompt, params)
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR, answer.text
    rests(p)
    rests(d)
    check_right(p, prompt, compared)
    assert lost(p, "not_handed_over") == before + 1
