# SPDX-License-Identifier: Apache-2.0
"""What the router can be told; the sample proxy's flags mean the same here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from vllm.bidir.router.clients import security
from vllm.bidir.router.clients.keys import engine_key, given_keys
from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.nodes.address import Address as Address
from vllm.bidir.router.nodes.options import NodeOptions, add_node_arguments, node_options
from vllm.bidir.router.state.options import StateOptions, add_state_arguments, state_options
from vllm.bidir.router.telemetry import trace_options

API_KEY_VARIABLE = "VLLM_BIDIR_ENGINE_API_KEY"

Number = TypeVar("Number", int, float)

EXAMPLE = """example:
  vllm-bidir-router --port 8000 \\
      --prefiller-host 10.0.0.1 --prefiller-port 8100 \\
      --decoder-host 10.0.0.2 --decoder-port 8200

  curl http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "m", "stream": true, "conversation_id": "c1",
           "messages": [{"role": "user", "content": "Hello"}]}'
"""


@dataclass(frozen=True)
class RouterOptions:
    """One running router. Times in seconds, sizes in bytes."""

    host: str = "0.0.0.0"
    port: int = 8000
    prefill: tuple[Address, ...] = (Address("localhost", 8100),)
    decode: tuple[Address, ...] = (Address("localhost", 8200),)
    # Below decoder_kv_blocks_ttl (480 s), so that P is not sent to blocks that D is about to free.
    conversation_ttl: float = 450.0
    conversation_idle_timeout: float = 600.0
    max_conversations: int = 100_000
    max_kept_params: int = 8 << 20
    max_body: int = 64 << 20
    connect_timeout: float = 5.0
    drain_delay: float = 0.0
    drain_timeout: float = 60.0
    # At the start; the file is read again when it changes.
    engine_api_key: str | None = field(default=None, repr=False)
    engine_api_key_file: Path | None = None
    nodes: NodeOptions = field(default_factory=NodeOptions)
    security: Security = field(default_factory=Security)
    otlp_traces_endpoint: str | None = None
    state: StateOptions = field(default_factory=StateOptions)


def parser() -> argparse.ArgumentParser:
    """The command line of `vllm-bidir-router`."""
    defaults = RouterOptions()
    made = argparse.ArgumentParser(
        prog="vllm-bidir-router",
        description="Route conversations over prefill and decode nodes that run vLLM with "
        "NixlConnector, and let each prefill take back the KV that the decode node kept.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--host", default=defaults.host, help=f"the address to listen on; default {defaults.host}"
    )
    made.add_argument(
        "--port", type=int, default=defaults.port, help=f"its port; default {defaults.port}"
    )
    add_node_arguments(made)
    made.add_argument(
        "--conversation-ttl",
        type=float,
        default=defaults.conversation_ttl,
        metavar="SECONDS",
        help="forget a conversation's KV after this time, where decode nodes keep it for a fixed "
        "time; keep it below their decoder_kv_blocks_ttl (480); "
        f"default {defaults.conversation_ttl:g}",
    )
    made.add_argument(
        "--conversation-idle-timeout",
        type=float,
        default=defaults.conversation_idle_timeout,
        metavar="SECONDS",
        help="where decode nodes grant leases (decoder_kv_lease_duration), renew a conversation's "
        "until so long after its last turn, then give it back; "
        f"default {defaults.conversation_idle_timeout:g}",
    )
    made.add_argument(
        "--max-conversations",
        type=int,
        default=defaults.max_conversations,
        metavar="N",
        help="remember at most so many, the least recently used go first; "
        f"default {defaults.max_conversations}",
    )
    made.add_argument(
        "--max-kept-params",
        type=int,
        default=defaults.max_kept_params,
        metavar="BYTES",
        help="have the kv_transfer_params of the last conversations at hand, in so much memory; "
        "for the others the decode node is asked when their next turn comes; "
        f"default {defaults.max_kept_params}",
    )
    made.add_argument(
        "--max-body",
        type=int,
        default=defaults.max_body,
        metavar="BYTES",
        help=f"refuse larger request bodies with 413; default {defaults.max_body}",
    )
    made.add_argument(
        "--drain-delay",
        type=float,
        default=defaults.drain_delay,
        metavar="SECONDS",
        help="at SIGTERM: take requests for so long, while /ready says 503 already, until no load "
        f"balancer sends any; default {defaults.drain_delay:g}",
    )
    made.add_argument(
        "--drain-timeout",
        type=float,
        default=defaults.drain_timeout,
        metavar="SECONDS",
        help="then let what is under way go on for so long, while new requests get 503; what is "
        f"left is cut with an error event; default {defaults.drain_timeout:g}",
    )
    made.add_argument(
        "--engine-api-key-file",
        type=Path,
        metavar="PATH",
        help="a file that holds the engines' --api-key, for renewing and releasing leases, and see "
        "--engine-authorization; read again when it changes; "
        f"default: the environment variable {API_KEY_VARIABLE}, else no key",
    )
    trace_options.add_arguments(made)
    security.add_arguments(made)
    add_state_arguments(made)
    return made


def parse(argv: Sequence[str] | None = None) -> RouterOptions:
    """Options from the command line; argparse ends the process on a contradiction (exit 2)."""
    made = parser()
    args = made.parse_args(argv)
    listed, nodes = node_options(made, args)
    return RouterOptions(
        host=args.host,
        port=_in_range(made, "--port", args.port, 0, 65535),
        prefill=listed.prefill,
        decode=listed.decode,
        conversation_ttl=_in_range(made, "--conversation-ttl", args.conversation_ttl, 0, 1e9),
        conversation_idle_timeout=_in_range(
            made, "--conversation-idle-timeout", args.conversation_idle_timeout, 0, 1e9
        ),
        max_conversations=_in_range(made, "--max-conversations", args.max_conversations, 1, 1e9),
        max_kept_params=_in_range(made, "--max-kept-params", args.max_kept_params, 0, 1 << 40),
        max_body=_in_range(made, "--max-body", args.max_body, 1, 1 << 40),
        drain_delay=_in_range(made, "--drain-delay", args.drain_delay, 0, 3600),
        drain_timeout=_in_range(made, "--drain-timeout", args.drain_timeout, 0, 86_400),
        engine_api_key=given_keys(
            made,
            "--engine-api-key-file",
            args.engine_api_key_file,
            API_KEY_VARIABLE,
            engine_key,
        ),
        engine_api_key_file=args.engine_api_key_file,
        nodes=nodes,
        security=security.from_args(made, args),
        otlp_traces_endpoint=trace_options.from_args(made, args),
        state=state_options(made, args),
    )


def _in_range(
    made: argparse.ArgumentParser, flag: str, value: Number, low: float, high: float
) -> Number:
    if not low <= value <= high:
        made.error(f"{flag} must be between {low:g} and {high:g}, not {value:g}")
    return value
