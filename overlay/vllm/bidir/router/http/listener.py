# SPDX-License-Identifier: Apache-2.0
"""Listens for clients, and ends connections that nobody uses."""

from __future__ import annotations

import asyncio
import ssl

from vllm.bidir.router.http.connection import Application, ClientConnection
from vllm.bidir.router.http.reader import Limits

# Above the idle timeouts of load balancers (60 s), so that none sends on a connection that is
# being closed here.
_KEEP_ALIVE_S = 75.0
_LOOK_S = 5.0
# Clients that connect at the same moment; the system may allow fewer.
_BACKLOG = 4096
# At the end, for what is still being served, and for clients that do not read what they are told
# last.
_LEFT_OVER_S = 1.0


class Listener:
    """One address. `port` 0: any that is free."""

    def __init__(
        self,
        application: Application,
        limits: Limits,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.port = port
        self._application = application
        self._limits = limits
        self._host = host
        self._tls = tls
        self._open: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """OSError if the port cannot be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ClientConnection(self._application, self._limits, self._open),
            self._host,
            self.port,
            ssl=self._tls,
            backlog=_BACKLOG,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._sweep = loop.call_later(_LOOK_S, self._close_idle, loop)

    async def close(self) -> None:
        """Take no more; what is being served has a moment, and is then cut."""
        if self._server is not None:
            self._server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for one in tuple(self._open):
            one.end_soon()
        await self._wait_for_none()
        cut = [task for one in self._open if (task := one.cut()) is not None]
        if cut:
            await asyncio.wait(cut, timeout=_LEFT_OVER_S)
            await self._wait_for_none()
        for one in tuple(self._open):
            one.abort()
        await asyncio.sleep(0)  # they are told so

    async def _wait_for_none(self) -> None:
        deadline = asyncio.get_running_loop().time() + _LEFT_OVER_S
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    def _close_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Those on which no request has come, or no more of one, for long."""
        oldest = loop.time() - _KEEP_ALIVE_S
        for one in tuple(self._open):
            one.end_if_silent(oldest)
        self._sweep = loop.call_later(_LOOK_S, self._close_idle, loop)
