"""A READ that was given up keeps its blocks until it has ended; the recompute uses others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.bidir.connector.outcome import Outcome, WorkerReport
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.reasons import Reason
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.connector.sim import Engine
from tests.connector.test_simulated import finished_turn, numbers


@pytest.fixture
def p(model: Path) -> Engine:
    return Engine(model, "p")


def ordered(p: Engine, model: Path, local: int = 0) -> tuple[Request, ReadBack]:
    """A request of P whose read-back the workers have been given."""
    rng = random.Random(local)
    h, out = numbers(rng, 300), numbers(rng, 40)
    if local:
        p.run(h[:local], None)
    params, _ = finished_turn(Engine(model, "d"), h, out)
    request = p.add([*h, *out, 5], params)
    metadata = p.scheduler.schedule().kv_connector_metadata
    return request, metadata.read_backs[request.request_id]


def hear(p: Engine, **news: Any) -> None:
    """One step in which nothing runs, and the workers report."""
    step = p.scheduler.schedule()
    assert not step.num_scheduled_tokens
    nothing = ModelRunnerOutput(
        req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**news)
    )
    p.scheduler.update_from_output(step, nothing)


def give_up(p: Engine, request: Request, order: ReadBack) -> None:
    hear(
        p,
        finished_recving={request.request_id},
        invalid_block_ids=set(order.local_block_ids),
        kv_connector_worker_meta=WorkerReport(
            outcomes={request.request_id: Outcome(Reason.TIMEOUT)},
            writers={request.request_id: 1},
        ),
    )


def end(p: Engine, request: Request) -> None:
    report = WorkerReport(writers={request.request_id: -1})
    p.bidir.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))


@pytest.mark.parametrize("local", [0, 160])
def test_the_recompute_uses_fresh_blocks(p: Engine, model: Path, local: int) -> None:
    request, order = ordered(p, model, local)
    assert order.local == local
    give_up(p, request, order)
    p.scheduler.schedule()
    (blocks,) = p.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert request.status is RequestStatus.RUNNING
    assert blocks and not set(blocks) & set(order.local_block_ids)


def test_its_blocks_go_back_to_the_pool_when_it_has_ended(p: Engine, model: Path) -> None:
    free = p.free_blocks
    request, order = ordered(p, model)
    give_up(p, request, order)
    p.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert p.free_blocks == free - len(order.local_block_ids)
    end(p, request)
    assert p.free_blocks == free
    assert len(p.bidir.written) == 0


def test_a_request_aborted_during_its_read_gives_them_back_too(p: Engine, model: Path) -> None:
    free = p.free_blocks
    request, order = ordered(p, model)
    p.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert p.free_blocks == free - len(order.local_block_ids), "NIXL still writes"
    give_up(p, request, order)
    assert p.free_blocks == free - len(order.local_block_ids)
    end(p, request)
    assert p.free_blocks == free


def test_a_read_that_is_merely_lost_computes_in_its_own_blocks(p: Engine, model: Path) -> None:
    free = p.free_blocks
    request, order = ordered(p, model)
    hear(
        p,
        finished_recving={request.request_id},
        invalid_block_ids=set(order.local_block_ids),
        kv_connector_worker_meta=WorkerReport({request.request_id: Outcome(Reason.HOLD_LOST)}),
    )
    p.scheduler.schedule()
    p.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert p.free_blocks == free


def test_an_engine_watches_a_read_that_was_given_up(p: Engine, model: Path) -> None:
    """Nothing else may be left to do, and the blocks are to come back all the same."""
    request, order = ordered(p, model)
    give_up(p, request, order)
    p.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert p.bidir.rest.seconds_left() is not None
    end(p, request)
    assert p.bidir.rest.seconds_left() is None


def test_what_one_rank_loses_is_lost(
    p: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reports in its own time; the decision is counted once, by its worst part."""
    counted: list[Any] = []
    monkeypatch.setattr(p.bidir.stats, "record_read", lambda *row: counted.append(row))
    monkeypatch.setattr(p.bidir.stats, "record_lost", lambda *row: counted.append(row))
    request, order = ordered(p, model)
    name = request.request_id
    ours = WorkerReport({name: Outcome(None, megabytes=3.0, transfer_s=0.2)})
    hear(p, kv_connector_worker_meta=ours)
    assert counted == []
    both = WorkerReport({name: Outcome(Reason.TRANSFER_FAILED, hold_s=0.1)})
    hear(
        p,
        finished_recving={name},
        invalid_block_ids=set(order.local_block_ids),
        kv_connector_worker_meta=both,
    )
    assert counted == [("transfer_failed", order.verified, order.prompt)]


def test_reports_of_one_step_add_up() -> None:
    one = WorkerReport({"a": Outcome(None, 2.0, 0.1, 0.4, 0.1)}, {"b": 1})
    other = WorkerReport({"a": Outcome(None, 3.0, 0.2, 0.3, 0.1)}, {"b": 1, "c": -1})
    both = one.aggregate(other)
    assert both == WorkerReport({"a": Outcome(None, 5.0, 0.2, 0.4, 0.1)}, {"b": 2, "c": -1})
    assert not WorkerReport()
