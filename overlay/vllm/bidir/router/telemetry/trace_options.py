# SPDX-License-Identifier: Apache-2.0
"""The option for traces, checked without loading OpenTelemetry."""

from __future__ import annotations

import argparse
import importlib.util
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from vllm.bidir.router.telemetry.tracing import Tracing

GRPC, HTTP = "grpc", "http/protobuf"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto")


class TracingError(Exception):
    """Traces were asked for and cannot be made."""


def add_arguments(made: argparse.ArgumentParser) -> None:
    """The option, named as the engines' own is."""
    made.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a trace of each turn to this OpenTelemetry collector: http://HOST:4317, or, "
        f"with {_PROTOCOLS[0]}={HTTP}, http://HOST:4318/v1/traces; default: none",
    )


def from_args(made: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """The endpoint, None for no traces; argparse ends the process if it is of no use (exit 2)."""
    endpoint: str | None = args.otlp_traces_endpoint
    if endpoint is not None:
        try:
            check(endpoint)
        except ValueError as error:
            made.error(f"--otlp-traces-endpoint {error}")
    return endpoint


def check(endpoint: str) -> None:
    """ValueError says what is wrong with it, or what is missing."""
    if not all(map(_is_installed, _NEEDED)):
        raise ValueError(
            "needs OpenTelemetry, which comes with vLLM: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        )
    schemes = ("http", "https", "grpc") if protocol() == GRPC else ("http", "https")
    try:
        url = urlsplit(endpoint)
        complete = bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        complete = False
    if not complete or url.scheme not in schemes:
        raise ValueError(f"must be {' or '.join(schemes)}://HOST:PORT, not {endpoint[:200]!r}")
    if url.username is not None:
        raise ValueError("must hold no key: give it in OTEL_EXPORTER_OTLP_TRACES_HEADERS")


def start(endpoint: str | None, version: str) -> Tracing | None:
    """The router's traces, None for none. Loads OpenTelemetry; TracingError if it refuses."""
    if endpoint is None:
        return None
    try:
        from vllm.bidir.router.telemetry.tracing import Tracing

        return Tracing(endpoint, version)
    except Exception as error:
        # Whatever it is that one of its variables has led to.
        raise TracingError(
            f"OpenTelemetry cannot be set up: {error}; look at the OTEL_ environment variables"
        ) from error


def protocol() -> str:
    """As the environment says; ValueError for another than OpenTelemetry's two."""
    for name in _PROTOCOLS:
        given = os.environ.get(name)
        if given:
            if given not in (GRPC, HTTP):
                raise ValueError(f"cannot be used: {name} must be {GRPC} or {HTTP}, not {given!r}")
            return given
    return GRPC


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
