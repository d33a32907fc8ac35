# SPDX-License-Identifier: Apache-2.0
"""Which nodes there are: as told, from a file that may change, by names that may move.

The list is looked at once a second, names are resolved anew at an interval. What cannot be read or
resolved changes nothing: a name server that is down, or a file half written, must not empty a pool.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from vllm.bidir.router.nodes.address import Address, parse_address
from vllm.bidir.router.nodes.names import look_up
from vllm.bidir.router.nodes.pool import Pool
from vllm.bidir.router.process.followed import LOOK_S, FollowedFile
from vllm.bidir.router.telemetry.metrics import Metrics

logger = logging.getLogger("vllm_bidir_router")

_ROLES = ("prefill", "decode")
_MOST_BYTES = 1 << 20
_RESOLVE_S = 5.0
_JITTER = 0.1


@dataclass(frozen=True)
class NodeList:
    """Addresses of both roles, as configured: a `many` stands for all that its name resolves to."""

    prefill: tuple[Address, ...]
    decode: tuple[Address, ...]

    def all(self) -> tuple[Address, ...]:
        return (*self.prefill, *self.decode)


def read_node_list(path: Path) -> NodeList:
    """The list in a YAML file; ValueError names everything that is wrong with it.

    A mapping of `prefill` and `decode`, each a list of `host:port`, `"[IPv6]:port"` or
    `dns:name:port`. A role that is missing has no nodes.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    if len(text) > _MOST_BYTES:
        raise ValueError(f"is larger than {_MOST_BYTES} bytes")
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(found, dict) or not found or not set(found) <= set(_ROLES):
        raise ValueError("must be a mapping with `prefill` and `decode`, each a list of host:port")
    wrong: list[str] = []
    made = {role: _addresses(role, found.get(role), wrong) for role in _ROLES}
    if wrong:
        raise ValueError("; ".join(wrong))
    return NodeList(**made)


def _addresses(role: str, entries: Any, wrong: list[str]) -> tuple[Address, ...]:
    if entries is None:
        return ()
    if not isinstance(entries, list):
        wrong.append(f"`{role}` must be a list")
        return ()
    made: dict[str, Address] = {}
    for entry in entries:
        try:
            if not isinstance(entry, str):
                raise ValueError(f"{str(entry)[:200]!r} must be text; put it in quotes")
            address = parse_address(entry)
            if str(address) in made:
                raise ValueError(f"{address} is named twice")
            made[str(address)] = address
        except ValueError as error:
            wrong.append(f"`{role}`: {error}")
    return tuple(made.values())


async def resolve(name: str, port: int) -> list[str]:
    """All IP addresses of a name, in order; of one family, since nodes may have one in each.

    OSError if there is none.
    """
    found = await look_up(name, port)
    family = found[0][0]
    return sorted({str(one[4][0]) for one in found if one[0] == family})


class Discovery:
    """Keeps two pools as the configuration says."""

    def __init__(
        self,
        wanted: NodeList,
        file: Path | None,
        dns_interval_s: float,
        prefill: Pool,
        decode: Pool,
        metrics: Metrics,
    ) -> None:
        self._wanted = wanted
        self._file = None if file is None else FollowedFile(file)
        self._dns_interval_s = dns_interval_s
        self._pools = {"prefill": prefill, "decode": decode}
        self._metrics = metrics
        self._resolved: dict[Address, tuple[Address, ...]] = {}
        self._silent: set[Address] = set()
        self._next_dns = 0.0

    async def start(self) -> None:
        """Resolve all names, so that the first turn finds nodes."""
        await self._resolve_names(self._names())
        self._apply()

    async def run(self) -> None:
        """Follow the file and the names until cancelled; after `start`."""
        while True:
            await asyncio.sleep(LOOK_S)
            changed = (
                self._file is not None
                and await self._file.has_changed()
                and await self._read_again(self._file.path)
            )
            now = time.monotonic()
            due = now >= self._next_dns
            names = [name for name in self._names() if due or name not in self._resolved]
            if due:
                self._next_dns = now + self._dns_interval_s * random.uniform(
                    1 - _JITTER, 1 + _JITTER
                )
            await self._resolve_names(names)
            if changed or names:
                self._apply()

    def _names(self) -> list[Address]:
        return [address for address in self._wanted.all() if address.many]

    def _apply(self) -> None:
        for role, pool in self._pools.items():
            wanted: Iterable[Address] = getattr(self._wanted, role)
            pool.set_addresses(
                node
                for address in wanted
                for node in (self._resolved.get(address, ()) if address.many else (address,))
            )

    async def _read_again(self, path: Path) -> bool:
        """Read the file, which has changed; whether there is a new list."""
        try:
            self._wanted = await asyncio.to_thread(read_node_list, path)
        except ValueError as error:
            self._metrics.node_list_error("file")
            logger.error("%s %s; the nodes stay as they were", path, error)
            return False
        self._resolved = {name: self._resolved.get(name, ()) for name in self._names()}
        self._resolved = {name: nodes for name, nodes in self._resolved.items() if nodes}
        return True

    async def _resolve_names(self, names: list[Address]) -> None:
        await asyncio.gather(*(self._resolve_name(name) for name in names))

    async def _resolve_name(self, name: Address) -> None:
        try:
            hosts = await asyncio.wait_for(resolve(name.host, name.port), _RESOLVE_S)
        except (OSError, asyncio.TimeoutError) as error:
            self._metrics.node_list_error(str(name))
            if name not in self._silent:
                self._silent.add(name)
                logger.warning("%s cannot be resolved: %s; it is tried again", name, error)
            return
        self._silent.discard(name)
        # Pods have certificates for their service's name, and hardly for addresses that change.
        by = name.host if name.scheme == "https" else None
        self._resolved[name] = tuple(
            Address(host, name.port, name.scheme, found_by=by) for host in hosts
        )
