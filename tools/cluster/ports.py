"""Free TCP ports, reserved until they are given back.

A port that was merely seen free can be taken before the engine binds it, tens of seconds later.
So ports come from below the kernel's ephemeral range, where no outgoing connection lands by
chance, and each is locked by a file, so that clusters started at the same time on one machine
never choose the same one. The kernel drops the locks when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from types import TracebackType

from tools.cluster.errors import NoFreePortError

BELOW_EPHEMERAL = range(20000, 32000)


class PortReservations:
    """The ports that one cluster holds. Use as a context manager, or call ``release``."""

    def __init__(self, lock_folder: Path | None = None, ports: range = BELOW_EPHEMERAL) -> None:
        self._ports = ports
        self._folder = lock_folder or Path(tempfile.gettempdir()) / f"engine-ports-{os.getuid()}"
        self._locks: dict[int, int] = {}

    def reserve(self, count: int = 1) -> int:
        """Reserve ``count`` consecutive ports and return the first; raises NoFreePortError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        starts = self._ports[: max(0, len(self._ports) - count + 1)]
        # At random, so that a port that an engine has just left rests for a while.
        offset = random.randrange(max(1, len(starts)))
        for step in range(len(starts)):
            first = starts[(offset + step) % len(starts)]
            if self._reserve_all(range(first, first + count)):
                return first
        raise NoFreePortError(
            f"no {count} free consecutive port(s) in {self._ports[0]}..{self._ports[-1]}; "
            "end what listens there (ss -ltnp lists it)"
        )

    def release(self) -> None:
        """Give every port back."""
        for port in list(self._locks):
            self._release(port)

    def __enter__(self) -> PortReservations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _reserve_all(self, ports: range) -> bool:
        taken: list[int] = []
        for port in ports:
            if not self._reserve_one(port):
                for mine in taken:
                    self._release(mine)
                return False
            taken.append(port)
        return True

    def _reserve_one(self, port: int) -> bool:
        if port in self._locks:
            return False
        lock = os.open(self._folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        if not is_free(port):
            os.close(lock)
            return False
        self._locks[port] = lock
        return True

    def _release(self, port: int) -> None:
        os.close(self._locks.pop(port))


def is_free(port: int) -> bool:
    """Whether nothing listens on ``port`` on any IPv4 address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
