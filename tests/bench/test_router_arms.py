"""The router's benchmark beside the base release's sample proxy, in its smallest form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARMS = ["direct", "ours", "sample proxy"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_all_arms_are_measured_over_the_same_engines(tmp_path: Path) -> None:
    out = tmp_path / "router.json"
    command = [sys.executable, "-m", "tools.bench.router", "run", "--json", str(out)]
    command += ["--repeats", "1", "--concurrency", "4", "--chunks", "3", "--interval", "5"]
    command += ["--seconds", "1", "--warm", "0.5", "--saturated", "1", "--conversations", "0"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    # Nothing is asked of the figures, nor can be met with four streams.
    assert done.returncode == 1 and "NOT MET" in done.stdout, done.stdout + done.stderr
    samples = json.loads(out.read_text(encoding="utf-8"))["samples"]
    assert list(samples) == ["steps", "paced", "saturated"]
    for arms in samples.values():
        assert list(arms) == ARMS
        for arm, (found,) in arms.items():
            assert found["streams"] > 0 and found["first_p50_ms"] > 0
            assert (found["cpu_ms_per_stream"] > 0) is (arm != "direct")
