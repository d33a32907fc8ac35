"""Ctrl-C at any time: stop once, in order, and leave no process behind."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

from tools.cluster import guard

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_S = 10.0


class Interrupts:
    """While entered, the first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt.

    Later ones do nothing, so that an impatient second Ctrl-C does not cut the ending short. An
    exception that arises inside a finaliser is swallowed by Python; ``check`` raises it again.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() itself gave

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self.asked and not self._held:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From now on remember signals only: the ending has begun."""
        self._held = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        if first and not self._held:
            raise KeyboardInterrupt


def end_children() -> None:
    """Kill what still runs of this process's children, each with its process group.

    All are ended by whoever started them, but for one whose start was interrupted between its
    birth and the moment when its owner noted it. They are leaders of groups of their own.
    """
    left = _children()
    for child in left:
        guard.send(child, signal.SIGKILL)
    for child in left:
        guard.wait_until_empty(child, _END_S)


def _children() -> list[int]:
    return [pid for pid, parent, _ in guard.running() if parent == os.getpid()]
