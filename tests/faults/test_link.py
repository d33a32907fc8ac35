"""A link that turns out to be slow: P computes, until it has improved."""

from __future__ import annotations

import time
from typing import Any

from vllm.bidir.connector.links import LEAST_BACK_OFF_S, SUSPECT_S

from tests.e2e.oracle import IDS, Compared, compare
from tests.faults.points import FaultPoints
from tests.faults.turns import clear_cache, decode, in_background, lost, prefill, read, tokens, turn
from tools.cluster import Cluster

# A probe takes a moment, and so does the turn that asks for it.
LOOKS_AGAIN_S = LEAST_BACK_OFF_S + 15
# Longer than computing 600 tokens would take, so that the link is suspect, and longer than it is
# left alone after it was timed when P met D.
TAKES_S = SUSPECT_S + 1


def second_turn(pair: Cluster, seed: object) -> tuple[list[int], Any]:
    """A prompt that D has most of and P nothing, and D's params for it."""
    history, kept = turn(pair, tokens(seed, 600))
    clear_cache(pair.prefill[0])
    return history + tokens("more", 20), kept


def suspect(pair: Cluster, points: FaultPoints) -> None:
    """A READ takes so long that P times the link, if it has met D already."""
    p = pair.prefill[0]
    prompt, kept = second_turn(pair, ("suspect", time.time()))
    before = lost(p, "slow_link")
    with points.stop_at("reading"), in_background(prefill, p, prompt, kept) as leg:
        end = time.monotonic() + TAKES_S
        while time.monotonic() < end and lost(p, "slow_link") == before:
            time.sleep(0.2)
        points.let_go("reading")
        leg.result()
    # Until it has been timed: a READ or two of a second.
    time.sleep(4.0)


def test_a_slow_link_is_left_alone_until_it_has_improved(
    faulty: Cluster, points: FaultPoints, compared: Compared
) -> None:
    p, d = faulty.prefill[0], faulty.decode[0]
    # P knows how long computing takes, whichever test is the first.
    turn(faulty, tokens("slow link, length", 600))
    with points.slow_link():
        suspect(faulty, points)
        prompt, kept = second_turn(faulty, "slow link")
        before = lost(p, "slow_link"), read(p)
        handed = prefill(p, prompt, kept)
        assert (lost(p, "slow_link"), read(p)) == (before[0] + 1, before[1])
        said, _ = decode(d, prompt, handed)
        compare(IDS, d, prompt, {"choices": [{"token_ids": said}]}, True, compared)
        log = p.log_path.read_text(encoding="utf-8", errors="replace")
        assert log.count("UCX_CUDA_IPC_ENABLE_GET_ZCOPY") == 1, "one warning, and it names the cure"
    end = time.monotonic() + LOOKS_AGAIN_S
    while read(p) == before[1]:
        assert time.monotonic() < end, "it is never looked at again"
        prompt, kept = second_turn(faulty, ("improved", time.time()))
        decode(d, prompt, prefill(p, prompt, kept))
        time.sleep(2)
