# SPDX-License-Identifier: Apache-2.0
"""Where a node's NIXL side channel is, and which kv_transfer_params may name it.

Params of one node send another node to a host and a port. The host is never taken from an answer:
it is the one under which the router reaches the node, or the one that --side-channel names. The
port is the one that --side-channel names, else the one that the same engine has named before. What
an engine names stays the same while it lives, and no two nodes have an engine in common.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.bidir.router.nodes.node import Node

logger = logging.getLogger("vllm_bidir_router")

# A restart, or a data-parallel rank, is an engine id of its own.
_ENGINES_PER_NODE = 256
_MAX_ENGINE_ID = 512
_MAX_HOST = 255
_GIVEN = re.compile(
    r"(?P<node>\S+)=(?P<host>\[[^\[\]=]+\]|[^\[\]:=\s]+)(:(?P<low>\d{1,5})(-(?P<high>\d{1,5}))?)?"
)


@dataclass(frozen=True)
class SideChannel:
    """A node's side channel as an operator has named it. Without ports: any constant one."""

    host: str
    ports: range | None = None


class _Place(NamedTuple):
    """Where an engine says that its side channel is. It need not name a host; see `admit`."""

    host: str | None
    port: int


@dataclass
class _Engine:
    """What an engine names. One answer with `moved` has been dropped, if it is not None."""

    known: _Place
    moved: _Place | None = None


class SideChannels:
    """What is known of all nodes' side channels. `given` is by node name (host:port)."""

    def __init__(self, given: Mapping[str, SideChannel]) -> None:
        self._given = given
        self._engines: dict[str, OrderedDict[str, _Engine]] = {}
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
            self._engines.pop(node.name, None)

    def admit(self, params: dict[str, Any], node: str, host: str) -> dict[str, Any] | None:
        """A node's params with the host of its side channel; None if they name another one than
        the same engine has before, or an engine that is another node's.

        `host` is the one under which the router reaches the node. An engine may name a host that is
        no use elsewhere, such as localhost, as long as it is the same one.
        Params that name nothing (D says why it has kept nothing) come back as they are.
        """
        if params.get("remote_port") is None and not params.get("remote_block_ids"):
            return params
        given = self._given.get(node)
        named = self._named(params, node, given)
        if named is None:
            return None
        engine, place = named
        told = host if given is None else given.host
        if not self._is_constant(node, engine, place, told, given):
            return None
        return {**params, "remote_host": told}

    def recognise(self, params: dict[str, Any], node: str, host: str) -> dict[str, Any] | None:
        """The same of params that have not come from the node itself: they teach nothing.

        Only a port that the engine has named here before is one that it has. Their host is the one
        that a router has put there.
        """
        given = self._given.get(node)
        named = self._named(params, node, given)
        if named is None:
            return None
        engine, place = named
        if given is None or given.ports is None:
            engines = self._engines.get(node)
            here = None if engines is None else engines.get(engine)
            if here is None or here.known.port != place.port:
                return None
        return {**params, "remote_host": host if given is None else given.host}

    def _named(
        self, params: dict[str, Any], node: str, given: SideChannel | None
    ) -> tuple[str, _Place] | None:
        """The engine and its side channel, if both are of a kind that this node may name."""
        engine, port = params.get("remote_engine_id"), params.get("remote_port")
        host = params.get("remote_host")
        if not isinstance(engine, str) or not 0 < len(engine) <= _MAX_ENGINE_ID:
            return None
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
            return None
        if host is not None and (not isinstance(host, str) or not 0 < len(host) <= _MAX_HOST):
            return None
        ports = None if given is None else given.ports
        if (ports is not None and port not in ports) or self._is_anothers(node, engine):
            return None
        return engine, _Place(host, port)

    def _is_anothers(self, node: str, engine: str) -> bool:
        """Nodes know each other by their engines' ids: one that has two places leads astray."""
        if engine in self._engines.get(node, ()):
            return False
        return any(engine in engines for engines in self._engines.values())

    def _is_constant(
        self, node: str, engine: str, place: _Place, told: str, given: SideChannel | None
    ) -> bool:
        """Whether this engine has named no other place; two in a row that agree have moved it.

        An engine id that an operator has fixed may come back elsewhere after a restart. Which of
        the ports that an operator has named does not matter.
        """
        if given is not None and given.ports is not None:
            place = place._replace(port=0)
        engines = self._engines.setdefault(node, OrderedDict())
        here = engines.get(engine)
        if here is None:
            here = engines[engine] = _Engine(place)
            if place.host != told:
                # Not the name itself: it may be anything.
                logger.info(
                    "an engine of %s names another host of its side channel; others are told %s",
                    node,
                    told,
                )
        engines.move_to_end(engine)
        if len(engines) > _ENGINES_PER_NODE:
            engines.popitem(last=False)
        if place == here.moved:
            here.known = place
        here.moved = None if place == here.known else place
        return here.moved is None


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
