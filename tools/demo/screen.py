"""Where the demo writes. On a terminal the last line may be rewritten; elsewhere it never is."""

from __future__ import annotations

import shutil
from typing import TextIO

_WIDEST = 100
_EN_DASH = "\u2013"
_CLEAR = "\r\x1b[K"


class Screen:
    """Lines that stay, and on a terminal one live line below them."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._live = False
        self.nothing = _EN_DASH if _can_encode(out, _EN_DASH) else "-"

    def line(self, text: str = "") -> None:
        """Write a line that stays."""
        self.clear()
        self._out.write(text + "\n")
        self._out.flush()

    def live(self, text: str) -> None:
        """Show a line until the next one; without a terminal nothing is written."""
        if not self._terminal:
            return
        width = min(_WIDEST, shutil.get_terminal_size().columns - 1)
        self._out.write(_CLEAR + text[:width])
        self._out.flush()
        self._live = True

    def clear(self) -> None:
        """Take the live line away."""
        if self._live:
            self._out.write(_CLEAR)
            self._out.flush()
            self._live = False

    def start_report(self, text: str) -> None:
        """A line about engines that start: what is only waiting is live on a terminal."""
        # The engines' logs are named once, at the top.
        short, _, _ = text.partition(", log ")
        if self._terminal and ": starting, " in short:
            self.live(f"  {short}")
        else:
            self.line(f"  {short}")


def one_line(text: str, length: int) -> str:
    """The beginning of a generated text without line breaks and control characters."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown[:length]


def _can_encode(out: TextIO, text: str) -> bool:
    try:
        text.encode(out.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
