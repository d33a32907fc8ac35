"""An engine at rest steps when something may have changed, and not more often."""

from __future__ import annotations

from vllm.bidir.connector.rest import WATCH_S, Rest


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_with_nothing_kept_it_sleeps_until_it_is_asked() -> None:
    rest = Rest([], Clock())
    assert rest.seconds_left() is None
    assert not rest.is_due()


def test_a_turn_needs_no_step_before_its_time_is_over() -> None:
    clock = Clock()
    rest = Rest([], clock)
    rest.begin("turn", due=1480.0, interval_s=48.0)
    rest.stepped()
    assert rest.seconds_left() == 480.0
    clock.now = 1480.0
    assert rest.is_due()
    rest.stepped()
    assert rest.seconds_left() == 48.0, "not at once again"
    rest.end("turn")
    assert rest.seconds_left() is None


def test_what_ends_one_after_the_other_is_looked_after_together() -> None:
    clock = Clock()
    rest = Rest([], clock)
    for number in range(10):
        rest.begin(str(number), due=1480.0 + number, interval_s=48.0)
    clock.now = 1480.0
    rest.stepped()
    rest.end("0")
    assert rest.seconds_left() == 48.0


def test_a_reader_may_be_done_at_any_time() -> None:
    clock = Clock()
    rest = Rest([], clock)
    rest.stepped()
    rest.begin("handover", due=0.0, interval_s=3.0)
    rest.begin("turn", due=1480.0, interval_s=48.0)
    assert rest.seconds_left() == 3.0
    clock.now = 1003.0
    assert rest.is_due()


def test_reads_that_were_given_up_are_watched() -> None:
    given_up = ["r"]
    rest = Rest(given_up, Clock())
    rest.stepped()
    assert rest.seconds_left() == WATCH_S
    given_up.clear()
    assert rest.seconds_left() is None
