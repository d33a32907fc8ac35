# SPDX-License-Identifier: Apache-2.0
"""Where a node's NIXL side channel is, and which kv_transfer_params may name it.

Params of one node send another node to a host and a port. The host is never taken from an answer:
it is the one under which the router reaches the node, or the one that --side-channel names. The
port is the one that --side-channel names, else the one that the same engine has named before.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.bidir.router.nodes import Node

# A restart, or a data-parallel rank, is an engine id of its own.
_ENGINES_PER_NODE = 256
_MAX_ENGINE_ID = 512
_GIVEN = re.compile(
    r"(?P<node>\S+)=(?P<host>\[[^\[\]=]+\]|[^\[\]:=\s]+)(:(?P<low>\d{1,5})(-(?P<high>\d{1,5}))?)?"
)


@dataclass(frozen=True)
class SideChannel:
    """A node's side channel as an operator has named it. Without ports: any constant one."""

    host: str
    ports: range | None = None


@dataclass
class _Port:
    """The port that an engine names. One answer with `moved` has been dropped, if it is not 0."""

    known: int
    moved: int = 0


class SideChannels:
    """What is known of all nodes' side channels. `given` is by node name (host:port)."""

    def __init__(self, given: Mapping[str, SideChannel]) -> None:
        self._given = given
        self._ports: dict[str, OrderedDict[str, _Port]] = {}
        # Several under one name while one of them drains, or where one is both P and D.
        self._nodes: dict[str, set[Node]] = {}

    def joined(self, node: Node) -> None:
        """Nothing is known of it until it has told."""
        self._nodes.setdefault(node.name, set()).add(node)

    def left(self, node: Node) -> None:
        """Turns may still run on it."""

    def gone(self, node: Node) -> None:
        """What comes back under its name may be another engine."""
        others = self._nodes.get(node.name, set())
        others.discard(node)
        if not others:
            self._nodes.pop(node.name, None)
            self._ports.pop(node.name, None)

    def admit(self, params: dict[str, Any], node: str, host: str) -> dict[str, Any] | None:
        """A node's params with the host of its side channel; None if they name another port.

        `host` is the one under which the router reaches the node.
        Params that name nothing (D says why it has kept nothing) come back as they are.
        """
        if params.get("remote_port") is None and not params.get("remote_block_ids"):
            return params
        return self._admit(params, node, host, self._is_constant)

    def recognise(self, params: dict[str, Any], node: str, host: str) -> dict[str, Any] | None:
        """The same of params that have not come from the node itself: they teach nothing.

        Only a port that the engine has named here before is one that it has.
        """
        return self._admit(params, node, host, self._is_known)

    def _admit(
        self,
        params: dict[str, Any],
        node: str,
        host: str,
        may_name: Callable[[str, str, int], bool],
    ) -> dict[str, Any] | None:
        given = self._given.get(node)
        engine, port = params.get("remote_engine_id"), params.get("remote_port")
        if not isinstance(engine, str) or not 0 < len(engine) <= _MAX_ENGINE_ID:
            return None
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            return None
        if given is not None and given.ports is not None:
            if port not in given.ports:
                return None
        elif not may_name(node, engine, port):
            return None
        return {**params, "remote_host": host if given is None else given.host}

    def _is_known(self, node: str, engine: str, port: int) -> bool:
        ports = self._ports.get(node)
        here = None if ports is None else ports.get(engine)
        return here is not None and here.known == port

    def _is_constant(self, node: str, engine: str, port: int) -> bool:
        """Whether this engine has named no other port; two in a row that agree have moved it.

        An engine id that an operator has fixed may come back on another port after a restart.
        """
        ports = self._ports.setdefault(node, OrderedDict())
        here = ports.setdefault(engine, _Port(port))
        ports.move_to_end(engine)
        if len(ports) > _ENGINES_PER_NODE:
            ports.popitem(last=False)
        if port == here.known:
            here.moved = 0
            return True
        if port == here.moved:
            here.known, here.moved = port, 0
            return True
        here.moved = port
        return False


def parse_side_channel(text: str) -> tuple[str, SideChannel]:
    """A node's name and its side channel from `NODE=HOST[:PORT[-PORT]]`; ValueError."""
    found = _GIVEN.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not NODE=HOST[:PORT[-PORT]]")
    host = found["host"].strip("[]")
    if found["low"] is None:
        return found["node"], SideChannel(host)
    low = int(found["low"])
    high = int(found["high"] or low)
    if not 0 < low <= high < 65536:
        raise ValueError(f"{text!r}: ports lie between 1 and 65535, the lower first")
    return found["node"], SideChannel(host, range(low, high + 1))
