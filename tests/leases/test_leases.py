"""D keeps what a conversation needs and gives back the rest, whatever becomes of routers."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.oracle import IDS, MAX_TOKENS, Compared, compare
from tests.e2e.turns import http, metric, tokens, wait_until
from tests.leases.conftest import LEASE_S, Route
from tests.leases.turns import AUTHORIZED, leases, reads, say
from tools.cluster import Cluster, Engine

# A lease that is over is found within a tenth of it; the rest is for a slow machine.
TICK_S = LEASE_S / 10 + 2.0
# Conversations of two blocks each; the budget takes 28.
COUNT = 12


@pytest.fixture(autouse=True)
def nothing_is_left(leased: Cluster) -> None:
    """What a test before has left runs out first."""
    wait_until(lambda: leases(leased.decode[0])["leases"] == 0, 2 * LEASE_S, "leases are left")


def test_a_conversation_is_read_back_long_after_its_first_lease(
    leased: Cluster, route: Route, compared: Compared
) -> None:
    d = leased.decode[0]
    before = leases(d)
    with route() as router:
        history = say(router, tokens(500, 1), "long")
        assert leases(d)["leases"] == 1
        time.sleep(2 * LEASE_S)
        after = leases(d)
        assert after["leases"] == 1 and after["renewals"] - before["renewals"] >= 4
        assert metric(router, "bidir_router_leases") == 1
        assert metric(d, "vllm:bidir_leases") == 1, "though D has had no step"
        read = reads(leased)
        prompt = history + tokens(30, 2)
        said = say(router, prompt, "long")
        assert reads(leased) - read == 1
        wait_until(lambda: leases(d)["leases"] == 1, 5, "the turn before is not given back")
    answer = {"choices": [{"token_ids": said[len(prompt) :][:MAX_TOKENS]}]}
    compare(IDS, leased.prefill[0], prompt, answer, True, compared)


def test_a_call_without_the_key_is_refused(leased: Cluster) -> None:
    d = leased.decode[0]
    with http() as client:
        assert client.get(f"{d.url}/v1/kv_leases").status_code == 401
        for call in ("renew", "release"):
            refused = client.post(f"{d.url}/v1/kv_leases/{call}", json={"lease_ids": []})
            assert refused.status_code == 401


def test_deleting_a_conversation_gives_its_blocks_back(leased: Cluster, route: Route) -> None:
    d = leased.decode[0]
    with route() as router, http() as client:
        say(router, tokens(500, 3), "short")
        say(router, tokens(500, 4), "other")
        assert leases(d)["leases"] == 2
        gone = client.delete(f"{router.url}/conversations/short", headers=AUTHORIZED)
        assert gone.status_code == 204
        wait_until(lambda: leases(d)["leases"] == 1, 3, "D keeps what was deleted")
        # Whoever does not send the conversation's own credentials does not find it.
        assert client.delete(f"{router.url}/conversations/other").status_code == 404
        time.sleep(1)
        assert leases(d)["leases"] == 1


def test_d_frees_by_itself_when_a_router_is_killed(leased: Cluster, route: Route) -> None:
    d = leased.decode[0]
    with route() as router:
        for number in range(COUNT):
            say(router, tokens(130, 100 + number), f"c{number}", max_tokens=4)
        kept = leases(d)
        assert (kept["leases"], kept["blocks"]) == (COUNT, 2 * COUNT)
        pid = router.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        time.sleep(LEASE_S / 2)
        assert leases(d)["leases"] > 0, "they last as long as they were given"
        # Renewed at most an instant before the router died.
        end = killed + LEASE_S + TICK_S
        wait_until(lambda: leases(d)["leases"] == 0, end - time.monotonic(), "leases outlive it")
        after = leases(d)
        assert after["blocks"] == 0 and after["holds"] == 0
        assert metric(d, "vllm:bidir_leases") == 0
        # All blocks can be had: nothing waits for what requests need that fill the cache.
        preempted = metric(d, "vllm:num_preemptions_total")
        _together(d, [tokens(1800, 50 + number) for number in range(3)])
        assert metric(d, "vllm:num_preemptions_total") == preempted
        assert metric(d, "vllm:kv_cache_usage_perc") == pytest.approx(0.0, abs=0.01)


def test_load_takes_the_blocks_of_idle_conversations(leased: Cluster, route: Route) -> None:
    """Oldest first; who comes back then is computed, and answered."""
    d = leased.decode[0]
    before = leases(d)
    with route() as router:
        histories = [say(router, tokens(500, 200 + n), f"idle{n}") for n in range(5)]
        assert leases(d)["blocks"] >= 5 * 4
        preempted = metric(d, "vllm:num_preemptions_total")
        bodies = [tokens(1700, 300 + n) for n in range(3)]
        for body in bodies:
            say(d, body, max_tokens=8)
        assert leases(d)["reclaimed"] == before["reclaimed"]
        # One at a time they fit beside the leases. Together they do not.
        _together(d, bodies)
        after = leases(d)
        assert after["reclaimed"] > before["reclaimed"]
        assert metric(d, "vllm:num_preemptions_total") == preempted
        read = reads(leased)
        for number, history in enumerate(histories):
            say(router, history + tokens(20, 400 + number), f"idle{number}")
        assert reads(leased) - read < 5, "some were given up"


def _together(d: Engine, bodies: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(bodies)) as pool:
        list(pool.map(lambda body: say(d, body, max_tokens=60), bodies))


def test_a_turn_beyond_the_budget_is_answered_and_counted(leased: Cluster, route: Route) -> None:
    d = leased.decode[0]
    budget = leases(d)["budget_blocks"]
    with route() as router:
        histories = []
        for number in range(budget // 8 + 1):
            histories.append(say(router, tokens(1000, 500 + number), f"full{number}"))
        assert leases(d)["refused"] >= 1
        assert leases(d)["blocks"] <= budget
        say(router, histories[-1] + tokens(5, 600), f"full{len(histories) - 1}")
        turns = {"outcome": "miss", "reason": "budget"}
        assert metric(router, "bidir_router_turns_total", **turns) == 1


def test_what_d_answers_is_right_after_all_this(leased: Cluster, compared: Compared) -> None:
    """Blocks that leases have let go hold nothing that a later prompt could trip over."""
    d, prompt = leased.decode[0], tokens(700, 7)
    for _ in range(2):  # computed, and out of D's prefix cache
        said = say(d, prompt, max_tokens=MAX_TOKENS)
        answer = {"choices": [{"token_ids": said[len(prompt) :]}]}
        compare(IDS, leased.prefill[0], prompt, answer, True, compared)
