"""What the idle benchmark counts and shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tools.bench.cpu import cpu_seconds
from tools.bench.idle import Sample, table


def test_cpu_time_is_that_of_the_process() -> None:
    """To the millisecond: /proc's hundredths are too coarse for what takes a tenth of a core."""
    before = cpu_seconds(os.getpid())
    end = time.process_time() + 0.002
    while time.process_time() < end:
        pass
    assert 0.002 <= cpu_seconds(os.getpid()) - before <= 0.008


def test_a_process_that_is_gone_takes_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert cpu_seconds(process.pid) == 0.0


def test_the_table_shows_what_holding_adds() -> None:
    text = table(
        {
            "stock": {"empty": Sample(0.01, 0.02, 10.0), "holding": Sample(1.01, 0.14, 12.5)},
            "ours": {"empty": Sample(0.01, 0.02, 10.0), "holding": Sample(0.03, 0.02, 10.1)},
        }
    )
    added = [line.split() for line in text.splitlines() if " adds " in line]
    assert added == [
        ["stock", "adds", "100.0%", "12.0%", "2.5", "ms"],
        ["ours", "adds", "2.0%", "0.0%", "0.1", "ms"],
    ]
