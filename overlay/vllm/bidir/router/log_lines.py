# SPDX-License-Identifier: Apache-2.0
"""Log lines are written while the router waits, not while somebody waits for the router.

A turn has two lines before its first byte, and to write one takes about as long as to read the
turn's body.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    Handler = logging.StreamHandler[TextIO]
else:
    Handler = logging.StreamHandler  # before Python 3.11 it takes no type


class LogLines(Handler):
    """Writes lines in the event loop's next round, all of them at once.

    Warnings and worse are written at once, behind what waits; so is everything where no loop runs.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._waiting: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._write_now(record)
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._write_now(record)
            return
        try:
            # What it speaks of may have changed by the time of writing.
            record.msg, record.args = record.getMessage(), None
        except Exception:
            self.handleError(record)
            return
        if not self._waiting:
            loop.call_soon(self.flush)
        self._waiting.append(record)

    def flush(self) -> None:
        """Write what waits. At the end of the process `logging` calls it, too."""
        with self.lock or nullcontext():
            waiting, self._waiting = self._waiting, []
            if waiting:
                self._write(waiting)
            super().flush()

    def _write_now(self, record: logging.LogRecord) -> None:
        waiting, self._waiting = self._waiting, []
        self._write([*waiting, record])
        super().flush()

    def _write(self, records: list[logging.LogRecord]) -> None:
        try:
            lines = [self.format(record) + self.terminator for record in records]
            self.stream.write("".join(lines))
        except Exception:
            self.handleError(records[-1])
