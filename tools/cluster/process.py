"""One process, its children, its log, and a promise that none of them outlives its owner."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.cluster import guard
from tools.cluster.errors import ClusterError, ProcessFailedError

GRACE_S = 10.0


class ManagedProcess:
    """A command in its own session, with standard output and error appended to a log.

    ``stop`` ends the whole process group. So does a guard process when the owner dies without
    calling it. ``cores`` (None: all) are the CPU cores that the command and its children may use.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cores: Sequence[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log_path = log_path
        self.cores = None if cores is None else tuple(cores)
        self._env = dict(os.environ if env is None else env)
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._asked_to_stop = False
        # The first to stop reaps the process; a second one must not signal a recycled id.
        self._stopping = threading.RLock()

    @property
    def pid(self) -> int:
        """Id of the command itself, also the id of its process group; ClusterError if not up."""
        if self._process is None:
            raise ClusterError(f"{self.name} is not started; call start() first")
        return self._process.pid

    def start(self) -> None:
        """Start the command; raises ClusterError when it is already started."""
        if self._process is not None:
            raise ClusterError(f"{self.name} is started already (pid {self.pid})")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            try:
                with _pinned(self.cores):
                    self._process = subprocess.Popen(
                        self.command,
                        env=self._env,
                        # `python -m` puts the working directory on sys.path: it must be one
                        # that holds no package by the name of an installed one.
                        cwd=self.log_path.parent,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except OSError as error:
                raise ProcessFailedError(
                    self.name, f"cannot be executed: {error}", self.command, self.log_path
                ) from error
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(self.pid), str(self._grace_s)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            self.kill()
            raise

    def is_alive(self) -> bool:
        """Whether the command itself is running."""
        return self._process is not None and self._exit_status() is None

    def check_alive(self) -> None:
        """Raise ProcessFailedError, with the log's tail, when the command has ended."""
        status = None if self._process is None else self._exit_status()
        if status is not None:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise self.failure(f"ended by itself ({how})")

    def failure(self, what: str) -> ProcessFailedError:
        """An error about this process that carries its command and the tail of its log."""
        return ProcessFailedError(self.name, what, self.command, self.log_path)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, once, and return at once.

        It goes to the command alone, which is to end its children in its own order.
        """
        with self._stopping:
            if self.is_alive() and not self._asked_to_stop:
                os.kill(self.pid, signal.SIGTERM)
                self._asked_to_stop = True

    def stop(self) -> None:
        """End the command and all that it started: SIGTERM, after the grace SIGKILL. Idempotent.

        Children that are left when the command is gone are killed.
        """
        with self._stopping:
            if self._process is None:
                return
            try:
                self.ask_to_stop()
                self._wait_for_exit(self._grace_s)
            finally:
                self.kill()

    def kill(self) -> None:
        """End the command and all that it started with SIGKILL, at once. Idempotent."""
        with self._stopping:
            if self._process is None:
                return
            guard.send(self.pid, signal.SIGKILL)
            if not guard.wait_until_empty(self.pid, self._grace_s):
                raise self.failure(f"survived SIGKILL: {guard.members(self.pid)} still run")
            self._process.wait()
            self._process = None
            self._asked_to_stop = False
            self._dismiss_guard()

    def _exit_status(self) -> int | None:
        """Exit status as in subprocess; leaves the zombie, whose id thus cannot be reused."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def _wait_for_exit(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.is_alive() and time.monotonic() < end:
            time.sleep(0.05)

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.communicate(b".")
            self._guard = None


@contextlib.contextmanager
def _pinned(cores: Sequence[int] | None) -> Iterator[None]:
    """Limit this thread to ``cores``: a child inherits it before its first instruction."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
