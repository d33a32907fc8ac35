"""The router as a process, in front of engines that run already or are still to come.

with router(prefill=c.prefill, decode=c.decode, log_folder=c.log_folder) as r:
    r.url, r.log_path
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tools.cluster.errors import ClusterError
from tools.cluster.ports import PortReservations
from tools.cluster.process import ManagedProcess
from tools.cluster.readiness import Report, answers_health, to_stderr, wait_until_ready

START_TIMEOUT_S = 60.0
# What the router gives the turns under way when it is asked to stop, and more than that.
DRAIN_S, GRACE_S = 10, 15.0
# So long, and longer, the router may keep lines before it writes them.
_LATE_S = 0.1
_HOST = "127.0.0.1"


class Serving(Protocol):
    """What a router stands in front of: an engine, or what answers like one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


class RouterProcess:
    """A running router. Made by ``router``, which also ends it."""

    def __init__(self, name: str, port: int, process: ManagedProcess) -> None:
        self.name = name
        self.port = port
        self.process = process

    @property
    def url(self) -> str:
        """``http://host:port``, without a path."""
        return f"http://{_HOST}:{self.port}"

    @property
    def log_path(self) -> Path:
        """Its standard output and error."""
        return self.process.log_path

    @property
    def log_text(self) -> str:
        """The log so far; undecodable bytes are replaced."""
        time.sleep(_LATE_S)
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def is_ready(self) -> bool:
        """Whether it serves; raises ProcessFailedError when the process has ended."""
        self.process.check_alive()
        return answers_health(_HOST, self.port)


@contextmanager
def router(
    prefill: Sequence[Serving],
    decode: Sequence[Serving],
    log_folder: Path,
    *,
    args: Sequence[str] = (),
    name: str = "router",
    python: Path | None = None,
    env: Mapping[str, str] | None = None,
    report: Report = to_stderr,
) -> Iterator[RouterProcess]:
    """Start ``vllm-bidir-router`` before the engines, wait until it serves, end it on leaving.

    It serves whether the engines are up or not. ``args`` are appended to its command line;
    ``python`` (default: this interpreter) is the one whose router is run; ``env`` is laid over
    the environment; the log is ``log_folder / f"{name}.log"``. Raises ProcessFailedError, with
    the log's tail, when it ends or does not come up.
    """
    if not prefill or not decode:
        raise ClusterError(
            f"{name}: {len(prefill)} prefill and {len(decode)} decode engine(s); "
            "expected at least one of each"
        )
    with PortReservations() as ports:
        port = ports.reserve()
        process = ManagedProcess(
            name,
            router_command(
                python or Path(sys.executable),
                port,
                prefill,
                decode,
                ["--drain-timeout", str(DRAIN_S), *args],
            ),
            log_folder.absolute() / f"{name}.log",
            env={**os.environ, **(env or {})},
            grace_s=GRACE_S,
        )
        running = RouterProcess(name, port, process)
        try:
            process.start()
            wait_until_ready([running], START_TIMEOUT_S, report)
            yield running
        finally:
            process.stop()


def router_command(
    python: Path,
    port: int,
    prefill: Sequence[Serving],
    decode: Sequence[Serving],
    args: Sequence[str] = (),
) -> list[str]:
    """The command line. It is what the script ``vllm-bidir-router`` runs, found by interpreter."""
    command = [str(python), "-m", "vllm_bidir_router", "--host", _HOST, "--port", str(port)]
    for role, engines in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{role}-hosts", *(engine.host for engine in engines)]
        command += [f"--{role}-ports", *(str(engine.port) for engine in engines)]
    return [*command, *args]
