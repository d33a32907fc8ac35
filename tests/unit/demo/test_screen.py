from __future__ import annotations

import io

import pytest

from tools.demo.screen import Screen, one_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_only_whole_lines_are_written() -> None:
    """A log file gets no control characters and no line that is rewritten."""
    out = io.StringIO()
    screen = Screen(out)
    screen.live("working")
    screen.line("done")
    assert out.getvalue() == "done\n"


def test_on_a_terminal_the_live_line_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live line is cut to the width, so that it never wraps, and cleared by the next line."""
    monkeypatch.setenv("COLUMNS", "21")
    out = Terminal()
    screen = Screen(out)
    screen.live("x" * 300)
    screen.line("done")
    assert out.getvalue() == "\r\x1b[K" + "x" * 20 + "\r\x1b[K" + "done\n"


@pytest.mark.parametrize(("encoding", "nothing"), [("ascii", "-"), ("utf-8", "\u2013")])
def test_nothing_is_shown_in_what_can_be_written(encoding: str, nothing: str) -> None:
    """A dash beyond ASCII is used only where it can be encoded."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    assert Screen(out).nothing == nothing


def test_start_reports_are_short() -> None:
    """The path of an engine's log, the same in every line, is left out."""
    out = io.StringIO()
    Screen(out).start_report("decode-0: starting at http://h:1, log /long/decode-0.log")
    assert out.getvalue() == "  decode-0: starting at http://h:1\n"


def test_one_line_keeps_the_terminal_safe() -> None:
    """Generated text shows without line breaks and escape sequences."""
    assert one_line("a\nb\x1b[31mc\td" + "e" * 99, 12) == "a b [31mc de"
