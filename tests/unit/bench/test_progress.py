"""The progress bar."""

from __future__ import annotations

import io

from tools.bench.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_on_a_terminal_one_line_is_rewritten() -> None:
    out, clock = Terminal(), Clock()
    bar = Progress(out, total=4, done=1, clock=clock)
    clock.now = 10.0
    bar.advance("on")
    assert out.getvalue().startswith("\r") and "\n" not in out.getvalue()
    # Two are left; the one that was run here took 10 s.
    assert "[############            ] 2/4 requests: on, about 20 s left" in out.getvalue()


def test_elsewhere_there_is_a_line_now_and_then_and_one_at_the_end() -> None:
    out, clock = io.StringIO(), Clock()
    bar = Progress(out, total=100, clock=clock)
    for _ in range(100):
        clock.now += 0.5
        bar.advance("on")
    lines = out.getvalue().splitlines()
    assert 5 <= len(lines) <= 7
    assert lines[-1] == "[########################] 100/100 requests: on, about 0 s left"
    assert "left" not in lines[0]
    assert "\r" not in out.getvalue()
