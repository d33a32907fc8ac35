"""The demo as a process, with a program in the place of the engines."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.unit.demo.marked import start


def test_ctrl_c_during_start_leaves_nothing_behind(fake_python: Path, tmp_path: Path) -> None:
    """Whenever it comes while engines are started, one line says so and no process is left."""
    for attempt in range(6):
        demo = start(["--logs", tmp_path, "--python", fake_python, "--model", tmp_path])
        assert demo.process.stdout is not None
        demo.process.stdout.readline()
        moment = random.uniform(0, 0.4)
        time.sleep(moment)
        demo.process.send_signal(signal.SIGINT)
        out, err = demo.process.communicate(timeout=60)
        shown = f"attempt {attempt}, SIGINT after {moment:.4f} s\n{out}\n{err}"
        assert demo.process.returncode == 130, shown
        assert out.splitlines()[-1].startswith("Stopped:"), shown
        assert err == "", shown
        assert demo.running() == [], shown


def test_engine_that_dies_is_one_message(fake_python: Path, tmp_path: Path) -> None:
    """Exit status 1; the message has the log's path and what the engine said."""
    demo = start(
        ["--logs", tmp_path, "--python", fake_python, "--model", tmp_path],
        env={"FAKE_ENGINE": "die"},
    )
    out, err = demo.process.communicate(timeout=60)
    assert demo.process.returncode == 1, out
    assert err.startswith("error: ") and "Traceback" not in err
    assert "ValueError: the reason" in err
    assert str(tmp_path) in err
    assert demo.running() == []


@pytest.mark.parametrize("turns", ["1", "9", "x"])
def test_wrong_number_of_turns_is_a_usage_error(turns: str) -> None:
    """Exit status 2; the message says what was expected and found."""
    demo = start(["--turns", turns])
    _, err = demo.process.communicate(timeout=60)
    assert demo.process.returncode == 2
    assert f"expected 2 to 8, found '{turns}'" in err
