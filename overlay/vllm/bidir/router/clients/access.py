# SPDX-License-Identifier: Apache-2.0
"""Who may use the router, whose conversations are whose, and what engines are shown."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.keys import Keys
from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.http.request import Request

TENANT_HEADER = "X-Tenant-ID"
_MAX_TENANT = 512
# What probes, scrapers, browsers and tools ask, which carry no key.
_OPEN = frozenset(("/", "/status", "/health", "/ready", "/metrics", "/version", "/openapi.json"))


class Access:
    """The rules of one router, for keys that may change."""

    def __init__(self, security: Security, keys: Keys) -> None:
        self._keys = keys
        self._tenant_header = security.tenant_header
        self._replaces = security.replaces_authorization(keys.engine)

    def check(self, request: Request) -> None:
        """ClientError 401 for what carries none of the clients' keys, if there are any."""
        if self._keys.clients and request.path not in _OPEN and not self._has_key(request.headers):
            raise ClientError(401, "Give an API key: `Authorization: Bearer KEY` or `X-API-Key`.")

    def tenant(self, headers: Mapping[str, str]) -> str:
        """What keeps the conversations of different clients apart; never shown, only digested."""
        if self._tenant_header and TENANT_HEADER in headers:
            name = headers[TENANT_HEADER]
            if not 0 < len(name) <= _MAX_TENANT:
                limit = f"1 to {_MAX_TENANT} characters"
                raise ClientError(400, f"`{TENANT_HEADER}` must have {limit}.", TENANT_HEADER)
            # No header can hold this character: no key is mistaken for a tenant.
            return f"\0{name}"
        return _credentials(headers) or ""

    def authorization(self, headers: Mapping[str, str]) -> str | None:
        """The Authorization header that engines get for a client's request."""
        return bearer(self._keys.engine) if self._replaces else _credentials(headers)

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        scheme, _, key = (_credentials(headers) or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = False
        for known in self._keys.clients:
            # All of them, so that time tells nothing.
            found |= hmac.compare_digest(given, known)
        return found


def bearer(key: str | None) -> str | None:
    """An Authorization header with this key."""
    return None if key is None else f"Bearer {key}"


def _credentials(headers: Mapping[str, str]) -> str | None:
    """The Authorization header, or what Anthropic's clients send in its place."""
    given = headers.get("Authorization")
    if given is None and "X-API-Key" in headers:
        return f"Bearer {headers['X-API-Key']}"
    return given
