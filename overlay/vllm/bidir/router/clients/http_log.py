# SPDX-License-Identifier: Apache-2.0
"""The HTTP server's own log lines, without what a client has sent.

aiohttp puts the offending line of a malformed request into its exception: a key, as often as not.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from aiohttp.http_exceptions import HttpProcessingError

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter  # before Python 3.11 it takes no type


class HttpLog(Adapter):
    """Says what kind of malformed request came, and from where, and nothing of it."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError):
            kwargs["exc_info"] = None
            msg = f"{msg}: {type(error).__name__}"
        return msg, kwargs
