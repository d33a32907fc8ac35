"""Conversations are remembered in bounded number and age, and apart by tenant."""

from __future__ import annotations

from vllm.bidir.reasons import Reason
from vllm.bidir.router.conversations import Conversations, KeptTurn, conversation_key


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_entry_ends_with_its_time() -> None:
    clock = Clock()
    kept = Conversations(10, 5.0, clock)
    kept.put(b"a", {"x": 1}, "node")
    clock.now = 4.9
    assert kept.get(b"a") == KeptTurn(b'{"x":1}', "node", 5.0)
    clock.now = 5.0
    assert kept.get(b"a") is Reason.EXPIRED
    assert kept.get(b"a") is Reason.FIRST_TURN
    assert len(kept) == 0


def test_the_least_recently_used_goes_first() -> None:
    kept = Conversations(2, 5.0, Clock())
    kept.put(b"a", {}, "n")
    kept.put(b"b", {}, "n")
    kept.get(b"a")
    kept.put(b"c", {}, "n")
    assert isinstance(kept.get(b"a"), KeptTurn)
    assert kept.get(b"b") is Reason.FIRST_TURN


def test_a_turn_that_left_nothing_leaves_the_earlier_one() -> None:
    kept = Conversations(2, 5.0, Clock())
    kept.put_nothing(b"a", Reason.NO_PARAMS)
    assert kept.get(b"a") is Reason.NO_PARAMS
    kept.put(b"a", {"turn": 2}, "n")
    kept.put_nothing(b"a", Reason.NO_PARAMS)
    assert isinstance(kept.get(b"a"), KeptTurn)
    kept.put_nothing(b"b", Reason.NO_PARAMS)
    kept.put_nothing(b"c", Reason.NO_PARAMS)
    assert len(kept) == 2 and kept.get(b"a") is Reason.FIRST_TURN


def test_keys_of_different_tenants_never_meet() -> None:
    keys = {
        conversation_key(*pair) for pair in (("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", ""))
    }
    assert len(keys) == 4
