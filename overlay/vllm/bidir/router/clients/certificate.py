# SPDX-License-Identifier: Apache-2.0
"""The server's certificate without a restart: its files are read again when they change.

Those who renew certificates do it every few weeks, and nobody is there then. Files that are of no
use, such as a new certificate beside the old key, change nothing.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.process.followed import LOOK_S, FollowedFile
from vllm.bidir.router.telemetry.metrics import Metrics

logger = logging.getLogger("vllm_bidir_router")


class ServerCertificate:
    """TLS towards clients: `context` is for the listener. OSError if the files are of no use."""

    def __init__(self, security: Security, metrics: Metrics) -> None:
        assert security.tls is not None
        self._security = security
        self._metrics = metrics
        self._chain, self._key = security.tls
        self._files = [FollowedFile(path) for path in {self._chain, self._key}]
        self._pem = self._chain.read_bytes()
        self.context = self._now = security.server_context()
        # Another context for each new version: in the same one a certificate for another kind of
        # key would stand beside the old one, and one without its key would take its place.
        self.context.sni_callback = self._choose

    async def run(self) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            changed = [await file.has_changed() for file in self._files]
            if any(changed):
                await self._read_again()

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """A client has said hello, whether or not it has said to whom."""
        connection.context = self._now

    async def _read_again(self) -> None:
        try:
            # Before: what is said to be new is in use, also if the file changes in between.
            pem = await asyncio.to_thread(self._chain.read_bytes)
            now = await asyncio.to_thread(self._security.server_context)
        except OSError as error:
            self._metrics.key_file_errors.inc()
            why = error.strerror or type(error).__name__
            logger.error(
                "%s and %s cannot be used: %s; the certificate stays as it was",
                self._chain,
                self._key,
                why,
            )
            return
        self._now = now
        if pem != self._pem:
            self._pem = pem
            logger.info("the server's certificate is a new one: %s", self._chain)
