# SPDX-License-Identifier: Apache-2.0
"""New keys without a restart: the key files are read again when they change.

A file that is of no use changes nothing, neither who may ask nor what engines are shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from vllm.bidir.router.clients.keys import Keys, engine_key, read_key_file
from vllm.bidir.router.clients.security import client_keys
from vllm.bidir.router.process.followed import LOOK_S, FollowedFile
from vllm.bidir.router.telemetry.metrics import Metrics

logger = logging.getLogger("vllm_bidir_router")


class KeyRotation:
    """Keeps `keys` as the files say; None for keys that were not given in a file."""

    def __init__(
        self, keys: Keys, clients: Path | None, engine: Path | None, metrics: Metrics
    ) -> None:
        self._keys = keys
        self._metrics = metrics
        self._files: list[tuple[FollowedFile, Callable[[str], None]]] = []
        if clients is not None:
            self._files.append((FollowedFile(clients), self._take_clients))
        if engine is not None:
            self._files.append((FollowedFile(engine), self._take_engine))

    async def run(self) -> None:
        """Follow the files until cancelled."""
        while self._files:
            await asyncio.sleep(LOOK_S)
            for file, take in self._files:
                if await file.has_changed():
                    await self._read_again(file.path, take)

    async def _read_again(self, path: Path, take: Callable[[str], None]) -> None:
        try:
            take(await asyncio.to_thread(read_key_file, path))
        except ValueError as error:
            self._metrics.key_file_errors.inc()
            logger.error("%s %s; the keys stay as they were", path, error)

    def _take_clients(self, text: str) -> None:
        new = client_keys(text)
        if new != self._keys.clients:
            added, gone = len(new - self._keys.clients), len(self._keys.clients - new)
            logger.info("clients' keys: %d added, %d gone", added, gone)
        self._keys.clients = new

    def _take_engine(self, text: str) -> None:
        new = engine_key(text)
        if new != self._keys.engine:
            logger.info("the engines' key is a new one")
        self._keys.engine = new
