"""The router as a process of its own, over engines that this process plays."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tools.bench.router.client import Connection as ClientConnection
from tools.bench.router.engines import Connection
from tools.cluster.ports import PortReservations

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"
# How many files a process may be allowed to open.
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

# Answers a request: its connection, path and body.
Answers = Callable[[Connection, str, bytes], None]


@asynccontextmanager
async def router(prefill: Answers, decode: Answers, *args: str) -> AsyncIterator[tuple[int, int]]:
    """The port and the process id of a router in front of a P and a D that answer so.

    `args` go to its command line.
    """
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(
            lambda answer=answer: Connection(answer),  # type: ignore[misc]
            "127.0.0.1",
            0,
            backlog=2000,
        )
        for answer in (prefill, decode)
    ]
    with PortReservations() as ports:
        port = ports.reserve()
        command = [sys.executable, "-m", "vllm_bidir_router"]
        command += ["--host", "127.0.0.1", "--port", str(port), *args]
        for role, server in zip(("prefiller", "decoder"), servers, strict=True):
            at = str(server.sockets[0].getsockname()[1])
            command += [f"--{role}-host", "127.0.0.1", f"--{role}-port", at]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "PYTHONPATH": str(OVERLAY)},
            stderr=asyncio.subprocess.DEVNULL,
            # Raised by the router itself.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, HARD)),
        )
        try:
            for _ in range(600):
                try:
                    (await ClientConnection.open("127.0.0.1", port)).close()
                    break
                except OSError:
                    await asyncio.sleep(0.05)
            yield port, process.pid
        finally:
            process.kill()
            await process.wait()
            for server in servers:
                server.close()
