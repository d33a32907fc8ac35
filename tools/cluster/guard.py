"""Ends a process group when the process that started it is gone, however it went (kill -9 too).

Run as a script beside each managed process: ``guard.py LEADER GRACE_S``. Standard input is a pipe
from the owner. End of file without a word means that the owner died: the group gets SIGTERM, and
SIGKILL after the grace. Any byte means that the owner has ended the group itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def running() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, group) of each process; zombies, which nothing can end, do not count."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The name in parentheses may itself hold spaces and parentheses.
        state, parent, group = stat.rpartition(")")[2].split()[:3]
        if state not in "ZX":
            yield int(entry.name), int(parent), int(group)


def members(group: int) -> list[int]:
    """Process ids in the group that still run."""
    return [pid for pid, _, its_group in running() if its_group == group]


def send(group: int, number: int) -> None:
    """Send a signal to the whole group; nothing happens when the group is gone."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def wait_until_empty(group: int, seconds: float) -> bool:
    """Wait up to ``seconds`` for the group to have no running member; tell whether it has none."""
    end = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def main(leader: int, grace_s: float) -> None:
    """Wait for the owner's word or death, and end the group in the latter case."""
    if os.read(0, 1):
        return
    send(leader, signal.SIGTERM)
    if not wait_until_empty(leader, grace_s):
        send(leader, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
