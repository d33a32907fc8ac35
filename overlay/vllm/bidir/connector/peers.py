# SPDX-License-Identifier: Apache-2.0
"""What kv_transfer_params may look like, and which hosts they may name: option `kv_peers`.

Params come with a request. Without a list, whoever may send a request may have this engine connect
to any host and port; with one, other hosts are refused before the engine sees the request.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

OPTION = "kv_peers"

# Fields that are numbers, with the least and the most that can be meant.
_INTEGERS = (
    ("remote_port", 1, 65535),
    ("tp_size", 1, 1024),
    ("dcp_size", 1, 1024),
    ("pp_size", 1, 1024),
    ("remote_num_tokens", 0, 1 << 31),
)
# Without one of these a handover can neither be read nor be declined.
_HANDOVER = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
)

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class PeerList:
    """Host names, which must match as they are written, and networks for literal addresses."""

    names: frozenset[str]
    networks: tuple[_Network, ...]

    def allows(self, host: object) -> bool:
        if not isinstance(host, str):
            return False
        if host.lower() in self.names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self.networks)


@lru_cache(maxsize=8)
def parse_peers(entries: tuple[str, ...]) -> PeerList:
    """`entries` are host names, addresses or CIDRs; ValueError for what is none of them."""
    names: set[str] = set()
    networks: list[_Network] = []
    for entry in entries:
        if not isinstance(entry, str) or not entry.strip():
            raise ValueError(f"{OPTION}: {entry!r} is no host name, address or CIDR")
        try:
            networks.append(ipaddress.ip_network(entry))
        except ValueError:
            if "/" in entry or " " in entry:
                raise ValueError(
                    f"{OPTION}: {entry!r} is no network; write it like 10.0.0.0/24"
                ) from None
            names.add(entry.lower())
    return PeerList(frozenset(names), tuple(networks))


def check_peers(entries: object) -> PeerList | None:
    """The option's value, parsed; None when it is not set, ValueError when it cannot be used."""
    if entries is None:
        return None
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"{OPTION} must be a list of hosts, not {entries!r}")
    return parse_peers(tuple(entries))


def check_host(entries: object, host: object) -> None:
    """ValueError if `host` is not one of the peers."""
    peers = check_peers(entries)
    if peers is not None and host is not None and not peers.allows(host):
        # The host is the sender's own text; the list is not the sender's business.
        raise ValueError(
            f"kv_transfer_params name the host {str(host)[:100]!r}, which is not one of this "
            f"engine's {OPTION}"
        )


def check_shape(transfer: object) -> None:
    """ValueError unless kv_transfer_params are a dict whose known fields have their types.

    Behind this point schedulers and workers read them without a net, and size lists by them.
    """
    if not isinstance(transfer, dict):
        raise ValueError(f"kv_transfer_params must be an object, not {type(transfer).__name__}")
    for key in ("remote_engine_id", "remote_request_id", "remote_host", "lease_id"):
        if not _is_text(transfer.get(key)):
            raise ValueError(f"kv_transfer_params.{key} must be a string")
    for key, least, most in _INTEGERS:
        value = transfer.get(key)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise ValueError(f"kv_transfer_params.{key} must be an integer of {least} to {most}")
    expiry = transfer.get("remote_blocks_expiry_time")
    if expiry is not None and (isinstance(expiry, bool) or not isinstance(expiry, (int, float))):
        raise ValueError("kv_transfer_params.remote_blocks_expiry_time must be a number")
    blocks = transfer.get("remote_block_ids")
    if blocks is not None and not (
        isinstance(blocks, (list, tuple)) and all(_are_block_ids(group) for group in blocks)
    ):
        raise ValueError("kv_transfer_params.remote_block_ids must be lists of block ids")
    if transfer.get("do_remote_prefill"):
        for key in _HANDOVER:
            if not transfer.get(key):
                raise ValueError(f"kv_transfer_params with do_remote_prefill need {key}")


def _is_text(value: object) -> bool:
    """A string that can be sent, or None: half of a surrogate pair cannot."""
    if not isinstance(value, str):
        return value is None
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_block_ids(group: object) -> bool:
    # bool is an int in Python, and no block's id is a truth value.
    return isinstance(group, (list, tuple)) and all(type(k) is int and k >= 0 for k in group)
