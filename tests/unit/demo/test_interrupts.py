from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cluster import guard
from tools.demo.interrupts import Interrupts

ROOT = Path(guard.__file__).parents[2]


def test_first_signal_raises_and_later_ones_do_not() -> None:
    """An impatient second Ctrl-C does not cut the ending short; after leaving all is as before."""
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
        assert interrupts.asked
    assert signal.getsignal(signal.SIGINT) is before


def test_swallowed_interrupt_is_raised_by_the_next_check() -> None:
    """An exception inside a finaliser is lost; the wish to stop is not."""
    with Interrupts() as interrupts:
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


def test_held_signals_are_remembered_only() -> None:
    """While engines are being ended, a signal changes the exit status and nothing else."""
    with Interrupts() as interrupts:
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        interrupts.check()
        assert interrupts.asked


# A process of its own, since it ends all of its children.
WITH_A_LOST_CHILD = """
import subprocess, sys, time
from tools.cluster import guard
from tools.demo.interrupts import end_children

sleep = "import time; time.sleep(600)"
text = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {sleep!r}])"
child = subprocess.Popen([sys.executable, "-S", "-c", text], start_new_session=True)
while len(guard.members(child.pid)) < 2:
    time.sleep(0.02)
end_children()
print(guard.members(child.pid))
child.wait()
"""


def test_children_that_nobody_owns_are_ended_with_theirs() -> None:
    """A child whose start was interrupted is killed, and what it has started too."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_LOST_CHILD],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
