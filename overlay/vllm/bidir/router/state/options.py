# SPDX-License-Identifier: Apache-2.0
"""The options for the state that several routers share."""

from __future__ import annotations

import argparse
import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path

from vllm.bidir.router.clients.keys import given_keys
from vllm.bidir.router.nodes.address import is_host

STATE_VARIABLE = "VLLM_BIDIR_ROUTER_STATE"
MEMORY = "memory"
_URL = re.compile(r"(rediss?|unix)://\S+")
_PREFIX = re.compile(r"[!-~]{0,64}")


@dataclass(frozen=True)
class StateOptions:
    """`url` of a Redis; None: this router's memory. Times in seconds."""

    url: str | None = field(default=None, repr=False)
    prefix: str = "vllm-bidir:"
    timeout: float = 0.1
    responses_ttl: float = 3600.0


def add_state_arguments(made: argparse.ArgumentParser) -> None:
    """The options of this module in a group of their own."""
    defaults = StateOptions()
    group = made.add_argument_group("several routers")
    group.add_argument(
        "--state",
        metavar="URL",
        help=f"where conversations are remembered: {MEMORY}, this router's own, or a Redis that "
        "several routers share, redis://[[USER]:PASSWORD@]HOST[:PORT][/DB], rediss:// with TLS, "
        "unix://PATH; other users of the host see a command line, so put a password into "
        f"--state-file; default: the environment variable {STATE_VARIABLE}, else {MEMORY}",
    )
    group.add_argument(
        "--state-file",
        type=Path,
        metavar="PATH",
        help="a file that holds what --state takes; default: none",
    )
    group.add_argument(
        "--state-prefix",
        default=defaults.prefix,
        metavar="TEXT",
        help="what all keys in Redis begin with; routers that share conversations have the same; "
        f"default {defaults.prefix}",
    )
    group.add_argument(
        "--state-timeout",
        type=float,
        default=defaults.timeout,
        metavar="SECONDS",
        help="wait no longer for Redis, before a turn and after it; then go by this router's "
        f"memory; default {defaults.timeout:g}",
    )
    group.add_argument(
        "--state-responses-ttl",
        type=float,
        default=defaults.responses_ttl,
        metavar="SECONDS",
        help="keep items of /v1/responses in Redis so long after they were last continued; "
        f"0: not in Redis; default {defaults.responses_ttl:g}",
    )


def state_options(made: argparse.ArgumentParser, args: argparse.Namespace) -> StateOptions:
    """What was given; argparse ends the process on a contradiction (exit 2)."""
    if not _PREFIX.fullmatch(args.state_prefix):
        made.error("--state-prefix must be printable ASCII without spaces, 64 characters at most")
    for flag, value, least in (
        ("--state-timeout", args.state_timeout, 0.001),
        ("--state-responses-ttl", args.state_responses_ttl, 0.0),
    ):
        if not least <= value <= 1e7:
            made.error(f"{flag} must be between {least:g} and 1e+07, not {value:g}")
    return StateOptions(
        _url(made, args), args.state_prefix, args.state_timeout, args.state_responses_ttl
    )


def _url(made: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """The URL of a Redis; None for memory."""
    if args.state is None:
        return given_keys(made, "--state-file", args.state_file, STATE_VARIABLE, read_url)
    if args.state_file is not None:
        made.error("give one of --state and --state-file")
    try:
        return read_url(args.state)
    except ValueError as error:
        made.error(f"--state {error}")


def read_url(text: str) -> str | None:
    """The URL of a Redis, None for memory; ValueError says what is wrong, and not with what."""
    text = text.strip()
    if text == MEMORY:
        return None
    if not _URL.fullmatch(text):
        raise ValueError(f"must be {MEMORY}, or begin with redis://, rediss:// or unix://")
    if importlib.util.find_spec("redis") is None:
        raise ValueError("names a Redis, and its client is missing: pip install 'redis>=6'")
    from redis.asyncio.connection import parse_url

    try:
        host = parse_url(text).get("host")
        if host is not None and not is_host(host):
            raise ValueError
    except ValueError:
        raise ValueError(
            "is no URL of a Redis: redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]"
        ) from None
    return text
