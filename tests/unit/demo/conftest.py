"""Stand-ins: turns with given figures, and a program in the place of an engine."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tools.demo.measure import Turn

TURN = Turn(
    prompt_tokens=1340,
    read_back_tokens=1203,
    prefill_s=0.0312,
    transfer_s=0.0042,
    ttft_s=1.5,
    outcome="hit",
    reason="",
    text="answer",
)

# What `{engine} -m vllm... serve` does is told by the environment. It starts a child, as vLLM does.
FAKE_ENGINE = """#!{python} -S
import os, subprocess, sys, time

print("fake engine", flush=True)
if os.environ.get("FAKE_ENGINE") == "die":
    print("ValueError: the reason", flush=True)
    sys.exit(3)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""


@pytest.fixture
def turn() -> Callable[..., Turn]:
    """Makes a turn that is a hit, with some of its figures changed."""

    def make(**changes: object) -> Turn:
        return replace(TURN, **changes)  # type: ignore[arg-type]  # a test names what it changes

    return make


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """An executable for the demo's --python: an engine that starts and never serves."""
    path = tmp_path / "fake-python"
    path.write_text(FAKE_ENGINE.format(python=sys.executable), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
