"""An engine that only keeps blocks for others rests, and a tick looks after them."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.bidir.connector.hooks import idle_seconds
from vllm.v1.engine.core import EngineCoreProc

from tests.connector.sim import FIRST_TURN, Engine
from tests.connector.test_simulated import finished_turn


@pytest.fixture
def d(model: Path) -> Engine:
    return Engine(model, "d")


def test_an_engine_that_only_keeps_blocks_has_nothing_to_do(d: Engine) -> None:
    finished_turn(d, list(range(100)), [1] * 10)
    assert d.scheduler.has_requests(), "the workers have not heard of the end yet"
    d.step()
    assert len(d.scheduler.requests) == 1, "its blocks are kept"
    assert not d.scheduler.has_requests()
    assert d.scheduler.get_num_unfinished_requests() == 0


def test_a_prefill_that_waits_for_its_reader_rests_too(model: Path) -> None:
    p = Engine(model, "p")
    request = p.add(list(range(100)), FIRST_TURN)
    while not request.is_finished():
        p.step()
    p.step()
    assert len(p.scheduler.requests) == 1
    assert not p.scheduler.has_requests()


def test_a_step_is_due_when_a_turns_time_is_over(d: Engine) -> None:
    assert idle_seconds(d.scheduler) is None, "an engine that keeps nothing sleeps until asked"
    _, request_id = finished_turn(d, list(range(100)), [1] * 10)
    d.step()
    left = idle_seconds(d.scheduler)
    assert left is not None and d.bidir.decoder_kv_blocks_ttl - 10 < left
    assert left <= d.bidir.decoder_kv_blocks_ttl + 1
    d.bidir.rest.begin(request_id, due=0.0, interval_s=0.05)
    time.sleep(0.05)
    assert d.scheduler.has_requests(), "its time is over"
    d.step()
    assert not d.scheduler.has_requests()
    d.expire(request_id)
    d.step()
    assert idle_seconds(d.scheduler) is None


def test_a_handover_is_looked_after_until_its_reader_is_done(model: Path) -> None:
    p = Engine(model, "p")
    request = p.add(list(range(100)), FIRST_TURN)
    while not request.is_finished():
        p.step()
    p.step()
    left = idle_seconds(p.scheduler)
    assert left is not None and left <= p.bidir._kv_lease_duration / 10


def test_what_runs_beside_kept_blocks_is_work(d: Engine) -> None:
    finished_turn(d, list(range(100)), [1] * 10)
    d.step()
    d.add(list(range(50)), None)
    assert d.scheduler.has_requests()


def waits(scheduler: object) -> float:
    """Seconds that the engine core's loop waits for a request when none comes."""
    core = SimpleNamespace(
        scheduler=scheduler,
        has_work=lambda: False,
        is_running=lambda: True,
        input_queue=queue.Queue(),
        aborts_queue=queue.Queue(),
        process_input_queue_block=True,
        _notify_idle_state_callbacks=lambda: None,
    )
    begun = time.monotonic()
    loop = threading.Thread(target=EngineCoreProc._process_input_queue, args=(core,), daemon=True)
    loop.start()
    loop.join(1.0)
    return time.monotonic() - begun if not loop.is_alive() else float("inf")


def test_the_engine_core_wakes_when_a_step_is_due(d: Engine) -> None:
    assert waits(d.scheduler) == float("inf")
    _, request_id = finished_turn(d, list(range(100)), [1] * 10)
    d.step()
    d.bidir.rest.begin(request_id, due=0.0, interval_s=0.2)
    assert waits(d.scheduler) < 1.0
