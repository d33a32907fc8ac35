"""When a node is given turns, by its checks and by how its turns end."""

from __future__ import annotations

import pytest
from vllm.bidir.router.nodes.health import Health, HealthRules


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(HealthRules(eject_after=3, eject_s=1.0, slow_start_s=10.0), clock)


def test_a_node_is_used_before_its_first_check(health: Health, clock: Clock) -> None:
    assert health.usable(clock.now) and health.state(clock.now) == "unknown"
    assert health.checked(True) and not health.checked(True)
    assert health.state(clock.now) == "up" and health.share(clock.now) == 1.0


def test_one_that_has_never_been_up_is_down_at_its_first_failed_check(
    health: Health, clock: Clock
) -> None:
    assert health.checked(False)
    assert not health.usable(clock.now) and health.state(clock.now) == "down"


def test_one_that_is_up_may_miss_one_check(health: Health, clock: Clock) -> None:
    health.checked(True)
    for _ in range(3):
        assert not health.checked(False)
        assert not health.checked(True)
    assert not health.checked(False)
    assert health.checked(False)
    assert not health.usable(clock.now)


def test_failures_in_a_row_eject_and_others_do_not(health: Health, clock: Clock) -> None:
    for failed in (True, True, False, True, True):
        if failed:
            assert not health.turn_failed()
        else:
            health.turn_succeeded()
    assert health.usable(clock.now)
    assert health.turn_failed()
    assert not health.usable(clock.now) and health.state(clock.now) == "ejected"
    clock.now += 1.0
    assert health.usable(clock.now)


def test_each_further_failure_ejects_for_twice_as_long_up_to_a_minute(
    health: Health, clock: Clock
) -> None:
    for _ in range(2):
        health.turn_failed()
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        assert health.turn_failed()
        # What was under way when it was ejected says nothing new.
        assert not health.turn_failed()
        assert not health.usable(clock.now + seconds - 0.001)
        clock.now += seconds
        assert health.usable(clock.now)


def test_an_ejection_is_forgiven_after_as_long_a_time_that_was_good(
    health: Health, clock: Clock
) -> None:
    for _ in range(3):
        health.turn_failed()
    clock.now += 1.5
    health.turn_succeeded()
    assert health.turn_failed()
    clock.now += 4.0
    health.turn_succeeded()
    assert not health.turn_failed()


def test_what_comes_back_has_its_full_share_little_by_little(health: Health, clock: Clock) -> None:
    health.checked(False)
    health.checked(True)
    assert health.share(clock.now) == 0.1
    clock.now += 5.0
    assert health.share(clock.now) == 0.5
    clock.now += 5.0
    assert health.share(clock.now) == 1.0
    for _ in range(3):
        health.turn_failed()
    assert health.share(clock.now + 6.0) == 0.5


def test_a_restart_clears_what_was_before(health: Health, clock: Clock) -> None:
    for _ in range(3):
        health.turn_failed()
    health.checked(False)
    health.checked(True)
    assert health.usable(clock.now)
    assert not health.turn_failed()


def test_ejection_can_be_switched_off(clock: Clock) -> None:
    health = Health(HealthRules(eject_after=0), clock)
    assert not any(health.turn_failed() for _ in range(99))
