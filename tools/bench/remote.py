"""Servers that run already, on this machine or on others."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tools.bench.client import Target
from tools.bench.errors import BenchError
from tools.bench.servers import block_size
from tools.demo.errors import DemoError
from tools.demo.metrics import Reading, read_metrics

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RemoteServers:
    """What `servers.Servers` is for engines that this process has not started.

    prefill_url: P's API server, "" if it cannot be reached from here; then `block_tokens` has to be
    given.
    """

    target: Target
    prefill_url: str
    block_tokens: int | None

    def block_size(self) -> int:
        if self.block_tokens is not None:
            return self.block_tokens
        return block_size(self._reading(), self.prefill_url)

    def totals(self) -> dict[str, float] | None:
        """None: P has served others before, and its counts are not of this run."""
        return None

    def version(self) -> str:
        """The release that P says it is; "" if it cannot be asked."""
        if not self.prefill_url:
            return ""
        connection = http.client.HTTPConnection(
            urlsplit(self.prefill_url).netloc, timeout=_TIMEOUT_S
        )
        try:
            connection.request("GET", "/version")
            found: Mapping[str, Any] = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise BenchError(
                "P cannot be asked for its version", file=self.prefill_url, found=error
            ) from error
        finally:
            connection.close()
        return str(found.get("version", ""))

    def commands(self) -> dict[str, list[str]]:
        return {}

    def environment(self) -> dict[str, dict[str, str]]:
        return {}

    def connectors(self) -> dict[str, dict[str, Any]]:
        return {}

    def check_alive(self) -> None:
        """Nothing can be said about processes of others."""

    def _reading(self) -> Reading:
        if not self.prefill_url:
            raise BenchError(
                "the block size is not known", next_step="give --prefill-url or --block-size"
            )
        try:
            return read_metrics(self.prefill_url)
        except DemoError as error:
            raise BenchError(str(error)) from error
