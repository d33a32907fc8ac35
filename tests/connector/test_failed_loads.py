"""Loads of models with several kinds of KV cache groups fail as a whole, and are seen to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.bidir.connector.failed_loads import FailedLoads
from vllm.bidir.connector.meeting import MeetingWorker
from vllm.bidir.connector.outcome import WorkerReport
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.connector.memory import BLOCK
from tests.connector.nodes import alone
from tests.connector.sim import Engine, play_step
from tests.connector.test_worker import Bare

__all__ = ["alone"]

SHAPE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
GROUPS = (
    KVCacheGroupSpec(["full"], FullAttentionSpec(**SHAPE)),
    KVCacheGroupSpec(["near"], SlidingWindowSpec(**SHAPE, sliding_window=2 * BLOCK)),
)
PROMPT = list(range(100))
HANDED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(1, 8)), list(range(11, 18))],
    "remote_engine_id": "p",
    "remote_request_id": "at-p",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": len(PROMPT),
}


class Decode(Engine):
    """A D whose model has two kinds of groups; what its workers say is the test's."""

    def __init__(self, model: Path, policy: str) -> None:
        super().__init__(model, "d", groups=GROUPS, policy=policy)
        self.ends: dict[str, FinishReason | None] = {}

    def waits(self) -> Request:
        """A request whose blocks are being read."""
        request = self.add(PROMPT, HANDED)
        self.works(None)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return request

    def works(self, told: KVConnectorOutput | None) -> dict[str, int]:
        """One step; how many tokens of which request were scheduled for it."""
        output, said = play_step(self, told)
        self.ends |= {one.request_id: one.finish_reason for one in said if one.finished}
        return output.num_scheduled_tokens


def over(request: Request, *reports: WorkerReport) -> KVConnectorOutput:
    """All ranks are done with the request, and have said this beside."""
    meta = reports[0] if len(reports) == 1 else MultiKVConnectorWorkerMetadata(metadata=reports)
    return KVConnectorOutput(finished_recving={request.request_id}, kv_connector_worker_meta=meta)


def failed(request: Request) -> WorkerReport:
    return WorkerReport(failed={request.request_id})


def test_a_failed_load_ends_the_request(model: Path) -> None:
    """The base would take it for done, and answer from what is not there."""
    d = Decode(model, "fail")
    free = d.free_blocks
    request = d.waits()
    assert d.free_blocks < free
    assert d.works(over(request, failed(request))) == {}
    assert d.ends == {request.request_id: FinishReason.ERROR}
    assert d.works(None) == {}
    assert d.free_blocks == free and not d.scheduler.requests


def test_a_failed_load_is_computed_if_the_policy_says_so(model: Path) -> None:
    d = Decode(model, "recompute")
    request = d.waits()
    d.works(over(request, failed(request)))
    assert d.works(None) == {request.request_id: len(PROMPT)}
    assert d.ends == {request.request_id: FinishReason.LENGTH}


def test_a_load_that_has_come_is_used(model: Path) -> None:
    d = Decode(model, "fail")
    request = d.waits()
    d.works(over(request, WorkerReport(writers={"another": 1})))
    assert d.works(None) == {request.request_id: 1}
    assert d.ends == {request.request_id: FinishReason.LENGTH}


def test_a_load_fails_when_the_last_rank_is_over(model: Path) -> None:
    """Until then some of them still write to its blocks."""
    d = Decode(model, "fail")
    request = d.waits()
    d.works(KVConnectorOutput(kv_connector_worker_meta=failed(request)))
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and not d.ends
    d.works(over(request, WorkerReport()))
    assert d.ends == {request.request_id: FinishReason.ERROR}


def test_a_request_that_was_aborted_meanwhile_only_gives_its_blocks_back(model: Path) -> None:
    d = Decode(model, "fail")
    free = d.free_blocks
    request = d.waits()
    d.abort(request)
    assert d.free_blocks < free, "a READ may still write there"
    d.works(over(request, failed(request)))
    assert d.ends == {} and d.free_blocks == free


def test_a_load_is_failed_beside_other_connectors_too() -> None:
    loads, request = FailedLoads(), SimpleNamespace(request_id="r")
    reports = (SimpleNamespace(), failed(request))  # type: ignore[arg-type]
    assert loads.over(over(request, *reports)) == {"r"}  # type: ignore[arg-type]
    assert loads.over(over(request, *reports[:1])) == set(), "told once"  # type: ignore[arg-type]


@pytest.mark.parametrize("several", [True, False])
def test_the_worker_tells_what_no_block_says(several: bool) -> None:
    d = Bare()
    d._is_hma_required = several
    d._recving_metadata["r"] = SimpleNamespace(local_block_ids=([3, 4], [5]), remote=None)
    d._handle_failed_transfer("r", None)
    d._handle_failed_transfer("tells P only", None)
    over, report = d.finish()
    assert over == {"r"}
    assert (report.failed if report else set()) == ({"r"} if several else set())
    assert d.lost()[0] == (set() if several else {3, 4})
    assert not d._failed


def test_several_groups_of_full_attention_fail_as_a_whole_too() -> None:
    """The scheduler takes blocks for those of a model's only group, and would end the engine."""
    d = Bare()
    d.kv_cache_config.kv_cache_groups.append("another")
    d._recving_metadata["r"] = SimpleNamespace(local_block_ids=([3], [5]), remote=None)
    d._handle_failed_transfer("r", None)
    assert d.get_block_ids_with_load_errors() == set()
    _, report = d.finish()
    assert report is not None and report.failed == {"r"}


@pytest.mark.parametrize("error", [AssertionError("Group 0: |5 - 1| > 2"), IndexError()])
def test_what_the_base_finds_unfit_ends_the_request_only(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a Mamba model, whose groups it pairs by rules of its own."""

    def unfit(*_: Any) -> None:
        raise error

    monkeypatch.setattr(MeetingWorker, "_read_blocks_for_req", unfit)
    d = Bare()
    meta: Any = SimpleNamespace(
        local_block_ids=([1, 2],), remote=SimpleNamespace(block_ids=([3],), engine_id="d")
    )
    d._recving_metadata["r"] = meta
    d._read_blocks_for_req("r", meta)
    assert d.finish()[0] == {"r"}


@pytest.mark.parametrize("theirs", [(), ([],), ([1], [2])], ids=str)
def test_a_handover_of_other_groups_is_refused(
    theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeetingWorker, "_read_blocks_for_req", lambda *_: pytest.fail("it is read"))
    d = Bare()
    meta: Any = SimpleNamespace(
        local_block_ids=([1, 2],), remote=SimpleNamespace(block_ids=theirs, engine_id="d")
    )
    d._recving_metadata["r"] = meta
    d._read_blocks_for_req("r", meta)
    assert d.finish()[0] == {"r"}


def test_a_mamba_state_that_p_has_not_is_ds_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        MeetingWorker, "_read_blocks_for_req", lambda self, req_id, meta: read.append(req_id)
    )
    d = Bare()
    d._has_mamba = True
    meta: Any = SimpleNamespace(
        local_block_ids=([1],), remote=SimpleNamespace(block_ids=([],), engine_id="d")
    )
    d._read_blocks_for_req("r", meta)
    assert read == ["r"]


@pytest.mark.parametrize(("theirs", "fits"), [(1, False), (10, False), (11, True), (12, True)])
def test_where_blocks_are_smaller_there_must_be_enough_of_them(theirs: int, fits: bool) -> None:
    """Six of ours take twelve of theirs, or eleven where the prompt ends in the first half of our
    last one. The base takes fewer for all."""
    d = Bare()
    d.transfer_topo.block_size_ratio = lambda size: 2
    d._physical_blocks_per_logical_kv_block = 1
    spec: Any = SimpleNamespace(local_block_ids=([1] * 6,), remote_block_ids=([2] * theirs,))
    assert d._fits(spec, "d") is fits
