from __future__ import annotations

import math

import pytest

from tests.gpu.compare import LEAST, MARGIN, Difference, difference, limit


def test_gap_is_the_largest_difference_whoever_comes_first() -> None:
    one, other = {1: -0.5, 2: -1.0, 3: -2.0}, {1: -0.6, 2: -1.4, 3: -2.0}
    assert difference(one, other) == difference(other, one)
    assert difference(one, other).overlap == 3
    assert difference(one, other).gap == pytest.approx(0.4)
    assert difference(one, other).rms == pytest.approx(math.sqrt((0.01 + 0.16) / 3))


def test_a_token_that_one_list_lacks_counts_with_that_lists_smallest() -> None:
    """It is there no more probable than the least of those listed."""
    found = difference({1: -0.5, 2: -1.0}, {1: -0.5, 3: -3.0})
    assert found.overlap == 1
    assert found.gap == pytest.approx(2.0)


@pytest.mark.parametrize("broken", [{}, {1: math.nan}, {1: -math.inf}])
def test_what_is_no_number_is_never_equal(broken: dict[int, float]) -> None:
    """NaN from a broken kernel, on both sides even, must not pass."""
    assert difference({1: -0.5}, broken).rms == math.inf
    assert difference(broken, broken).rms == math.inf


def test_limit_is_above_all_noise_and_never_zero() -> None:
    assert limit([Difference(20, 0.2, 0.1), Difference(19, 0.2, 0.3)]) == pytest.approx(
        0.3 * MARGIN
    )
    assert limit([Difference(20, 0.0, 0.0)]) == LEAST


@pytest.mark.parametrize("noise", [[], [Difference(0, math.inf, math.inf)]])
def test_without_noise_nothing_can_be_judged(noise: list[Difference]) -> None:
    with pytest.raises(ValueError, match="nothing to measure by"):
        limit(noise)
