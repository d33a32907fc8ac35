# SPDX-License-Identifier: Apache-2.0
"""Where a node's HTTP server is: `host:port`, or a DNS name that stands for many nodes.

With `https://` before it the node is spoken to in TLS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Before a name whose every address is a node of its own, such as a headless Kubernetes service.
MANY = "dns:"

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")


@dataclass(frozen=True)
class Address:
    """Host and port. `many`: the host is a name to be resolved, to one node for each address."""

    host: str
    port: int
    scheme: str = "http"
    many: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{MANY if self.many else ''}{host}:{self.port}"


def make_address(host: str, port: int) -> Address:
    """An address of a host as people write it: with brackets, `dns:` before a name, `https://`.

    Raises ValueError whose text says what is wrong.
    """
    scheme, found, host = host.rpartition("://")
    if found and scheme not in ("http", "https"):
        raise ValueError(f"{scheme[:20]!r} is neither http nor https")
    if not 1 <= port <= 65535:
        raise ValueError(f"a port must be between 1 and 65535, not {port}")
    many = host.startswith(MANY)
    bare = host.removeprefix(MANY)
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    if ":" in bare:
        if many or not _IPV6.fullmatch(bare):
            raise ValueError(f"{host[:200]!r} is neither a host name nor an IP address")
    elif not _NAME.fullmatch(bare):
        raise ValueError(f"{host[:200]!r} is neither a host name nor an IP address")
    return Address(bare, port, scheme if found else "http", many)


def parse_address(text: str) -> Address:
    """`host:port`, `[IPv6]:port` or `dns:name:port`; ValueError says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5:
        raise ValueError(f"{text[:200]!r} does not end in a port; write host:port")
    if ":" in host.rpartition("://")[2].removeprefix(MANY) and not host.endswith("]"):
        raise ValueError(f"write {text[:200]!r} with brackets around its IPv6 address")
    return make_address(host, int(port))
