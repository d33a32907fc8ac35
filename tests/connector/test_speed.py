"""What P's own prefill achieves, by length: what a READ has to beat."""

from __future__ import annotations

import pytest
from vllm.bidir.connector.speed import LEAST_TOKENS, SAMPLES, PrefillSpeed


def computed(speed: PrefillSpeed, tokens: int, seconds: float) -> None:
    speed.began("r", tokens, 100.0)
    speed.ended("r", 100.0 + seconds)


def test_nothing_is_known_before_a_prompt_was_computed() -> None:
    speed = PrefillSpeed()
    speed.began("r", 1000, 0.0)
    assert speed.seconds(1000) is None


def test_a_prompt_takes_as_long_as_one_of_its_length() -> None:
    speed = PrefillSpeed()
    computed(speed, 100, 0.1)
    computed(speed, 10_000, 1.0)
    assert speed.seconds(127) == pytest.approx(0.127)
    assert speed.seconds(9000) == pytest.approx(0.9)


def test_a_power_of_two_is_as_the_longer_ones() -> None:
    speed = PrefillSpeed()
    computed(speed, 1023, 10.23)
    computed(speed, 1024, 1.024)
    assert speed.seconds(1023) == pytest.approx(10.23)
    assert speed.seconds(1024) == pytest.approx(1.024)
    assert speed.seconds(2047) == pytest.approx(2.047)


def test_a_prompt_that_waited_makes_nothing_slower() -> None:
    speed = PrefillSpeed()
    computed(speed, 1000, 1.0)
    computed(speed, 1000, 8.0)
    assert speed.seconds(1000) == pytest.approx(1.0)
    computed(speed, 1000, 0.5)
    assert speed.seconds(1000) == pytest.approx(0.5)


def test_a_machine_that_became_slower_is_noticed() -> None:
    speed = PrefillSpeed()
    computed(speed, 1000, 1.0)
    for _ in range(SAMPLES - 1):
        computed(speed, 1000, 8.0)
    assert speed.seconds(1000) == pytest.approx(1.0)
    computed(speed, 1000, 8.0)
    assert speed.seconds(1000) == pytest.approx(8.0)


def test_other_lengths_do_not_push_a_best_out() -> None:
    speed = PrefillSpeed()
    computed(speed, 1000, 1.0)
    for _ in range(SAMPLES):
        computed(speed, 4000, 32.0)
    assert speed.seconds(1000) == pytest.approx(1.0)


def test_the_nearest_length_stands_in_for_one_that_was_not_seen() -> None:
    speed = PrefillSpeed()
    computed(speed, 128, 1.28)
    computed(speed, 8192, 8.192)
    assert speed.seconds(256) == pytest.approx(2.56)
    assert speed.seconds(4096) == pytest.approx(4.096)
    assert speed.seconds(100_000) == pytest.approx(100.0)
    assert speed.seconds(10) == pytest.approx(0.1)


@pytest.mark.parametrize("order", [(256, 1024), (1024, 256)])
def test_of_two_that_are_equally_near_the_longer_stands_in(order: tuple[int, int]) -> None:
    speed = PrefillSpeed()
    for tokens in order:
        computed(speed, tokens, tokens / (100 if tokens == 256 else 1000))
    assert speed.seconds(512) == pytest.approx(0.512)


def test_short_prompts_say_nothing() -> None:
    speed = PrefillSpeed()
    computed(speed, LEAST_TOKENS - 1, 1.0)
    assert speed.seconds(1000) is None
    computed(speed, LEAST_TOKENS, 1.0)
    assert speed.seconds(LEAST_TOKENS) == pytest.approx(1.0)


def test_a_prompt_that_was_dropped_says_nothing() -> None:
    speed = PrefillSpeed()
    speed.began("r", 1000, 0.0)
    speed.dropped("r")
    speed.dropped("r")
    speed.ended("r", 1.0)
    assert speed.seconds(1000) is None
    assert len(speed) == 0


def test_one_that_begins_again_counts_from_then() -> None:
    speed = PrefillSpeed()
    speed.began("r", 1000, 0.0)
    speed.began("r", 500, 10.0)
    speed.ended("r", 11.0)
    speed.ended("r", 12.0)
    assert speed.seconds(1000) == pytest.approx(2.0)
    assert len(speed) == 0


@pytest.mark.parametrize("end", [0.0, -1.0])
def test_no_time_at_all_is_no_speed(end: float) -> None:
    speed = PrefillSpeed()
    speed.began("r", 1000, 0.0)
    speed.ended("r", end)
    assert speed.seconds(1000) is None


def test_requests_do_not_mix() -> None:
    speed = PrefillSpeed()
    speed.began("one", 1000, 0.0)
    speed.began("other", 4000, 1.0)
    speed.ended("other", 3.0)
    speed.ended("one", 4.0)
    assert speed.seconds(4000) == pytest.approx(2.0)
    assert speed.seconds(1000) == pytest.approx(4.0)
