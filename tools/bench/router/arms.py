"""What is measured: nothing in between, our router, and the base release's sample proxy."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools.bench.stock import ROOT, SAMPLE_PROXY, source_file
from tools.cluster.ports import PortReservations
from tools.cluster.process import ManagedProcess
from tools.cluster.readiness import Report, answers_health, wait_until_ready
from tools.cluster.router import GRACE_S, RouterProcess, router_command

DIRECT, OURS, SAMPLE = "direct", "ours", "sample proxy"
# Ours, with its state in a Redis that others may share.
SHARED = "ours, Redis"
ARMS = (DIRECT, OURS, SAMPLE)
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Address:
    """One scripted engine."""

    host: str
    port: int


class Engines:
    """The running process of both scripted engines."""

    name = "engines"

    def __init__(self, process: ManagedProcess, prefill: int, decode: int) -> None:
        self.process = process
        self.prefill = Address(_HOST, prefill)
        self.decode = Address(_HOST, decode)

    def is_ready(self) -> bool:
        self.process.check_alive()
        return all(answers_health(one.host, one.port) for one in (self.prefill, self.decode))


One = TypeVar("One", Engines, RouterProcess)


@contextmanager
def engines(
    core: int, tokens: int, lease_s: float | None, folder: Path, report: Report
) -> Iterator[Engines]:
    """Start the engines on a core, and end them on leaving."""
    with PortReservations() as ports:
        prefill, decode = ports.reserve(), ports.reserve()
        command = [sys.executable, "-m", "tools.bench.router.engines", "--tokens", str(tokens)]
        command += ["--prefill-port", str(prefill), "--decode-port", str(decode)]
        if lease_s is not None:
            command += ["--lease", str(lease_s)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": path}
        process = ManagedProcess("engines", command, folder / "engines.log", env, cores=[core])
        yield from _running(process, Engines(process, prefill, decode), report)


@contextmanager
def between(
    arm: str,
    python: Path,
    in_front_of: Engines,
    core: int,
    folder: Path,
    report: Report,
    redis: str | None = None,
) -> Iterator[RouterProcess | None]:
    """Start an arm's router on a core, as an operator would; None for the arm without one."""
    if arm == DIRECT:
        yield None
        return
    with PortReservations() as ports:
        port = ports.reserve()
        prefill, decode = [in_front_of.prefill], [in_front_of.decode]
        if arm == OURS:
            command = router_command(python, port, prefill, decode)
        elif arm == SHARED:
            assert redis is not None  # it is what asks for this arm
            command = [*router_command(python, port, prefill, decode), "--state", redis]
        else:
            command = sample_command(python, port, prefill, decode, folder, report)
        name = arm.replace(",", "").replace(" ", "-")
        log = folder / f"{name}.log"
        process = ManagedProcess(name, command, log, cores=[core], grace_s=GRACE_S)
        yield from _running(process, RouterProcess(name, port, process), report)


def sample_command(
    python: Path,
    port: int,
    prefill: Sequence[Address],
    decode: Sequence[Address],
    folder: Path,
    report: Report,
) -> list[str]:
    """The sample proxy's command line; its flags are those of our router."""
    script = source_file(SAMPLE_PROXY, folder / "source", report).absolute()
    ours = router_command(python, port, prefill, decode)
    return [str(python), str(script), *ours[3:]]


def _running(process: ManagedProcess, one: One, report: Report) -> Iterator[One]:
    try:
        process.start()
        wait_until_ready([one], _START_TIMEOUT_S, report)
        yield one
    finally:
        process.stop()
