# SPDX-License-Identifier: Apache-2.0
"""Connections to nodes, on which a host that has vanished is noticed.

A process that dies closes its connections, a host that loses power or network does not: without
this a turn would wait there for a quarter of an hour or for ever.
"""

from __future__ import annotations

import socket

from aiohappyeyeballs import AddrInfoType

# Seconds of silence before the first probe and between probes, and how many may go unanswered.
_IDLE_S, _BETWEEN_S, _PROBES = 10, 5, 3
# How long sent bytes may go unacknowledged, in milliseconds.
_UNACKNOWLEDGED_MS = 25_000


def node_socket(address: AddrInfoType) -> socket.socket:
    """A TCP socket to a node: it fails within half a minute after the host has gone."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _BETWEEN_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        # Not every system has all of them.
        option = getattr(socket, name, None)
        if option is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
