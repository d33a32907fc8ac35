"""An engine's metrics as vLLM makes them, in a registry of a test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.bidir.connector.stats import BidirPromMetrics


def prom_metrics(registry: CollectorRegistry) -> BidirPromMetrics:
    """Those of one engine, "0"."""

    def made(kind: Any) -> Any:
        return lambda **arguments: kind(**arguments, registry=registry)

    kinds: Any = {kind: made(kind) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector"))
    return BidirPromMetrics(config, kinds, ["engine"], {0: ["0"]})
