"""Loaded into an engine's worker by `--worker-extension-cls`: stops a read-back where a test says.

Points, in the order of a read-back: `before_hold`, `held` (answered, nothing posted yet),
`reading` (posted; NIXL is said to be still at it), `transferred` (the last byte is there, CONFIRM
not yet asked). A test arms a point by a file of that name in the folder BIDIR_FAULT_POINTS; the
next read-back that comes there renames it to `<point>.reached` and waits for `<point>.go`.

While a file `slow_link` is there, READs that only time the link take a second each.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.bidir.connector import peer
from vllm.bidir.connector.worker import BidirWorker

FOLDER = Path(os.environ["BIDIR_FAULT_POINTS"])
LONGEST_S = 120.0
SLOW_S = 1.0


def reach(point: str) -> bool:
    """Whether the point is armed or was reached and not let go yet."""
    armed, reached = FOLDER / point, FOLDER / f"{point}.reached"
    if armed.exists():
        armed.rename(reached)
    return reached.exists() and not (FOLDER / f"{point}.go").exists()


def stop_at(point: str) -> None:
    """Wait here; for threads that ask questions only, never in the engine's step."""
    end = time.monotonic() + LONGEST_S
    while reach(point) and time.monotonic() < end:
        time.sleep(0.01)


def around(question: Callable[..., Any], before: str, after: str | None) -> Callable[..., Any]:
    def asked(*args: Any) -> Any:
        stop_at(before)
        answer = question(*args)
        if after is not None:
            stop_at(after)
        return answer

    return asked


class SlowNixl:
    """NIXL's agent, whose transfers are not done as long as `reading` holds them."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._began: dict[Any, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def transfer(self, handle: Any) -> str:
        state: str = self._agent.transfer(handle)
        return "PROC" if self._is_slow(handle) else state

    def check_xfer_state(self, handle: Any) -> str:
        # Those of a thread are nobody's KV: the engine's step asks after the others.
        if threading.current_thread() is threading.main_thread() and reach("reading"):
            return "PROC"
        state: str = self._agent.check_xfer_state(handle)
        return "PROC" if self._is_slow(handle) else state

    def _is_slow(self, handle: Any) -> bool:
        if threading.current_thread() is threading.main_thread():
            return False
        if not (FOLDER / "slow_link").exists():
            return False
        return time.monotonic() < self._began.setdefault(handle, time.monotonic()) + SLOW_S


def slowed(set_up: Callable[..., None]) -> Callable[..., None]:
    def set_up_slowly(self: BidirWorker, *args: Any) -> None:
        set_up(self, *args)
        self.nixl_wrapper = SlowNixl(self.nixl_wrapper)

    return set_up_slowly


class FaultPoints:
    """What vLLM mixes into its worker; the work is done by importing this module."""


peer.hold = around(peer.hold, "before_hold", "held")
peer.confirm = around(peer.confirm, "transferred", None)
BidirWorker.__init__ = slowed(BidirWorker.__init__)  # type: ignore[method-assign]
