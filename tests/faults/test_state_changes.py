"""What D keeps changes between the proof and the last byte: CONFIRM says so, and P computes.

Greedy, float32, both prefix caches on: a wrong block would also answer later requests wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.e2e.oracle import IDS, Compared, compare
from tests.faults.conftest import BLOCKS, TTL_S
from tests.faults.points import POINTS, FaultPoints
from tests.faults.turns import (
    check_right,
    clear_cache,
    clear_cache_now,
    decode,
    in_background,
    lost,
    prefill,
    reads_back,
    tokens,
    turn,
)
from tools.cluster import Cluster, Engine


def recycle(d: Engine) -> None:
    """The turn's time is over, and other requests write over its blocks."""
    time.sleep(TTL_S + 1)
    for number in range(BLOCKS * 128 // 1900 + 1):
        decode(d, tokens(("recycle", number, time.time()), 1900), None)


# After a reset what blocks hold has lost its meaning; they stay where they are.
CHANGES: dict[str, Callable[[Engine], object]] = {"reset": clear_cache_now, "recycled": recycle}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_under_a_read_back_is_not_used(
    change: str, point: str, faulty: Cluster, points: FaultPoints, compared: Compared
) -> None:
    p, d = faulty.prefill[0], faulty.decode[0]
    history, kept = turn(faulty, tokens((change, point), 600))
    clear_cache(p)
    prompt = history + tokens("more", 20)
    before = lost(p, "hold_lost")
    with points.stop_at(point), in_background(prefill, p, prompt, kept) as leg:
        points.wait_until_reached(point)
        CHANGES[change](d)
        points.let_go(point)
        handed = leg.result()
    assert lost(p, "hold_lost") - before == 1
    said, _ = decode(d, prompt, handed)
    compare(IDS, d, prompt, {"choices": [{"token_ids": said}]}, True, compared)
    # Nothing wrong was filed in either prefix cache.
    for engine in (p, d):
        check_right(engine, prompt, compared)


@pytest.mark.parametrize("point", POINTS)
def test_a_stop_alone_changes_nothing(
    point: str, faulty: Cluster, points: FaultPoints, compared: Compared
) -> None:
    """Else the tests above would pass for a read-back that never works here."""
    p, d = faulty.prefill[0], faulty.decode[0]
    history, kept = turn(faulty, tokens(("alone", point), 600))
    clear_cache(p)
    prompt = history + tokens("more", 20)
    with (
        reads_back(p),
        points.stop_at(point),
        in_background(prefill, p, prompt, kept) as leg,
    ):
        points.wait_until_reached(point)
        points.let_go(point)
        handed = leg.result()
    said, _ = decode(d, prompt, handed)
    compare(IDS, d, prompt, {"choices": [{"token_ids": said}]}, True, compared)
