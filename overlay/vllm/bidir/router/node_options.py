# SPDX-License-Identifier: Apache-2.0
"""The options about nodes: which there are, and how they are followed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from vllm.bidir.router.address import Address, make_address
from vllm.bidir.router.discovery import NodeList, read_node_list


@dataclass(frozen=True)
class NodeOptions:
    """Times in seconds. `file`: the list of nodes to follow, None when they were named by flags."""

    file: Path | None = None
    dns_interval: float = 10.0


def add_node_arguments(made: argparse.ArgumentParser) -> None:
    """The flags; those for static nodes are the sample proxy's."""
    defaults = NodeOptions()
    for role, letter, port in (("prefiller", "P", 8100), ("decoder", "D", 8200)):
        made.add_argument(
            f"--{role}-host",
            f"--{role}-hosts",
            dest=f"{role}_hosts",
            nargs="+",
            metavar="HOST",
            help=f"hosts of the {letter} nodes; dns:NAME is one node for each address of a name; "
            "default localhost",
        )
        made.add_argument(
            f"--{role}-port",
            f"--{role}-ports",
            dest=f"{role}_ports",
            type=int,
            nargs="+",
            metavar="PORT",
            help=f"their ports, one for each host; default {port}",
        )
    made.add_argument(
        "--nodes",
        type=Path,
        metavar="PATH",
        help="instead of these flags: a YAML file with the lists `prefill` and `decode` of "
        'host:port, "[IPv6]:port" or dns:name:port; when it changes, new nodes are taken in and '
        "missing ones drained; default: none",
    )
    made.add_argument(
        "--dns-interval",
        type=float,
        default=defaults.dns_interval,
        metavar="SECONDS",
        help=f"resolve dns: names anew so often; default {defaults.dns_interval:g}",
    )


def node_options(
    made: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[NodeList, NodeOptions]:
    """What was given; argparse ends the process on a contradiction (exit 2)."""
    if not 0.1 <= args.dns_interval <= 1e6:
        made.error(f"--dns-interval must be between 0.1 and 1e+06, not {args.dns_interval:g}")
    return _node_list(made, args), NodeOptions(args.nodes, args.dns_interval)


def _node_list(made: argparse.ArgumentParser, args: argparse.Namespace) -> NodeList:
    flags = (args.prefiller_hosts, args.prefiller_ports, args.decoder_hosts, args.decoder_ports)
    if args.nodes is None:
        return NodeList(
            _addresses(made, "prefiller", args.prefiller_hosts, args.prefiller_ports, 8100),
            _addresses(made, "decoder", args.decoder_hosts, args.decoder_ports, 8200),
        )
    if any(flag is not None for flag in flags):
        made.error("name nodes either by --nodes or by --prefiller-… and --decoder-…, not by both")
    try:
        return read_node_list(args.nodes)
    except ValueError as error:
        made.error(f"--nodes {args.nodes} {error}")


def _addresses(
    made: argparse.ArgumentParser,
    role: str,
    hosts: list[str] | None,
    ports: list[int] | None,
    port: int,
) -> tuple[Address, ...]:
    hosts, ports = hosts or ["localhost"], ports or [port]
    if len(hosts) != len(ports):
        made.error(
            f"--{role}-hosts names {len(hosts)} host(s) but --{role}-ports {len(ports)} port(s); "
            "give one port for each host"
        )
    for port in ports:
        if not 1 <= port <= 65535:
            made.error(f"--{role}-port must be between 1 and 65535, not {port}")
    try:
        addresses = tuple(make_address(*pair) for pair in zip(hosts, ports, strict=True))
    except ValueError as error:
        made.error(f"--{role}-host: {error}")
    if len(set(addresses)) != len(addresses):
        made.error(f"--{role}-hosts and --{role}-ports name the same node twice")
    return addresses
