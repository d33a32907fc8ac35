"""The base's scheduler where transfers of one request fail, overlap or end in an unusual order.

Real schedulers; what the workers would report of transfers is played by the tests.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import zmq_ctx
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.connector.sim import BLOCK, Engine, kv_cache_config, play_step, vllm_config

PROMPT = list(range(100, 100 + 3 * BLOCK + 5))
HANDOVER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "p",
    "remote_request_id": "there",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


@pytest.fixture
def d(model: Path) -> Engine:
    return Engine(model, "d")


def step(
    engine: Engine,
    received: Collection[str] = (),
    sent: Collection[str] = (),
    invalid: Collection[int] = (),
) -> list[EngineCoreOutput]:
    """One engine step at whose end the workers report transfers; what requests have said."""
    told = KVConnectorOutput(
        finished_recving=set(received),
        finished_sending=set(sent),
        invalid_block_ids=set(invalid),
    )
    return play_step(engine, told)[1]


def receiving(d: Engine, prompt: list[int] = PROMPT) -> Request:
    """A request that waits for the KV of its prompt."""
    request = d.add(prompt, HANDOVER)
    step(d)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


############################################################
# Ends of a transfer
############################################################


@pytest.mark.parametrize("order", ["receive_first", "send_first", "same_step"])
def test_an_aborted_request_is_freed_when_both_its_transfers_have_ended(
    d: Engine, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = d.free_blocks
    request = receiving(d)
    name, taken = {request.request_id}, free - d.free_blocks
    # As MultiConnector answers when another of its connectors is still saving the blocks.
    monkeypatch.setattr(d.connector, "request_finished_all_groups", lambda *_: (True, None))
    d.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    if order != "same_step":
        receive_first = order == "receive_first"
        step(d, received=name if receive_first else (), sent=() if receive_first else name)
        assert request.request_id in d.scheduler.requests
        assert free - d.free_blocks == taken, "the other transfer still needs the blocks"
        step(d, received=() if receive_first else name, sent=name if receive_first else ())
    else:
        step(d, received=name, sent=name)
    assert request.request_id not in d.scheduler.requests
    assert d.free_blocks == free
    assert not d.scheduler.recving_and_sending_req_ids


@pytest.mark.parametrize("transfer", ["received", "sent"])
def test_a_request_with_one_transfer_is_freed_when_that_has_ended(
    d: Engine, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = d.free_blocks
    if transfer == "received":
        request = receiving(d)
    else:
        monkeypatch.setattr(d.connector, "request_finished_all_groups", lambda *_: (True, None))
        request = d.add(PROMPT, None, max_tokens=2)
        step(d)
    d.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert d.free_blocks < free
    step(d, **{transfer: {request.request_id}})
    assert request.request_id not in d.scheduler.requests
    assert d.free_blocks == free


def test_a_failed_receive_keeps_its_blocks_until_the_last_read_has_ended(d: Engine) -> None:
    """What the workers rely on when they report bad blocks at once and the end later."""
    free = d.free_blocks
    request = receiving(d)
    (blocks,) = d.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    taken = free - d.free_blocks
    (said,) = step(d, invalid=blocks)
    assert str(said.finish_reason) == "error"
    assert free - d.free_blocks == taken
    assert step(d, invalid=blocks) == []
    step(d, received={request.request_id})
    assert d.free_blocks == free


############################################################
# Orders
############################################################


@pytest.mark.parametrize("cached", [0, 1, 2, 3])
def test_whatever_is_waited_for_has_blocks_to_receive(model: Path, cached: int) -> None:
    """A worker reports only what has blocks: without any, the request would wait for ever."""
    for length in range(1, 3 * BLOCK + 2):
        d = Engine(model, "d")
        prompt = PROMPT[:length]
        if cached:
            d.run(PROMPT[: cached * BLOCK], None)
        request = d.add(prompt, HANDOVER)
        orders = d.scheduler.schedule().kv_connector_metadata.reqs_to_recv
        waits = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert waits == any(orders[request.request_id].local_block_ids)
        # A whole prompt is never taken from the local cache: its last token is computed.
        assert waits


def test_a_request_that_ends_before_it_was_scheduled_only_notifies(d: Engine) -> None:
    request = d.add(PROMPT, HANDOVER)
    d.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert request.request_id not in d.scheduler.requests
    orders = d.scheduler.schedule().kv_connector_metadata.reqs_to_recv
    assert not any(orders[request.request_id].local_block_ids)


############################################################
# The side channel
############################################################


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_side_channel_port_that_is_taken_is_an_error_at_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        scheduler = NixlPullConnectorScheduler(vllm_config(model, "d"), "d", kv_cache_config(10))
        errors: list[str] = []

        def start() -> None:
            try:
                scheduler.set_xfer_handshake_metadata({})
            except RuntimeError as error:
                errors.append(str(error))

        starter = threading.Thread(target=start, daemon=True)
        starter.start()
        starter.join(timeout=5)
        assert not starter.is_alive(), "the start hangs"
    (error,) = errors
    assert f"127.0.0.1:{port}" in error and "VLLM_NIXL_SIDE_CHANNEL_PORT" in error


def test_a_side_channel_that_is_slow_to_open_is_waited_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*arguments: Any) -> Any:
        time.sleep(0.3)
        return zmq_ctx(*arguments)

    monkeypatch.setattr(base_scheduler, "zmq_ctx", slowly)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    scheduler = NixlPullConnectorScheduler(vllm_config(model, "d"), "d", kv_cache_config(10))
    scheduler.set_xfer_handshake_metadata({})
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    scheduler.shutdown()
