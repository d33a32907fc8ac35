# SPDX-License-Identifier: Apache-2.0
"""Where a node's HTTP server is: `host:port`, or a DNS name that stands for many nodes.

With `https://` before it the node is spoken to in TLS.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import cached_property

# Before a name whose every address is a node of its own, such as a headless Kubernetes service.
MANY = "dns:"

# Python raises no OSError where a name has an empty or a longer one.
_LONGEST_LABEL = 63
_LABEL = re.compile(rf"[A-Za-z0-9_-]{{1,{_LONGEST_LABEL}}}")


@dataclass(frozen=True)
class Address:
    """Host and port. `many`: the host is a name to be resolved, to one node for each address.

    `found_by`: the name that it was found by, where the node must prove that it has it (TLS).
    """

    host: str
    port: int
    scheme: str = "http"
    many: bool = False
    found_by: str | None = None

    @property
    def server_name(self) -> str:
        """What a certificate must be for: a name without the last dot, or an IP address."""
        return (self.found_by or self.host).partition("%")[0].removesuffix(".")

    @cached_property
    def text(self) -> str:
        """As people write it, without a scheme; made once, since each turn says it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{MANY if self.many else ''}{host}:{self.port}"

    def __str__(self) -> str:
        return self.text


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
    if (many and ":" in bare) or not is_host(bare):
        raise ValueError(
            f"{host[:200]!r} is neither a host name nor an IP address; a name's parts between its "
            f"dots have 1 to {_LONGEST_LABEL} letters, digits, - or _"
        )
    return Address(bare, port, scheme if found else "http", many)


def is_host(text: str) -> bool:
    """Whether it is a host name that can be looked up, or an IP address without brackets."""
    if ":" in text:
        address, scoped, scope = text.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return False
        return not scoped or _has_labels(scope)
    return _has_labels(text.removesuffix("."))


def _has_labels(text: str) -> bool:
    return all(_LABEL.fullmatch(label) for label in text.split("."))


def parse_address(text: str) -> Address:
    """`host:port`, `[IPv6]:port` or `dns:name:port`; ValueError says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or len(port) > 5:
        raise ValueError(f"{text[:200]!r} does not end in a port; write host:port")
    if ":" in host.rpartition("://")[2].removeprefix(MANY) and not host.endswith("]"):
        raise ValueError(f"write {text[:200]!r} with brackets around its IPv6 address")
    return make_address(host, int(port))
