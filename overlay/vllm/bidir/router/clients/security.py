# SPDX-License-Identifier: Apache-2.0
"""The options for keys, tenants, TLS, sizes and side channels."""

from __future__ import annotations

import argparse
import hashlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm.bidir.router.clients.keys import given_keys, is_usable
from vllm.bidir.router.nodes.side_channels import SideChannel, parse_side_channel

CLIENT_KEYS_VARIABLE = "VLLM_BIDIR_ROUTER_API_KEY"
FORWARD, REPLACE = "forward", "replace"


@dataclass(frozen=True)
class Security:
    """`client_keys` are SHA-256 digests; none: everybody may. `tls`: certificate and its key.

    They are those at the start; `client_key_file` and `tls` are read again when they change.
    """

    client_keys: frozenset[bytes] = field(default=frozenset(), repr=False)
    client_key_file: Path | None = None
    engine_authorization: str | None = None
    tenant_header: bool = False
    tls: tuple[Path, Path] | None = None
    engine_ca: Path | None = None
    # What many servers take, and a little over any header of an agent.
    max_header: int = 8190
    max_stored_responses: int = 64 << 20
    side_channels: Mapping[str, SideChannel] = field(default_factory=dict)

    def replaces_authorization(self, engine_key: str | None) -> bool:
        """Whether engines are shown their own key rather than the client's."""
        if self.engine_authorization is None:
            return bool(self.client_keys) and engine_key is not None
        return self.engine_authorization == REPLACE

    def server_context(self) -> ssl.SSLContext:
        """TLS towards clients, where `tls` is given. OSError if the files are of no use."""
        assert self.tls is not None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # A passphrase would be asked for on the terminal, each time that the files are read.
        context.load_cert_chain(*self.tls, password="")
        return context

    def engine_context(self) -> ssl.SSLContext | None:
        """TLS towards engines with an https address; None: the system's CAs. OSError as above."""
        if self.engine_ca is None:
            return None
        return ssl.create_default_context(cafile=self.engine_ca)


def add_arguments(made: argparse.ArgumentParser) -> None:
    """The options of this module in a group of their own."""
    defaults = Security()
    group = made.add_argument_group("safety")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="PATH",
        help="a file with the keys that clients must show, one a line, read again when it "
        "changes; default: those in the "
        f"environment variable {CLIENT_KEYS_VARIABLE}, else everybody may",
    )
    group.add_argument(
        "--engine-authorization",
        choices=(FORWARD, REPLACE),
        help="what engines get: forward the client's Authorization, or replace it with "
        "--engine-api-key-file's key (nothing without one); default: replace if both clients' and "
        "engines' keys are given, else forward",
    )
    group.add_argument(
        "--tenant-header",
        action="store_true",
        help="keep conversations apart by X-Tenant-ID, where a trusted gateway sets it; "
        "default: by Authorization",
    )
    group.add_argument(
        "--max-header",
        type=int,
        default=defaults.max_header,
        metavar="BYTES",
        help=f"refuse requests with a longer header field or URL; default {defaults.max_header}",
    )
    group.add_argument(
        "--max-stored-responses",
        type=int,
        default=defaults.max_stored_responses,
        metavar="BYTES",
        help="keep items of /v1/responses for previous_response_id, the least recently used go "
        f"first; 0 for none; default {defaults.max_stored_responses}",
    )
    group.add_argument(
        "--tls-cert",
        type=Path,
        metavar="PATH",
        help="serve HTTPS with this certificate chain (PEM), read again when it changes; "
        "default: HTTP",
    )
    group.add_argument(
        "--tls-key",
        type=Path,
        metavar="PATH",
        help="its private key, without a passphrase; default: in --tls-cert",
    )
    group.add_argument(
        "--engine-ca-file",
        type=Path,
        metavar="PATH",
        help="the CA certificates (PEM) of engines whose hosts are given as https://HOST; "
        "default: the system's",
    )
    group.add_argument(
        "--side-channel",
        dest="side_channels",
        action="append",
        default=[],
        metavar="NODE=HOST[:PORT[-PORT]]",
        help="where other nodes reach the NIXL side channel of NODE (host:port of its HTTP server) "
        "and which ports it may name, one for each data-parallel rank; may be repeated; "
        "default: NODE's own host, and the ports that its engines named first",
    )


def from_args(made: argparse.ArgumentParser, args: argparse.Namespace) -> Security:
    """What was given; argparse ends the process on a contradiction (exit 2)."""
    if args.tls_key is not None and args.tls_cert is None:
        made.error("--tls-key needs --tls-cert")
    if not 256 <= args.max_header <= 1 << 20:
        made.error(f"--max-header must be between 256 and {1 << 20}, not {args.max_header}")
    if not 0 <= args.max_stored_responses <= 1 << 40:
        made.error(f"--max-stored-responses must be between 0 and {1 << 40}")
    try:
        side_channels = dict(map(parse_side_channel, args.side_channels))
    except ValueError as error:
        made.error(f"--side-channel {error}")
    security = Security(
        client_keys=given_keys(
            made, "--api-key-file", args.api_key_file, CLIENT_KEYS_VARIABLE, client_keys
        )
        or frozenset(),
        client_key_file=args.api_key_file,
        engine_authorization=args.engine_authorization,
        tenant_header=args.tenant_header,
        tls=None if args.tls_cert is None else (args.tls_cert, args.tls_key or args.tls_cert),
        engine_ca=args.engine_ca_file,
        max_header=args.max_header,
        max_stored_responses=args.max_stored_responses,
        side_channels=side_channels,
    )
    for flag, given, load in (
        ("--tls-cert and --tls-key", security.tls, security.server_context),
        ("--engine-ca-file", security.engine_ca, security.engine_context),
    ):
        try:
            if given is not None:
                load()
        except OSError as error:
            made.error(f"{flag} cannot be used: {error.strerror or error}")
    return security


def key_digest(key: str) -> bytes:
    """How a client's key is kept."""
    return hashlib.sha256(key.encode()).digest()


def client_keys(text: str) -> frozenset[bytes]:
    """Digests of the clients' keys, one a line; ValueError if one is none, or there is none."""
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys or not all(map(is_usable, keys)):
        raise ValueError("must hold keys: printable ASCII without spaces, one a line")
    return frozenset(map(key_digest, keys))
