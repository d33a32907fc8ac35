"""What D reads of P is used only if P still had it: real engines, and a P that needs its blocks.

The base answers from whatever those blocks hold by then, with 200.
"""

from __future__ import annotations

import httpx

from tests.e2e.oracle import Compared
from tests.faults.handovers import comes_too_late, overwrite, post, refused
from tests.faults.turns import FIRST_TURN, clear_cache, prefill, rests, tokens
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
