# SPDX-License-Identifier: Apache-2.0
"""Log lines are written while the router waits, not while somebody waits for the router.

A turn has two lines before its first byte, and to write one takes about as long as to read the
turn's body. Those of several turns take little longer than that of one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    Handler = logging.StreamHandler[TextIO]
else:
    Handler = logging.StreamHandler  # before Python 3.11 it takes no type


# Later than a turn's first byte where P and D are quick, sooner than anybody looks. To wake up for
# them costs more than they do.
_LATER_S = 0.25


class _Said(NamedTuple):
    """A line that has not been made yet."""

    logger: logging.Logger
    created: float
    form: str
    args: tuple[str, ...]

    def record(self) -> logging.LogRecord:
        """It as `logging` has it, with the time at which it was said."""
        logger = self.logger
        made = logger.makeRecord(logger.name, logging.INFO, "", 0, self.form, self.args, None)
        made.created, made.msecs = self.created, self.created % 1 * 1000
        return made


class Lines(logging.Formatter):
    """Finds out once a second what time it is, in words."""

    def __init__(self, form: str, time_form: str) -> None:
        super().__init__(form, time_form)
        self._form = form
        self._time_form = time_form
        self._second = -1
        self._time = ""

    def line(self, said: _Said) -> str:
        """What `format` makes of its record."""
        message = said.form % said.args if said.args else said.form
        words = {"levelname": "INFO", "name": said.logger.name, "message": message}
        return self._form % {**words, "asctime": self._when(said.created)}

    def formatTime(  # noqa: N802 - logging's name for it
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        """The time of a line, to the second."""
        return self._when(record.created)

    def _when(self, created: float) -> str:
        second = int(created)
        if second != self._second:
            self._second = second
            self._time = time.strftime(self._time_form, time.localtime(second))
        return self._time


class LogLines(Handler):
    """Writes lines a quarter of a second after the first of them came, all of them at once.

    Warnings and worse are written at once, behind what waits; so is everything where no loop runs.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._waiting: list[logging.LogRecord | _Said] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._write_now(record)
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._write_now(record)
            return
        try:
            # What it speaks of may have changed by the time of writing.
            record.msg, record.args = record.getMessage(), None
        except Exception:
            self.handleError(record)
            return
        self._wait(record)

    def later(self, logger: logging.Logger, form: str, *args: str) -> None:
        """The same as `logger.info`, where a loop runs, but the line is not even made before.

        For this handler only.
        """
        if logger.isEnabledFor(logging.INFO):
            self._wait(_Said(logger, time.time(), form, args))

    def _wait(self, one: logging.LogRecord | _Said) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_later(_LATER_S, self.flush)
        self._waiting.append(one)

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

    def _write(self, waiting: list[logging.LogRecord | _Said]) -> None:
        lines = []
        for one in waiting:
            try:
                if isinstance(one, _Said) and isinstance(self.formatter, Lines):
                    line = self.formatter.line(one)
                else:
                    line = self.format(_record(one))
                lines.append(line + self.terminator)
            except Exception:
                self.handleError(_record(one))
        try:
            self.stream.write("".join(lines))
        except Exception:
            self.handleError(_record(waiting[-1]))


def _record(one: logging.LogRecord | _Said) -> logging.LogRecord:
    return one.record() if isinstance(one, _Said) else one


class TurnLog:
    """What turns say, two lines each: later, once `through` is set, and else at once."""

    def __init__(self, logger: logging.Logger) -> None:
        self.through: LogLines | None = None
        self._logger = logger

    def info(self, form: str, *args: str) -> None:
        """A line of one turn."""
        if self.through is None:
            self._logger.info(form, *args)
        else:
            self.through.later(self._logger, form, *args)
