from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.cluster import guard
from tools.cluster.errors import ClusterError, ProcessFailedError, log_tail
from tools.cluster.process import ManagedProcess

ROOT = Path(guard.__file__).parents[2]
Script = Callable[[str], list[str]]

WITH_CHILD = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
    "print('up', flush=True); time.sleep(600)\n"
)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def start(command: list[str], log: Path, *, grace_s: float = 5.0) -> ManagedProcess:
    process = ManagedProcess("decode-0", command, log, grace_s=grace_s)
    process.start()
    return process


def test_stop_ends_the_children_too(script: Script, tmp_path: Path) -> None:
    """After stop nothing of the process group runs, and stopping again does nothing."""
    process = start(script(WITH_CHILD), tmp_path / "log")
    group = process.pid
    wait_for(lambda: len(guard.members(group)) == 2)
    process.stop()
    assert guard.members(group) == []
    assert not process.is_alive()
    process.stop()


def test_stop_kills_what_ignores_sigterm(script: Script, tmp_path: Path) -> None:
    """A process that ignores SIGTERM is killed after the grace."""
    text = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WITH_CHILD
    process = start(script(text), tmp_path / "log", grace_s=0.5)
    group = process.pid
    wait_for(lambda: b"\nup" in (tmp_path / "log").read_bytes())
    begin = time.monotonic()
    process.stop()
    assert time.monotonic() - begin >= 0.5
    assert guard.members(group) == []


def test_children_of_a_dead_process_are_ended(script: Script, tmp_path: Path) -> None:
    """When the command itself has crashed, stop still ends the children that it left."""
    process = start(script(WITH_CHILD), tmp_path / "log")
    group = process.pid
    wait_for(lambda: len(guard.members(group)) == 2)
    os.kill(group, signal.SIGKILL)
    wait_for(lambda: not process.is_alive())
    assert len(guard.members(group)) == 1
    process.stop()
    assert guard.members(group) == []


def test_death_is_reported_with_the_tail_of_the_log(script: Script, tmp_path: Path) -> None:
    """The error names the process, how it ended, its command, its log and the log's last lines."""
    log = tmp_path / "log"
    process = start(script("print('RuntimeError: no memory'); raise SystemExit(7)"), log)
    try:
        wait_for(lambda: not process.is_alive())
        with pytest.raises(ProcessFailedError) as caught:
            process.check_alive()
    finally:
        process.stop()
    message = str(caught.value)
    for part in ("decode-0 ended by itself (exit status 7)", "raise SystemExit(7)", str(log)):
        assert part in message
    assert "  | RuntimeError: no memory\n" in message


def test_death_by_signal_is_named(script: Script, tmp_path: Path) -> None:
    """A killed process is reported with the signal's number."""
    process = start(script(WITH_CHILD), tmp_path / "log")
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.is_alive())
    with pytest.raises(ProcessFailedError, match="signal 9"):
        process.check_alive()
    process.stop()


def test_command_that_does_not_exist(tmp_path: Path) -> None:
    """An interpreter that is not there is an error about this process, not a bare OSError."""
    with pytest.raises(ProcessFailedError, match="decode-0 cannot be executed"):
        start([str(tmp_path / "nowhere")], tmp_path / "log")


def test_cannot_be_started_twice(script: Script, tmp_path: Path) -> None:
    """Starting a started process is refused, since the first would be lost."""
    process = start(script(WITH_CHILD), tmp_path / "log")
    try:
        with pytest.raises(ClusterError, match="started already"):
            process.start()
    finally:
        process.stop()
    with pytest.raises(ClusterError, match="not started"):
        _ = process.pid


def test_process_and_children_are_pinned(script: Script, tmp_path: Path) -> None:
    """The command runs on the given core only; the caller's own affinity is as before."""
    before = os.sched_getaffinity(0)
    core = max(before)
    log = tmp_path / "log"
    text = "import os; print('cores', os.sched_getaffinity(0), flush=True)"
    process = ManagedProcess("decode-0", script(text), log, cores=[core])
    process.start()
    try:
        wait_for(lambda: not process.is_alive())
    finally:
        process.stop()
    assert f"cores {{{core}}}" in log.read_text(encoding="utf-8").splitlines()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_killed_owner(number: int, tmp_path: Path) -> None:
    """When the owner is killed, even with -9, the guard ends its process and the children."""
    program = (
        "import pathlib, sys, time\n"
        "from tools.cluster.process import ManagedProcess\n"
        "command = [sys.executable, '-S', '-c', sys.argv[2]]\n"
        "process = ManagedProcess('x', command, pathlib.Path(sys.argv[1]), grace_s=1.0)\n"
        "process.start(); print(process.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log"), WITH_CHILD],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as owner:
        assert owner.stdout is not None
        group = int(owner.stdout.readline())
        wait_for(lambda: len(guard.members(group)) == 2)
        owner.send_signal(number)
        owner.wait()
    wait_for(lambda: guard.members(group) == [])


def test_log_tail_is_short_and_survives_bad_bytes(tmp_path: Path) -> None:
    """Only the last lines are read, and bytes that are no UTF-8 do not hide the reason."""
    log = tmp_path / "log"
    log.write_bytes(b"first\n" + b"x" * 100_000 + b"\n\xff broken\nlast\n")
    assert log_tail(log, 2) == ["\ufffd broken", "last"]
