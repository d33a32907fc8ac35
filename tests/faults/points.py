"""Stops a read-back at a named point; the engine's side is in_engine/bidir_fault_points.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POINTS = ("before_hold", "held", "reading", "transferred")
WAIT_S = 30.0
_SLOW_LINK = "slow_link"


class FaultPoints:
    """The folder that the engine's worker looks into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def stop_at(self, point: str) -> Iterator[None]:
        """Arm the point; the stop ends when the block does."""
        assert point in POINTS, point
        self.clear()
        (self.folder / point).touch()
        try:
            yield
        finally:
            self.let_go(point)

    @contextmanager
    def slow_link(self) -> Iterator[None]:
        """READs that time the link take a second each."""
        file = self.folder / _SLOW_LINK
        file.touch()
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def wait_until_reached(self, point: str) -> None:
        end = time.monotonic() + WAIT_S
        while not (self.folder / f"{point}.reached").exists():
            assert time.monotonic() < end, f"no read-back came to {point!r} within {WAIT_S:.0f} s"
            time.sleep(0.01)

    def let_go(self, point: str) -> None:
        (self.folder / f"{point}.go").touch()

    def clear(self) -> None:
        """Let everything go that waits, and arm nothing."""
        for point in POINTS:
            (self.folder / point).unlink(missing_ok=True)
            if (self.folder / f"{point}.reached").exists():
                self.let_go(point)
                time.sleep(0.05)
        for file in self.folder.iterdir():
            if file.name != _SLOW_LINK:  # ends by itself
                file.unlink(missing_ok=True)
