"""A progress bar on standard error: one line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_EVERY_S = 10.0
_LEAST_SHARE = 0.1


class Progress:
    """Counts requests; `clock` is in seconds."""

    def __init__(
        self, out: TextIO, total: int, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out
        self._total = total
        self._done = done
        self._before = done
        self._clock = clock
        self._begun = clock()
        self._shown = float("-inf")
        self._terminal = out.isatty()

    def advance(self, what: str) -> None:
        """One more request is done; `what` says of which arm."""
        self._done += 1
        now = self._clock()
        if not self._terminal and now - self._shown < _EVERY_S and self._done < self._total:
            return
        self._shown = now
        self._write(self._line(what, now))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._terminal:
            self._out.write("\r\x1b[K")
        self._out.write(text + "\n")
        self._out.flush()

    def _line(self, what: str, now: float) -> str:
        share = self._done / self._total
        bar = "#" * round(share * _WIDTH)
        here = self._done - self._before
        line = f"[{bar:<{_WIDTH}}] {self._done}/{self._total} requests: {what}"
        if here < _LEAST_SHARE * self._total:
            return line  # so far it was mostly engines that start
        left = (now - self._begun) / here * (self._total - self._done)
        return f"{line}, about {left:.0f} s left"

    def _write(self, line: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write("\r\x1b[K" + line[:width])
            self._out.flush()
        else:
            self.say(line)
