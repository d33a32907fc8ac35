"""Conversations are remembered in bounded number and age, and apart by tenant."""

from __future__ import annotations

from typing import Any

from vllm.bidir.reasons import Reason
from vllm.bidir.router.conversations.conversations import Bounds, Conversations, conversation_key
from vllm.bidir.router.conversations.leases import Ended, Leases
from vllm.bidir.router.conversations.record import KeptTurn
from vllm.bidir.router.nodes.params import as_offered
from vllm.bidir.router.telemetry.metrics import Metrics

from tests.router.fake_leases import lease_id


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def leases() -> Leases:
    return Leases(Metrics())


def bounds(conversations: int, params: int = 1 << 20) -> Bounds:
    return Bounds(conversations, params, ttl=5.0, idle_timeout=9.0)


def leased(number: int) -> dict[str, Any]:
    return {"lease_id": lease_id(number), "lease_duration": 9.0}


def test_an_entry_ends_with_its_time() -> None:
    clock = Clock()
    kept = Conversations(bounds(10), leases(), clock)
    kept.put(b"a", {"x": 1}, "node")
    clock.now = 4.9
    found = kept.get(b"a")
    assert isinstance(found, KeptTurn) and found.encoded == as_offered({"x": 1})
    assert (found.node, found.expires, found.lease_id) == ("node", 5.0, None)
    clock.now = 5.0
    assert kept.get(b"a") is Reason.EXPIRED
    assert kept.get(b"a") is Reason.FIRST_TURN
    assert len(kept) == 0


def test_the_least_recently_used_goes_first() -> None:
    kept = Conversations(bounds(2), leases(), Clock())
    kept.put(b"a", {}, "n")
    kept.put(b"b", {}, "n")
    kept.get(b"a")
    kept.put(b"c", {}, "n")
    assert isinstance(kept.get(b"a"), KeptTurn)
    assert kept.get(b"b") is Reason.FIRST_TURN


def test_a_turn_that_left_nothing_leaves_the_earlier_one() -> None:
    kept = Conversations(bounds(2), leases(), Clock())
    kept.put_nothing(b"a", Reason.NO_PARAMS)
    assert kept.get(b"a") is Reason.NO_PARAMS
    kept.put(b"a", {"turn": 2}, "n")
    kept.put_nothing(b"a", Reason.NO_PARAMS)
    assert isinstance(kept.get(b"a"), KeptTurn)
    kept.put_nothing(b"b", Reason.NO_PARAMS)
    kept.put_nothing(b"c", Reason.NO_PARAMS)
    assert len(kept) == 2 and kept.get(b"a") is Reason.FIRST_TURN


def test_the_latest_reason_counts() -> None:
    kept = Conversations(bounds(2), leases(), Clock())
    for reason in (Reason.NO_PARAMS, Reason.BUDGET):
        kept.put_nothing(b"a", reason)
    assert kept.get(b"a") is Reason.BUDGET


def test_a_turn_with_a_lease_lives_until_its_conversation_is_idle() -> None:
    clock, held = Clock(), leases()
    kept = Conversations(bounds(9), held, clock)
    kept.put(b"a", leased(1), "n")
    kept.put(b"b", leased(2), "n")
    clock.now = 8.0
    assert isinstance(kept.get(b"a"), KeptTurn)
    clock.now = 9.0
    kept.end_idle("node")
    assert len(held) == 2
    kept.end_idle("n")
    assert isinstance(kept.get(b"a"), KeptTurn) and kept.get(b"b") is Reason.EXPIRED
    assert list(held.of("n").take_ended()) == [lease_id(2)]


def test_a_conversation_is_not_idle_while_a_turn_is_under_way() -> None:
    clock, held = Clock(), leases()
    kept = Conversations(bounds(9), held, clock)
    kept.put(b"a", leased(1), "n")
    kept.begins(b"a", "turn")
    clock.now = 20.0
    kept.end_idle("n")
    assert len(held) == 1
    kept.ends(b"a", "turn")
    clock.now = 28.0
    kept.end_idle("n")
    assert len(held) == 1
    clock.now = 29.0
    kept.end_idle("n")
    assert len(held) == 0


def test_who_evicts_a_turn_gives_its_lease_back() -> None:
    held = leases()
    kept = Conversations(bounds(1), held, Clock())
    kept.put(b"a", leased(1), "n")
    kept.put(b"b", leased(2), "node")
    assert list(held.of("n").take_ended()) == [lease_id(1)] and len(held) == 1


def test_a_turn_of_a_conversation_that_was_forgotten_has_none() -> None:
    """A new turn of the same name has: it begins another conversation."""
    kept = Conversations(bounds(9), leases(), Clock())
    kept.begins(b"a", "old")
    assert kept.forget(b"a", Ended.DELETED) and not kept.forget(b"a", Ended.DELETED)
    assert not kept.goes_on(b"a", "old")
    kept.begins(b"a", "new")
    assert kept.goes_on(b"a", "new") and not kept.goes_on(b"a", "old")
    kept.ends(b"a", "new")
    kept.ends(b"a", "old")
    assert not kept.forget(b"a", Ended.DELETED)


def test_two_conversations_that_name_one_lease_do_not_disturb_each_other() -> None:
    """D makes each name once. What the second loses with the first is computed."""
    held = leases()
    kept = Conversations(bounds(9), held, Clock())
    for key in (b"a", b"b"):
        kept.put(key, leased(1), "n")
    assert kept.forget(b"b", Ended.DELETED)
    assert list(held.of("n").take_ended()) == [lease_id(1)]
    assert len(held) == 1 and isinstance(kept.get(b"a"), KeptTurn)
    assert kept.lost(b"a", lease_id(1)) and kept.get(b"a") is Reason.EXPIRED
    assert len(held) == 0


def test_a_turn_that_is_told_of_twice_keeps_its_lease() -> None:
    held = leases()
    kept = Conversations(bounds(9), held, Clock())
    for _ in range(2):
        kept.put(b"a", leased(1), "n")
    assert len(held) == 1 and not held.of("n").ended
    kept.put(b"a", {}, "n")
    assert len(held) == 0 and list(held.of("n").take_ended()) == [lease_id(1)]


def test_keys_of_different_tenants_never_meet() -> None:
    keys = {
        conversation_key(*pair) for pair in (("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", ""))
    }
    assert len(keys) == 4
