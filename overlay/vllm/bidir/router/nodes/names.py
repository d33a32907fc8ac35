# SPDX-License-Identifier: Apache-2.0
"""Addresses of nodes' names, looked up once for all who ask at about the same time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from aiohappyeyeballs import AddrInfoType

_KEPT_S = 10.0


class Names:
    """Look-ups of any number of names, each kept for ten seconds."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], asyncio.Task[Sequence[AddrInfoType]]] = {}

    async def find(self, host: str, port: int) -> Sequence[AddrInfoType]:
        """All addresses of a host; OSError if there is none."""
        asked = self._asked.get((host, port))
        if asked is None:
            asked = self._asked[host, port] = asyncio.create_task(look_up(host, port))
            asked.add_done_callback(lambda found: self._keep((host, port), found))
        # One who gives up does not spoil it for the others.
        return await asyncio.shield(asked)

    def _keep(self, name: tuple[str, int], found: asyncio.Task[Sequence[AddrInfoType]]) -> None:
        # Asking for the exception marks it as seen, where all who asked have given up.
        if found.cancelled() or found.exception() is not None:
            del self._asked[name]
        else:
            found.get_loop().call_later(_KEPT_S, self._asked.pop, name, None)


async def look_up(host: str, port: int) -> Sequence[AddrInfoType]:
    """All addresses of a host; OSError if there is none."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # what is no name is no OSError to Python
        raise socket.gaierror(socket.EAI_NONAME, "this is no host name") from error
