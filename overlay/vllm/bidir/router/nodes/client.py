# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to nodes, over connections that are kept for a while."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Callable, Mapping

import aiohappyeyeballs
from vllm.bidir.router.http.fields import encoded
from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.connection import NodeConnection
from vllm.bidir.router.nodes.names import Names
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.reply import Reply
from vllm.bidir.router.nodes.sockets import node_socket
from vllm.bidir.router.nodes.while_up import NodeDownError

# Below uvicorn's keep-alive in vLLM (5 s), so that we never write to a connection that the node
# is closing.
_KEEP_ALIVE_S = 4.0
# Of a name with several addresses the next is tried after this (RFC 8305).
_NEXT_ADDRESS_S = 0.25
_AGENT = "vllm-bidir-router"


class NodeClient:
    """Requests to any number of nodes. Redirects are not followed, and nothing is decoded.

    `connect_timeout_s` bounds everything up to a connection that can be written to. `tls` is for
    nodes with an https address; None: the system's CAs. Made within a running event loop.
    """

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        # Asked for once: each time is a system call before Python 3.12.
        self._loop = asyncio.get_running_loop()
        self._names = Names()
        self._open: set[NodeConnection] = set()
        self._idle: defaultdict[Address, dict[NodeConnection, float]] = defaultdict(dict)
        self._sweep: asyncio.TimerHandle | None = None

    async def request(
        self,
        address: Address,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        node: Node | None = None,
    ) -> Reply:
        """The answer as soon as its head is there.

        With `node` it is waited for only while that is up. Raises OSError (NodeDownError is one) or
        asyncio.TimeoutError where there is none, ValueError for a header that cannot be sent.
        """
        head = _head(address, method, path, headers, len(body))
        connection = self._kept(address) or await self._connect(address, node)
        return await connection.ask(head, body, node)

    def close(self) -> None:
        """Close all connections, whatever they are doing."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.abort()

    def _kept(self, address: Address) -> NodeConnection | None:
        """The one that was used last, unless the node may be closing it."""
        idle = self._idle.get(address)
        oldest = self._loop.time() - _KEEP_ALIVE_S
        while idle:
            connection, since = idle.popitem()
            if since > oldest and connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(self, address: Address, node: Node | None) -> NodeConnection:
        def made() -> NodeConnection:
            return NodeConnection(
                lambda connection: self._keep(address, connection),
                lambda connection: self._forget(address, connection),
            )

        async def connect() -> NodeConnection:
            connected = await aiohappyeyeballs.start_connection(
                await self._names.find(address.host, address.port),
                happy_eyeballs_delay=_NEXT_ADDRESS_S,
                interleave=1,
                socket_factory=node_socket,
            )
            secure = address.scheme == "https"
            try:
                _, connection = await self._loop.create_connection(
                    made,
                    sock=connected,
                    ssl=self._context() if secure else None,
                    server_hostname=address.server_name if secure else None,
                )
            except BaseException:
                connected.close()
                raise
            return connection

        # Not wait_for: before Python 3.12 it may lose a cancellation.
        connecting = asyncio.ensure_future(connect())
        awaited: set[Callable[[], object]] = set() if node is None else node.awaited
        awaited.add(connecting.cancel)
        try:
            await asyncio.wait({connecting}, timeout=self._connect_timeout_s)
            if connecting.cancelled():
                raise NodeDownError
            if connecting.done():
                connection = connecting.result()
                self._open.add(connection)
                return connection
            raise asyncio.TimeoutError(f"no connection within {self._connect_timeout_s:g} s")
        except BaseException:
            connecting.add_done_callback(_abort)
            connecting.cancel()
            raise
        finally:
            awaited.discard(connecting.cancel)

    def _context(self) -> ssl.SSLContext:
        # When it is needed: the system's CAs take megabytes.
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _keep(self, address: Address, connection: NodeConnection) -> None:
        self._idle[address][connection] = self._loop.time()
        if self._sweep is None:
            self._sweep = self._loop.call_later(_KEEP_ALIVE_S, self._close_old)

    def _forget(self, address: Address, connection: NodeConnection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(address)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[address]

    def _close_old(self) -> None:
        oldest = self._loop.time() - _KEEP_ALIVE_S
        for idle in self._idle.values():
            for connection, since in idle.items():
                if since <= oldest:
                    connection.abort()
        waiting = any(self._idle.values())
        self._sweep = self._loop.call_later(_KEEP_ALIVE_S, self._close_old) if waiting else None


def _abort(connecting: asyncio.Future[NodeConnection]) -> None:
    """A connection that nobody waits for any more, if it has been made all the same."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().abort()


def _head(
    address: Address, method: str, path: str, headers: Mapping[str, str], length: int
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {address.text}",
        f"User-Agent: {_AGENT}",
        "Accept: */*",
        "Accept-Encoding: identity",
        *[f"{name}: {value}" for name, value in headers.items()],
    ]
    if method == "POST":
        lines.append(f"Content-Length: {length}")
    return encoded(lines)
