# SPDX-License-Identifier: Apache-2.0
"""The options about nodes: which there are, and how they are followed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from vllm.bidir.router.nodes import policies
from vllm.bidir.router.nodes.address import Address, make_address
from vllm.bidir.router.nodes.discovery import NodeList, read_node_list
from vllm.bidir.router.nodes.health import HealthRules
from vllm.bidir.router.nodes.pool import Limits


@dataclass(frozen=True)
class NodeOptions:
    """Times in seconds. `file`: the list of nodes to follow, None when they were named by flags."""

    file: Path | None = None
    dns_interval: float = 10.0
    health_interval: float = 2.0
    eject_after: int = 3
    eject_time: float = 1.0
    slow_start: float = 10.0
    prefill_in_flight: int = 0
    decode_in_flight: int = 0
    queue_limit: int = 1000
    queue_timeout: float = 30.0
    prefill_policy: str = next(iter(policies.PREFILL))
    decode_policy: str = next(iter(policies.DECODE))

    def rules(self) -> HealthRules:
        return HealthRules(self.eject_after, self.eject_time, self.slow_start)

    def limits(self, in_flight: int) -> Limits:
        return Limits(in_flight, self.queue_limit, self.queue_timeout)


# Name, least and most, and what it is for.
_NUMBERS: tuple[tuple[str, float, float, str], ...] = (
    ("dns_interval", 0.1, 1e6, "resolve dns: names anew so often"),
    ("health_interval", 0, 3600, "ask each node's /health so often, 0 never"),
    (
        "eject_after",
        0,
        1e6,
        "give a node no turns for a while after so many in a row that failed before their first "
        "byte, 0 never",
    ),
    ("eject_time", 0.01, 60, "for how long at first; twice as long each time, up to 60"),
    ("slow_start", 0, 3600, "a node that has come back has its full share after this time"),
    ("prefill_in_flight", 0, 1e6, "at most so many turns on one P node, 0 any number"),
    ("decode_in_flight", 0, 1e6, "at most so many turns on one D node, 0 any number"),
    (
        "queue_limit",
        0,
        1e6,
        "at most so many turns wait for room on P nodes, and so many on D nodes; others get 429",
    ),
    ("queue_timeout", 0, 3600, "a turn that has waited so long for room gets 503"),
)


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
            help=f"hosts of the {letter} nodes; https://HOST for TLS; dns:NAME is one node for "
            "each address of a name; default localhost",
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
    for role, known in (("prefill", policies.PREFILL), ("decode", policies.DECODE)):
        default = getattr(defaults, f"{role}_policy")
        made.add_argument(
            f"--{role}-policy",
            choices=list(known),
            default=default,
            help=f"which {role} node a turn is given; default {default}",
        )
    for name, _, _, what in _NUMBERS:
        default = getattr(defaults, name)
        made.add_argument(
            _flag(name),
            type=type(default),
            default=default,
            metavar="N" if isinstance(default, int) else "SECONDS",
            help=f"{what}; default {default:g}",
        )


def node_options(
    made: argparse.ArgumentParser, args: argparse.Namespace
) -> tuple[NodeList, NodeOptions]:
    """What was given; argparse ends the process on a contradiction (exit 2)."""
    for name, low, high, _ in _NUMBERS:
        value = getattr(args, name)
        if not low <= value <= high:
            made.error(f"{_flag(name)} must be between {low:g} and {high:g}, not {value:g}")
    numbers = {name: getattr(args, name) for name, *_ in _NUMBERS}
    return _node_list(made, args), NodeOptions(
        file=args.nodes,
        prefill_policy=args.prefill_policy,
        decode_policy=args.decode_policy,
        **numbers,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    if len(set(map(str, addresses))) != len(addresses):
        made.error(f"--{role}-hosts and --{role}-ports name the same node twice")
    return addresses
