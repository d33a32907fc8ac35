"""Reset, pause, sleep and shutdown while blocks are kept: each ends in its time, and succeeds."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.request import Request

from tests.connector.sim import FIRST_TURN, Engine
from tests.connector.test_simulated import finished_turn


class Core(EngineCoreProc):
    """The engine core's own loop around a simulated engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.engines_running, self.batch_queue = False, None
        self.shutdown_state = EngineShutdownState.RUNNING
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.process_input_queue_block = False
        self._idle_state_callbacks: list[Any] = []
        self.publish_dp_lb_stats = False
        self.mm_receiver_cache = None
        self.vllm_config = SimpleNamespace(shutdown_timeout=60)
        self.step_fn = self.one_step
        nothing = lambda *rest, **more: None  # noqa: E731
        self.model_executor = SimpleNamespace(
            collective_rpc=nothing, reset_encoder_cache=nothing, reset_mm_cache=nothing
        )

    def one_step(self) -> tuple[dict[int, Any], bool]:
        return {}, self.scheduler.has_requests() and self.engine.step()

    def post_step(self, model_executed: bool) -> None:
        pass

    def turn(self) -> bool:
        """One turn of the busy loop; whether it goes on."""
        if not self._handle_shutdown():
            return False
        self._process_input_queue()
        self._process_engine_step()
        return True


@pytest.fixture
def d(model: Path) -> Engine:
    """A decode engine that keeps a turn."""
    engine = Engine(model, "d")
    finished_turn(engine, list(range(100)), [1] * 10)
    engine.step()
    assert len(engine.bidir.kept) == 1
    return engine


def unread_handover(model: Path) -> tuple[Engine, Request]:
    p = Engine(model, "p")
    request = p.add(list(range(100)), FIRST_TURN)
    while not request.is_finished():
        p.step()
    p.step()
    return p, request


def test_a_reset_ends_kept_turns_and_succeeds(d: Engine) -> None:
    all_blocks = d.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    assert d.scheduler.reset_prefix_cache()
    assert len(d.bidir.kept) == 0
    assert d.free_blocks == all_blocks
    assert d.scheduler.requests == {}


def test_what_workers_say_later_of_a_turn_that_a_reset_has_ended_counts_no_more(d: Engine) -> None:
    (name,) = d.scheduler.requests
    d.scheduler.reset_prefix_cache()
    metadata = d.scheduler.schedule().kv_connector_metadata
    assert name in metadata.reqs_to_send, "they are told"
    d.expire(name)
    d.run(list(range(500, 700)), None, max_tokens=3)
    assert d.bidir._ended == set()


@pytest.mark.parametrize("mode", ["abort", "wait"])
@pytest.mark.parametrize("running", [False, True])
def test_a_pause_with_a_kept_turn_completes(d: Engine, mode: str, running: bool) -> None:
    core = Core(d)
    if running:
        d.add(list(range(500, 600)), None, max_tokens=3)
        d.step()
    paused = core.pause_scheduler(mode, True)
    for _ in range(20):
        core.turn()
    assert paused is None or paused.done()
    assert d.scheduler.pause_state is PauseState.PAUSED_NEW
    assert len(d.bidir.kept) == 0
    core.resume_scheduler()
    d.run(list(range(100)), None, max_tokens=3)


def test_a_pause_waits_for_the_reader_of_a_handover(model: Path) -> None:
    p, request = unread_handover(model)
    core = Core(p)
    paused = core.pause_scheduler("wait", True)
    assert isinstance(paused, Future)
    for _ in range(5):
        core.turn()
    assert not paused.done()
    p.expire(request.request_id)
    for _ in range(5):
        core.turn()
    assert paused.done()


def test_a_drain_waits_for_the_reader_of_a_handover(model: Path) -> None:
    """Else each rolling restart of P fails the turns that D is about to read."""
    p, request = unread_handover(model)
    core = Core(p)
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert all(core.turn() for _ in range(5))
    p.expire(request.request_id)
    assert not all(core.turn() for _ in range(5))


def test_a_drain_does_not_wait_for_kept_turns(d: Engine) -> None:
    core = Core(d)
    core.shutdown_state = EngineShutdownState.REQUESTED
    assert not all(core.turn() for _ in range(5))
