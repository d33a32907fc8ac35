"""Transfers in vLLM's own metrics: by direction, and the last rate of each peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.bidir.connector import stats as module
from vllm.bidir.connector.stats import HANDOVER, READ_BACK, BidirPromMetrics, BidirStats


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> BidirPromMetrics:
    def made(kind: Any) -> Any:
        return lambda **arguments: kind(**arguments, registry=registry)

    kinds: Any = {kind: made(kind) for kind in (Counter, Gauge, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector"))
    return BidirPromMetrics(config, kinds, ["engine"], {0: ["0"]})


def transfer(stats: BidirStats, direction: str, peer: str, descriptors: int = 3) -> None:
    stats.about(direction, peer)
    stats.record_transfer(
        SimpleNamespace(
            xferDuration=2000, postDuration=500, totalBytes=4_000_000, descCount=descriptors
        )
    )


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"engine": "0", **labels})


def test_read_backs_and_handovers_are_counted_apart(
    registry: CollectorRegistry, metrics: BidirPromMetrics
) -> None:
    worker, other = BidirStats(), BidirStats()
    transfer(worker, READ_BACK, "d")
    transfer(worker, READ_BACK, "d")
    transfer(other, HANDOVER, "p", descriptors=7)
    metrics.observe(worker.aggregate(other).data)
    assert value(registry, "vllm:bidir_transfer_bytes_total", direction=READ_BACK) == 8e6
    assert value(registry, "vllm:bidir_transfer_bytes_total", direction=HANDOVER) == 4e6
    assert value(registry, "vllm:bidir_transfer_descriptors_total", direction=READ_BACK) == 6
    assert value(registry, "vllm:bidir_transfer_descriptors_total", direction=HANDOVER) == 7
    assert value(registry, "vllm:bidir_transfer_post_seconds_sum", direction=READ_BACK) == 0.001
    assert value(registry, "vllm:bidir_transfer_seconds_sum", direction=HANDOVER) == 0.002
    rate = value(registry, "vllm:bidir_peer_gigabytes_per_second", direction=READ_BACK, peer="d")
    assert rate == pytest.approx(2.0)


def test_peers_that_were_long_not_heard_of_make_room(
    registry: CollectorRegistry, metrics: BidirPromMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every restart is another engine id."""
    monkeypatch.setattr(module, "PEERS", 2)
    stats = BidirStats()
    for peer in ("first", "second", "first", "third"):
        transfer(stats, READ_BACK, peer)
    metrics.observe(stats.data)
    shown = {
        sample.labels["peer"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:bidir_peer_gigabytes_per_second"
    }
    assert shown == {"first", "third"}
