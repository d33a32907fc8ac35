"""A peer that is met is touched and measured, by real NIXL between real workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.bidir.connector import probes
from vllm.bidir.connector.meeting import MeetingWorker
from vllm.bidir.connector.touch import Rate

from tests.connector.nodes import BLOCKS, Node, alone

__all__ = ["alone"]


@pytest.fixture(params=["BLHNC", "LBHNC"])
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[tuple[Node, Node]]:
    """P has met D, and nothing has been read yet."""
    p, d = Node(model, "p", request.param), Node(model, "d", request.param)
    p.meets(d)
    yield p, d
    for node in (p, d):
        node.worker.shutdown()


def read_by(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many descriptors each READ of this node has from now on."""
    counts: list[int] = []
    make = node.worker.nixl_wrapper.make_prepped_xfer

    def noting(operation: str, own: Any, ids: Any, *more: Any) -> Any:
        counts.append(len(ids))
        return make(operation, own, ids, *more)

    monkeypatch.setattr(node.worker.nixl_wrapper, "make_prepped_xfer", noting)
    return counts


def handshake(node: Node, monkeypatch: pytest.MonkeyPatch, engine_id: str = "d") -> None:
    """As its thread does it, with somebody who has been met already."""
    monkeypatch.setattr(MeetingWorker, "_nixl_handshake", lambda *rest: {})
    node.worker._nixl_handshake("localhost", 1, 1, engine_id)


def test_who_reads_back_knows_the_rate_after_the_handshake(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    before = [p.block(number).clone() for number in range(BLOCKS["p"])]
    p.worker._to_be_measured.add("d")
    handshake(p, monkeypatch)
    rate = p.worker._probes.links.rate("d")
    assert rate is not None and rate > 1.0
    assert torch.equal(p.block(0), d.block(0)), "the null block was read"
    for number, block in enumerate(before[1:], 1):
        assert torch.equal(p.block(number), block), "and no other was written"
    assert p.worker.busy_engines() == set()


def test_who_is_handed_over_to_only_opens_the_way(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    counts = read_by(p, monkeypatch)
    handshake(p, monkeypatch)
    assert len(counts) == 1
    assert torch.equal(p.block(0), d.block(0))
    assert p.worker._probes.links.rate("d") is None


def test_small_blocks_are_not_read_a_million_times(pair: tuple[Node, Node]) -> None:
    found = pair[0].worker._null_blocks("d", 1024.0)
    assert found is not None
    (read,), megabytes = found
    each = pair[0].worker._block_megabytes()
    assert megabytes == pytest.approx(8192 * each)
    per_block = 1 if pair[0].worker._rows.of("d", 0) else len(pair[0].layers)
    assert len(read.local_ids) == 8192 * per_block


@pytest.mark.parametrize(
    "lacking", ["a shared agent", "one kind of group", "a mapping", "alike blocks"]
)
def test_where_it_may_not_or_cannot_nothing_is_read(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    worker = pair[0].worker
    counts = read_by(pair[0], monkeypatch)
    if lacking == "a shared agent":
        worker.shares_agent = False
    elif lacking == "one kind of group":
        worker._is_hma_required = True
    elif lacking == "a mapping":
        del worker.tp_mappings["d"]
    else:
        monkeypatch.setattr(worker, "is_alike", lambda engine_id: False)
    worker._to_be_measured.add("d")
    handshake(pair[0], monkeypatch)
    assert counts == []
    worker._probes.start("d")
    wait_until(lambda: worker._probes.engines() == set())
    assert counts == []
    assert worker._probes.links.rate("d") is None


def wait_until(true: Any) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_probe_of_its_own_keeps_its_engine(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, may = pair[0].worker, threading.Event()

    def measured(*rest: Any) -> Rate:
        assert may.wait(10)
        return Rate(1234.0)

    monkeypatch.setattr(probes, "measure", measured)
    worker._probes.start("d")
    assert not worker.forget("d"), "its descriptors are in use"
    may.set()
    wait_until(lambda: worker._probes.links.rate("d") == 1234.0)
    wait_until(lambda: worker.busy_engines() == set())
    assert worker.forget("d")
    assert worker._probes.links.rate("d") is None


def test_a_probe_that_breaks_is_over(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else its peer would never be probed again, nor forgotten."""
    worker = pair[0].worker

    def broken(*rest: Any) -> Rate:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(probes, "measure", broken)
    worker._probes.start("d")
    wait_until(lambda: worker.busy_engines() == set())
    assert not worker._probes.links.probing("d")
    assert "no such luck" in caplog.text


def test_probes_that_never_began_do_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    may = threading.Event()
    monkeypatch.setattr(probes, "measure", lambda *rest: may.wait(10) and None)
    made = probes.Probes(None, lambda *rest: None, lambda: None, threading.Lock())
    for engine_id in ("a", "b", "c"):
        made.start(engine_id)
    wait_until(lambda: made._threads._work_queue.qsize() == 1)
    threading.Timer(0.1, may.set).start()
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 2.0
    assert made.engines() == set()


def test_an_engine_has_been_met_whatever_becomes_of_the_probe(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*rest: Any) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(pair[0].worker._probes, "_describe", broken)
    handshake(pair[0], monkeypatch)
    assert not pair[0].worker._probes.links.probing("d")
