"""Errors of starting and stopping engines. Each ends in what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

TAIL_LINES = 30


class ClusterError(Exception):
    """The cluster cannot be started or asked as wished."""


class NoFreePortError(ClusterError):
    """Every port of the range is taken by a listener or reserved by another cluster."""


class ProcessFailedError(ClusterError):
    """A process ended, or did not become ready in time. The message holds the log's tail."""

    def __init__(self, name: str, what: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.what = what
        self.command = tuple(command)
        self.log_path = log_path
        self.log_tail = log_tail(log_path)
        super().__init__(
            f"{name} {what}\n"
            f"  command  {shlex.join(self.command)}\n"
            f"  log      {log_path}\n"
            "  next     read the log; its last lines stand below, the first error is the cause\n"
            + "".join(f"  | {line}\n" for line in self.log_tail)
        )


def log_tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last ``lines`` lines of a log, without line ends; undecodable bytes are replaced."""
    longest = 400 * lines
    with path.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(0, size - longest))
        text = log.read().decode("utf-8", errors="replace")
    return text.splitlines()[-lines:]
