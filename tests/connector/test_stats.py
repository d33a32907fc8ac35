"""Transfers in vLLM's own metrics: by direction, and the last rate of each peer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from vllm.bidir.connector import stats as module
from vllm.bidir.connector.stats import HANDOVER, READ_BACK, BidirPromMetrics, BidirStats

from tests.connector.prom_metrics import prom_metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> BidirPromMetrics:
    return prom_metrics(registry)


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


def test_lost_handovers_are_counted_by_reason(
    registry: CollectorRegistry, metrics: BidirPromMetrics
) -> None:
    one, other = BidirStats(), BidirStats()
    assert one.is_empty()
    one.record_lost_handover("expired")
    assert not one.is_empty()
    other.record_lost_handover("expired")
    other.record_lost_handover("timeout")
    metrics.observe(one.aggregate(other).data)
    assert value(registry, "vllm:bidir_lost_handovers_total", reason="expired") == 2
    assert value(registry, "vllm:bidir_lost_handovers_total", reason="timeout") == 1


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


LEASES = {
    "mode": "lease", "leases": 3, "blocks": 30, "holds": 1, "budget_blocks": 40,
    "total_blocks": 81, "oldest_s": 12.5, "renewals": 7, "refused": 2, "reclaimed": 4,
    "expired": 5, "released": 6,
}  # fmt: skip


def test_what_leases_keep_is_shown_after_a_step_and_after_a_call(
    registry: CollectorRegistry, metrics: BidirPromMetrics
) -> None:
    """An engine that only keeps turns has no steps; what a heartbeat is answered tells it all."""
    scheduler, worker = BidirStats(), BidirStats()
    scheduler.record_leases({**LEASES, "leases": 9})
    scheduler.record_leases(LEASES)
    metrics.observe(worker.aggregate(scheduler).data)
    shown = {
        "leases": 3, "lease_blocks": 30, "lease_holds": 1, "lease_budget_used": 0.75,
        "lease_oldest_seconds": 12.5, "lease_renewals": 7, "lease_refusals": 2,
        "lease_reclaimed": 4, "lease_expired": 5, "lease_released": 6,
    }  # fmt: skip
    for name, number in shown.items():
        assert value(registry, f"vllm:bidir_{name}") == number, name
    module.show_leases(0, {**LEASES, "leases": 2, "oldest_s": None, "budget_blocks": 0})
    assert value(registry, "vllm:bidir_leases") == 2
    assert value(registry, "vllm:bidir_lease_oldest_seconds") == 0
    assert value(registry, "vllm:bidir_lease_budget_used") == 0
    module.show_leases(5, LEASES)  # an engine that the metrics do not know
