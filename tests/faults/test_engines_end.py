"""A process dies or stands still at each step of a turn; whoever survives answers right.

After each, the survivor's free blocks are as before, no request is stuck, and its log holds no
traceback that is not about the fault itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.oracle import IDS, Compared, ask, compare
from tests.e2e.turns import http, metric, wait_until
from tests.faults.conftest import SILENCE_S, TIMEOUT_S, TTL_S
from tests.faults.points import POINTS, FaultPoints
from tests.faults.turns import (
    check_right,
    clear_cache,
    decode,
    in_background,
    lost,
    prefill,
    reads_back,
    rests,
    tokens,
    turn,
    used,
)
from tools.cluster import Cluster, Engine

FULL = os.environ.get("BIDIR_FAULTS") == "full"
# Each kill costs a restart; `make test` has those in which a read-back is half done.
D_DIES_AT = POINTS if FULL else ("held", "transferred")
P_DIES_AT = POINTS if FULL else ("reading",)
REASONS = ("peer_gone", "timeout", "hold_lost", "transfer_failed")


def given_up(engine: Engine) -> float:
    return sum(lost(engine, reason) for reason in REASONS)


@pytest.mark.parametrize("point", D_DIES_AT)
def test_d_dies_under_a_read_back(
    point: str, faulty: Cluster, points: FaultPoints, compared: Compared
) -> None:
    """P computes and answers; D, back under its old id or a new one, is read from again."""
    p, d = faulty.prefill[0], faulty.decode[0]
    history, kept = turn(faulty, tokens(("d", point), 600))
    clear_cache(p)
    prompt = history + tokens("more", 20)
    before = given_up(p)
    with points.stop_at(point), in_background(prefill, p, prompt, kept) as leg:
        points.wait_until_reached(point)
        d.kill()
        points.let_go(point)
        handed = leg.result()
    assert given_up(p) - before == 1
    check_right(p, prompt, compared)
    d.restart(keep_engine_id=point in ("held", "reading"))
    # P's blocks for that turn are gone by now, or D reads them: right either way.
    rests(p)
    handed = prefill(p, prompt, {"do_remote_decode": True, "do_remote_prefill": False})
    said, kept = decode(d, prompt, handed)
    compare(IDS, d, prompt, {"choices": [{"token_ids": said}]}, True, compared)
    clear_cache(p)
    longer = prompt + said + tokens("again", 10)
    with reads_back(p):
        handed = prefill(p, longer, kept)
    said, _ = decode(d, longer, handed)
    compare(IDS, d, longer, {"choices": [{"token_ids": said}]}, True, compared)
    rests(p)


@pytest.mark.parametrize("point", P_DIES_AT)
def test_p_dies_under_a_read_back(
    point: str, faulty: Cluster, points: FaultPoints, compared: Compared
) -> None:
    """D goes on; P, back under its old id, is read from by D as if nothing had been."""
    p, d = faulty.prefill[0], faulty.decode[0]
    history, kept = turn(faulty, tokens(("p", point), 600))
    clear_cache(p)
    prompt = history + tokens("more", 20)
    with points.stop_at(point), in_background(prefill, p, prompt, kept) as leg:
        points.wait_until_reached(point)
        p.kill()
        points.let_go(point)
        assert isinstance(leg.exception(), httpx.TransportError)
    check_right(d, prompt, compared)
    rests(d)
    points.clear()
    p.restart(keep_engine_id=True)
    history, kept = turn(faulty, tokens(("p again", point), 600))
    longer = history + tokens("more", 20)
    clear_cache(p)
    with reads_back(p):
        handed = prefill(p, longer, kept)
    said, _ = decode(d, longer, handed)
    compare(IDS, d, longer, {"choices": [{"token_ids": said}]}, True, compared)


def test_p_dies_before_d_has_read_its_blocks(faulty: Cluster, compared: Compared) -> None:
    """The handover cannot be made: that request fails by policy or is computed, D goes on."""
    p, d = faulty.prefill[0], faulty.decode[0]
    prompt = tokens("handover", 600)
    handed = prefill(p, prompt, {"do_remote_decode": True, "do_remote_prefill": False})
    p.kill()
    body = {"model": d.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    with http() as client:
        answer = client.post(
            f"{d.url}/v1/completions", json={**body, "kv_transfer_params": handed}, timeout=60
        )
    assert answer.status_code in (200, 500), answer.text
    check_right(d, prompt, compared)
    rests(d)
    p.restart(keep_engine_id=True)
    history, _ = turn(faulty, tokens("handover again", 600))
    check_right(d, history, compared)


@pytest.mark.skipif(not FULL, reason="costs a restart; BIDIR_FAULTS=full")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_dies_while_d_generates(role: str, faulty: Cluster, compared: Compared) -> None:
    """P's death does not touch what D has read; D's leaves nothing behind on P."""
    p, d = faulty.prefill[0], faulty.decode[0]
    victim, survivor = (p, d) if role == "prefill" else (d, p)
    prompt = tokens(("generating", role), 600)
    handed = prefill(p, prompt, {"do_remote_decode": True, "do_remote_prefill": False})
    long = {"max_tokens": 400, "ignore_eos": True}
    running = metric(d, "vllm:request_success_total")
    with in_background(lambda: decode(d, prompt, handed, **long)) as leg:
        wait_until(
            lambda: metric(d, "vllm:num_requests_running") == 1 and used(p) == 0,
            30,
            "D does not generate, or P has not let go",
        )
        victim.kill()
        if role == "decode":
            assert isinstance(leg.exception(), httpx.TransportError)
        else:
            said, _ = leg.result()
            assert metric(d, "vllm:request_success_total") == running + 1
            found = {"choices": [{"token_ids": said}]}
            compare(IDS, d, prompt, found, True, compared, **long)
    check_right(survivor, prompt, compared)
    rests(survivor)
    victim.restart(keep_engine_id=role == "decode")
    history, kept = turn(faulty, tokens(("generating again", role), 600))
    clear_cache(p)
    longer = history + tokens("more", 20)
    with reads_back(p):
        handed = prefill(p, longer, kept)
    said, _ = decode(d, longer, handed)
    compare(IDS, d, longer, {"choices": [{"token_ids": said}]}, True, compared)


@contextmanager
def standing_still(engine: Engine) -> Iterator[None]:
    """All its processes are stopped, as on a host that has lost its network."""
    os.killpg(engine.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(engine.pid, signal.SIGCONT)


@pytest.mark.parametrize("point", ["before_hold", "transferred"])
def test_a_d_that_stands_still_is_not_waited_for(
    point: str, faulty: Cluster, points: FaultPoints, compared: Compared
) -> None:
    p, d = faulty.prefill[0], faulty.decode[0]
    history, kept = turn(faulty, tokens(("still", point), 600))
    clear_cache(p)
    prompt = history + tokens("more", 20)
    before = lost(p, "timeout")
    with points.stop_at(point), in_background(prefill, p, prompt, kept) as leg:
        points.wait_until_reached(point)
        with standing_still(d):
            begun = time.monotonic()
            points.let_go(point)
            handed = leg.result()
            assert time.monotonic() - begun < TIMEOUT_S + 10
            check_right(p, prompt, compared)
    assert lost(p, "timeout") - before == 1
    said, _ = decode(d, prompt, handed)
    compare(IDS, d, prompt, {"choices": [{"token_ids": said}]}, True, compared)
    rests(p)
    rests(d)
    # P does not ask it for a while, and the next test would not be read back.
    time.sleep(SILENCE_S + 1)


def test_a_read_that_never_ends_is_given_up(
    faulty: Cluster, points: FaultPoints, compared: Compared
) -> None:
    """Its blocks are nobody's until NIXL says that it has ended."""
    p = faulty.prefill[0]
    history, kept = turn(faulty, tokens("endless", 600))
    rests(p)
    clear_cache(p)
    prompt = history + tokens("more", 20)
    before = lost(p, "timeout")
    with points.stop_at("reading"):
        handed = prefill(p, prompt, kept)
        assert lost(p, "timeout") - before == 1
        said, _ = decode(faulty.decode[0], prompt, handed)
        compare(IDS, p, prompt, {"choices": [{"token_ids": said}]}, True, compared)
        time.sleep(TTL_S + 1)
        assert used(p) > 0, "NIXL may still write into the READ's blocks"
    rests(p)
    check_right(p, prompt, compared)


def test_the_logs_hold_no_traceback_of_ours(faulty: Cluster) -> None:
    """What these faults leave in the logs is one line each, or the base's word about a transfer."""
    for engine in faulty.engines:
        text = engine.log_path.read_text(encoding="utf-8", errors="replace")
        assert "AssertionError" not in text, engine.log_path
        assert "EngineDeadError" not in text, engine.log_path
    assert ask(faulty.decode[0], IDS, tokens("end", 30))["choices"]
