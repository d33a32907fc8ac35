"""Waiting for several processes at once, with a sign of life for whoever watches."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tools.cluster.process import ManagedProcess

Report = Callable[[str], None]

_POLL_S = 0.25
_REPORT_EVERY_S = 5.0
_HEALTH_TIMEOUT_S = 5.0


class Startable(Protocol):
    """What can be waited for. ``is_ready`` raises ProcessFailedError when the process has ended."""

    @property
    def name(self) -> str: ...
    @property
    def process(self) -> ManagedProcess: ...
    def is_ready(self) -> bool: ...


def to_stderr(line: str) -> None:
    """The default report: one line on standard error."""
    print(line, file=sys.stderr, flush=True)


def answers_health(host: str, port: int) -> bool:
    """Whether a server answers GET /health with 200."""
    connection = http.client.HTTPConnection(host, port, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def wait_until_ready(
    started: Sequence[Startable], timeout_s: float, report: Report = to_stderr
) -> None:
    """Wait until all are ready.

    Raises ProcessFailedError as soon as one has ended, and after ``timeout_s`` for the first
    that is not ready. Reports each that becomes ready, and every 5 s those still waited for.
    """
    begin = time.monotonic()
    next_report = _REPORT_EVERY_S
    waiting = list(started)
    while True:
        for one in list(waiting):
            if one.is_ready():
                waiting.remove(one)
                report(f"{one.name}: ready after {time.monotonic() - begin:.0f} s")
        if not waiting:
            return
        elapsed = time.monotonic() - begin
        if elapsed >= timeout_s:
            raise waiting[0].process.failure(f"was not ready within {timeout_s:.0f} s")
        if elapsed >= next_report:
            names = ", ".join(one.name for one in waiting)
            report(f"{names}: starting, {elapsed:.0f} s")
            next_report += _REPORT_EVERY_S
        time.sleep(_POLL_S)
