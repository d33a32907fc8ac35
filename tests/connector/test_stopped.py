"""The engine core finishes requests that have come to a stop string, and tells what it keeps."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from tests.connector.sim import Engine
from tests.connector.test_simulated import D_TURN


@pytest.fixture
def d(model: Path) -> Engine:
    return Engine(model, "d")


def finish(d: Engine, *request_ids: str) -> list[Any]:
    core: Any = SimpleNamespace(scheduler=d.scheduler, output_queue=queue.Queue())
    EngineCore.finish_stopped(core, list(request_ids))
    answers = []
    while not core.output_queue.empty():
        client, outputs = core.output_queue.get()
        assert client == 0
        answers += outputs.outputs
    return answers


def running(d: Engine, tokens: int = 60) -> str:
    request = d.add(list(range(40)), {**D_TURN, "x": 1}, max_tokens=500)
    while request.num_tokens < tokens:
        d.step()
    assert request.status is RequestStatus.RUNNING
    return str(request.request_id)


def test_its_turn_is_kept_and_told(d: Engine) -> None:
    name = running(d)
    (answer,) = finish(d, name)
    assert answer.request_id == name
    assert answer.finish_reason is FinishReason.STOP
    assert answer.kv_transfer_params["remote_num_tokens"] == 59
    assert answer.kv_transfer_params["lease_id"].startswith("d0-")
    assert len(d.bidir.kept) == 1
    # The engine goes on with others, and this turn ends like any.
    running(d)
    d.expire(name)
    assert len(d.bidir.kept) == 0


def test_one_that_is_over_or_unknown_has_no_answer(d: Engine) -> None:
    name = running(d)
    finish(d, name)
    assert finish(d, name, "nobody") == []


def test_a_turn_that_proves_nothing_is_answered_all_the_same(d: Engine) -> None:
    """The client's last output waits for it."""
    request = d.add([1, 2, 3], {**D_TURN, "x": 1}, max_tokens=500)
    d.step()
    free = d.free_blocks
    (answer,) = finish(d, request.request_id)
    assert answer.kv_transfer_params is None
    assert d.free_blocks > free
