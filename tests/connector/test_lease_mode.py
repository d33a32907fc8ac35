"""A decode engine that keeps turns by lease: the scheduler alone says when blocks go, and why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm.bidir.connector.hooks import idle_seconds, kv_leases, select_connector, weights_changed
from vllm.bidir.connector.messages import ask_confirm, ask_hold, read_confirm, read_hold
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineShutdownState

from tests.connector.histories import D_TURN
from tests.connector.memory import BLOCK
from tests.connector.sim import STOP, Engine
from tests.connector.test_pause import Core
from tests.connector.test_simulated import finished_turn

LEASE_S, MOST_S, HOLD_S = 10.0, 100.0, 30.0
EXTRA = {
    "decoder_kv_lease_duration": LEASE_S,
    "decoder_kv_blocks_ttl": MOST_S,
    "decoder_kv_hold_duration": HOLD_S,
}


class Leased(Engine):
    """A D in lease mode, whose leases go by `now`."""

    def __init__(self, model: Path, blocks: int = 400, budget: float = 0.5, **options: Any) -> None:
        extra = {**EXTRA, "decoder_kv_lease_budget": budget}
        super().__init__(model, "d", blocks, extra=extra, **options)
        self.now = 1000.0
        leases = self.bidir.kept._leases
        assert leases is not None
        leases._clock = lambda: self.now

    def turn(self, first: int, blocks: int) -> dict[str, Any]:
        """A turn of its own content that keeps so many blocks."""
        tokens = list(range(first, first + blocks * BLOCK - 4))
        params, _ = finished_turn(self, tokens, [first + 1, first + 2, first + 3])
        assert isinstance(params, dict)
        return params

    def call(self, word: str, *lease_ids: str) -> dict[str, Any]:
        return kv_leases(self.scheduler, word, list(lease_ids))

    def hold(self, lease_id: str) -> Any:
        return read_hold(self.side_channel.answer(ask_hold(lease_id))[0])

    def confirm(self, lease_id: str, epoch: int) -> bool:
        return read_confirm(self.side_channel.answer(ask_confirm(lease_id, epoch))[0])


@pytest.fixture
def d(model: Path) -> Leased:
    return Leased(model)


def test_a_turn_is_kept_as_long_as_it_is_renewed_and_no_longer(d: Leased) -> None:
    free = d.free_blocks
    params = d.turn(0, 10)
    lease = params["lease_id"]
    assert params["lease_duration"] == LEASE_S, "a router sees that it has to renew"
    d.step()
    assert d.free_blocks == free - 10
    for _ in range(9):
        d.now += LEASE_S - 1
        d.step()
        assert d.call("renew", lease)["renewed"] == {
            lease: pytest.approx(min(LEASE_S, MOST_S + 1000.0 - d.now))
        }
    d.now += LEASE_S - 1
    d.step()
    assert d.free_blocks == free - 10
    d.now += 2
    d.step()
    assert d.free_blocks == free and not d.scheduler.requests
    assert d.call("renew", lease)["lost"] == [lease]
    assert d.hold(lease) is None
    assert d.call("totals")["totals"]["expired"] == 1


def test_renewing_for_ever_keeps_it_for_the_longest_time_only(d: Leased) -> None:
    lease = d.turn(0, 10)["lease_id"]
    end = d.now + MOST_S
    while d.now < end - 1:
        assert d.call("renew", lease)["renewed"]
        d.now += 1
        d.step()
    d.now = end
    d.step()
    assert d.call("renew", lease)["lost"] and not d.scheduler.requests


def test_an_idle_engine_rests_until_a_lease_is_over(d: Leased) -> None:
    d.turn(0, 10)
    d.step()
    assert not d.scheduler.has_requests(), "keeping is no work"
    left = idle_seconds(d.scheduler)
    assert left == pytest.approx(LEASE_S)
    d.now += LEASE_S
    assert d.scheduler.has_requests(), "its time is over"
    d.step()
    assert not d.scheduler.requests and idle_seconds(d.scheduler) is None


def test_workers_hear_nothing_of_a_leased_turns_time(d: Leased) -> None:
    """They would free by a deadline of their own, each rank by its own clock."""
    d.turn(0, 10)
    assert not d.bidir._reqs_need_send
    meta = d.bidir.build_connector_meta(d.scheduler.schedule())
    assert not meta.reqs_to_send


def test_a_reader_is_never_cut_off(d: Leased) -> None:
    free = d.free_blocks
    lease = d.turn(0, 10)["lease_id"]
    d.step()
    held = d.hold(lease)
    d.now += LEASE_S + 5
    d.step()
    assert d.free_blocks == free - 10, "its lease is over, but somebody reads"
    assert d.hold(lease) is None, "who comes now is late"
    assert d.call("release", lease)["released"] == [lease]
    assert d.free_blocks == free - 10
    assert d.confirm(lease, held.epoch)
    d.step()
    assert d.free_blocks == free
    assert not d.confirm(lease, held.epoch)


def test_a_reader_that_never_ends_is_waited_for_so_long(d: Leased) -> None:
    free = d.free_blocks
    lease = d.turn(0, 10)["lease_id"]
    d.step()
    held = d.hold(lease)
    d.now += HOLD_S
    d.step()
    assert d.free_blocks == free and not d.confirm(lease, held.epoch)


def test_an_idle_engine_looks_after_a_reader_at_every_tick(d: Leased) -> None:
    """A reader that is done wakes nobody."""
    lease = d.turn(0, 10)["lease_id"]
    d.step()
    held = d.hold(lease)
    d.now += LEASE_S
    d.step()
    left = idle_seconds(d.scheduler)
    assert left is not None and 0 < left <= LEASE_S / 10
    assert not d.scheduler.has_requests(), "looking is not stepping"
    assert d.confirm(lease, held.epoch)
    d.now += left
    assert d.scheduler.has_requests()
    d.step()
    assert not d.scheduler.requests


def test_a_reader_that_asks_nobody_is_told_not_to_read(d: Leased) -> None:
    """A stock P takes an expiry to come for a promise, and sends no HOLD."""
    assert d.turn(0, 10)["remote_blocks_expiry_time"] <= 0.0


def test_a_lease_that_only_a_reader_pins_is_shown_to_nobody(d: Leased) -> None:
    lease = d.turn(0, 10)["lease_id"]
    d.step()
    assert d.hold(lease)
    d.call("release", lease)
    assert d.call("renew", lease)["lost"] == [lease]
    assert d.call("read", lease)["params"] is None


def test_release_gives_blocks_back_at_once(d: Leased) -> None:
    free = d.free_blocks
    one, other = d.turn(0, 10)["lease_id"], d.turn(5000, 10)["lease_id"]
    d.step()
    answer = d.call("release", one, "d0-unknown", one)
    assert answer["released"] == [one] and answer["lost"] == ["d0-unknown"]
    assert d.free_blocks == free - 10, "without a step: an engine at rest has none"
    assert d.call("read", one)["params"] is None
    assert d.call("read", other)["params"]["lease_id"] == other
    assert answer["totals"]["leases"] == 1 and answer["totals"]["released"] == 1


def test_a_turn_beyond_the_budget_is_refused_with_the_reason(model: Path) -> None:
    d = Leased(model, blocks=101, budget=0.25)
    free = d.free_blocks
    first = d.turn(0, 15)
    refused = d.turn(5000, 15)
    assert refused == {"reason": "budget"}
    d.step()
    assert d.free_blocks == free - 15, "nothing of it is pinned"
    totals = d.call("totals")["totals"]
    assert totals["refused"] == 1 and totals["blocks"] == 15 and totals["budget_blocks"] == 25
    # It comes back and finds its content in the ordinary prefix cache.
    request = d.add(list(range(5000, 5000 + 15 * BLOCK - 4)), None)
    _, cached, *_ = d.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert cached == 14 * BLOCK
    assert d.call("read", first["lease_id"])["params"] == first


def test_leases_end_before_anything_is_preempted(model: Path) -> None:
    """The oldest first, and none that somebody reads."""
    d = Leased(model, blocks=61, budget=1.0)
    read, oldest, youngest = (d.turn(5000 * n, 10)["lease_id"] for n in range(3))
    d.step()
    assert d.hold(read) is not None
    running = d.add(list(range(20000, 20000 + 28 * BLOCK)), None, max_tokens=4 * BLOCK)
    while not running.is_finished():
        assert d.step()
    assert running.num_preemptions == 0
    assert d.call("read", read)["params"] and d.call("read", youngest)["params"]
    assert d.call("read", oldest)["params"] is None
    assert d.call("totals")["totals"]["reclaimed"] == 1
    assert d.call("renew", oldest)["lost"] == [oldest] and d.hold(oldest) is None


def test_a_waiting_request_is_let_in_as_long_as_leases_can_make_room(model: Path) -> None:
    d = Leased(model, blocks=61, budget=1.0)
    for number in range(5):
        d.turn(5000 * number, 10)
    d.step()
    assert d.free_blocks == 10
    waiting = d.add(list(range(30000, 30000 + 35 * BLOCK)), None, max_tokens=2)
    d.step()
    assert waiting.num_computed_tokens > 0, "in the same step"
    totals = d.call("totals")["totals"]
    assert totals["reclaimed"] == 3, "no more than it needs"


def test_no_lease_ends_for_a_request_that_would_have_to_wait_all_the_same(model: Path) -> None:
    d = Leased(model, blocks=101)
    for number in range(4):
        d.turn(5000 * number, 10)
    d.step()
    d.add(list(range(30000, 30000 + 50 * BLOCK)), None, max_tokens=200)
    for _ in range(5):
        d.step()
    waiting = d.add(list(range(40000, 40000 + 60 * BLOCK)), None, max_tokens=2)
    d.step()
    assert waiting.num_computed_tokens == 0
    assert d.call("totals")["totals"]["leases"] == 4


def test_a_request_that_may_begin_with_a_part_gets_room_for_that(model: Path) -> None:
    d = Leased(model, blocks=101)
    d.scheduler.scheduler_reserve_full_isl = False
    for number in range(4):
        d.turn(5000 * number, 10)
    d.step()
    d.add(list(range(30000, 30000 + 50 * BLOCK)), None, max_tokens=200)
    for _ in range(5):
        d.step()
    waiting = d.add(list(range(40000, 40000 + 60 * BLOCK)), None, max_tokens=2)
    d.step()
    assert 0 < waiting.num_computed_tokens < 60 * BLOCK
    assert d.call("totals")["totals"]["leases"] < 4


def test_blocks_that_come_back_with_the_step_in_flight_are_waited_for(model: Path) -> None:
    """Ending such a lease frees nothing yet; the next ones must not be ended for that."""
    d = Leased(model, blocks=61, budget=1.0, async_scheduling=True)
    turns = [
        d.add(list(range(first, first + 10 * BLOCK - 6)), D_TURN, max_tokens=30, answer=[1, STOP])
        for first in (0, 5000, 10000)
    ]
    while not all(turn.is_finished() for turn in turns):
        d.step()
    assert d.in_flight, "a step was scheduled before the stop token was known"
    missing = d.add(list(range(40000, 40000 + (d.free_blocks + 5) * BLOCK)), None, max_tokens=2)
    for _ in range(3):
        d.step()
    assert missing.num_computed_tokens > 0
    assert d.call("totals")["totals"]["reclaimed"] == 1


def test_without_leases_a_full_cache_makes_it_wait(model: Path) -> None:
    """What the two tests above would show without the patch."""
    d = Engine(model, "d", 61)
    for number in range(5):
        finished_turn(d, list(range(5000 * number, 5000 * number + 10 * BLOCK - 4)), [1, 2, 3])
    waiting = d.add(list(range(30000, 30000 + 35 * BLOCK)), None, max_tokens=2)
    d.step()
    assert waiting.num_computed_tokens == 0


@pytest.mark.parametrize("way", ["reset", "pause", "weights"])
def test_what_changes_content_ends_all_leases_first(d: Leased, way: str) -> None:
    free = d.free_blocks
    lease = d.turn(0, 10)["lease_id"]
    d.step()
    held = d.hold(lease)
    if way == "reset":
        assert d.scheduler.reset_prefix_cache()
    elif way == "pause":
        d.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    else:
        weights_changed(d.scheduler, "two")
    assert d.free_blocks == free and not d.scheduler.requests
    assert not d.confirm(lease, held.epoch), "its reader computes"
    assert d.call("renew", lease)["lost"] == [lease]


def test_a_pause_does_not_wait_for_what_finishes_meanwhile(d: Leased) -> None:
    """A router that goes on renewing would keep it from ever being complete."""
    core = Core(d)
    d.add(list(range(500, 600)), D_TURN, max_tokens=3)
    d.step()
    paused = core.pause_scheduler("wait", True)
    assert paused is not None
    for _ in range(30):
        core.turn()
        d.call("renew", *d.bidir.kept._turns)
        if paused.done():
            break
    assert paused.done() and not d.scheduler.requests


def test_a_drain_does_not_wait_for_what_finishes_meanwhile(d: Leased) -> None:
    core = Core(d)
    d.add(list(range(500, 600)), D_TURN, max_tokens=3)
    d.step()
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert not all(core.turn() for _ in range(30))


def test_a_fixed_time_is_not_renewed_but_may_be_given_back(model: Path) -> None:
    d = Engine(model, "d")
    free = d.free_blocks
    params, request_id = finished_turn(d, list(range(100)), [1] * 10)
    d.step()
    assert "lease_duration" not in params
    lease = params["lease_id"]
    answer = kv_leases(d.scheduler, "renew", [lease])
    assert answer["renewed"] == {} and answer["lost"] == [lease]
    assert answer["totals"]["mode"] == "fixed" and answer["totals"]["leases"] == 1
    assert kv_leases(d.scheduler, "read", [lease])["params"]["lease_id"] == lease
    assert kv_leases(d.scheduler, "release", [lease])["released"] == [lease]
    assert d.free_blocks == free
    # The workers let go later, and their word frees nothing twice.
    d.expire(request_id)
    assert d.free_blocks == free and not d.scheduler.requests


def test_an_engine_without_our_connector_has_lost_all(d: Leased) -> None:
    class Other:
        connector = None

    assert kv_leases(Other(), "renew", ["d0-a"]) == {
        "renewed": {}, "lost": ["d0-a"], "totals": None
    }  # fmt: skip


def test_what_changes_is_told_with_the_next_statistics(d: Leased) -> None:
    one, _ = d.turn(0, 10)["lease_id"], d.turn(5000, 12)
    d.connector.get_kv_connector_stats()  # of the steps so far
    answer = d.call("release", one)
    stats = d.connector.get_kv_connector_stats()
    assert stats is not None and stats.data["leases"] == [answer["totals"]]
    assert answer["totals"]["leases"] == 1 and answer["totals"]["blocks"] == 12
    assert answer["totals"]["total_blocks"] == 400
    assert d.connector.get_kv_connector_stats() is None, "said once"


def test_beside_other_connectors_leases_are_refused_at_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    child = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"bidirectional_kv_xfer": True, **EXTRA},
    }
    config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [child]},
    )
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="only KV connector"):
        select_connector(object, config)
