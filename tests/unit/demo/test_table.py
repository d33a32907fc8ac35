from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.demo.measure import Turn
from tools.demo.table import milliseconds, series, table, tokens

Make = Callable[..., Turn]


def test_one_aligned_line_per_turn(turn: Make) -> None:
    """Numbers end in the same column as their head; what was not measured shows as nothing."""
    first = turn(
        prompt_tokens=812,
        read_back_tokens=0,
        transfer_s=None,
        outcome="miss",
        reason="first_turn",
    )
    assert table([first, turn()], "-") == [
        "turn  prompt  read back  computed  prefill  transfer      TTFT  was",
        "   1     812          -       812    31 ms         -  1 500 ms  miss (first turn)",
        "   2   1 340      1 203       137    31 ms    4.2 ms  1 500 ms  hit",
    ]


def test_slow_turns_fit_in_100_columns(turn: Make) -> None:
    """Also the longest figures that a busy machine can bring."""
    slow = turn(
        prompt_tokens=131072,
        prefill_s=600.0,
        transfer_s=600.0,
        ttft_s=600.0,
        outcome="miss",
        reason="below_threshold",
    )
    assert max(map(len, table([slow]))) <= 100


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.4 ms"), (0.0099, "9.9 ms"), (0.0312, "31 ms"), (59.1924, "59 192 ms")],
)
def test_milliseconds(seconds: float, text: str) -> None:
    """Short times keep a digit after the point, long ones are grouped."""
    assert milliseconds(seconds) == text


def test_series_has_one_unit() -> None:
    """Several times stand between slashes, with the unit at the end."""
    assert series([0.21, 1.48, 0.005]) == "210 / 1 480 / 5.0 ms"


def test_tokens() -> None:
    """Thousands are set apart by a space."""
    assert [tokens(n) for n in (0, 999, 1340, 1000000)] == ["0", "999", "1 340", "1 000 000"]
