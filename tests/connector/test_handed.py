"""P's list of handovers, and what it answers to who claims: a real scheduler, a real socket."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from vllm.bidir.connector import peer
from vllm.bidir.connector.handed import PARAM, VERSION, HandedOver
from vllm.bidir.connector.kept import KeptTurns
from vllm.bidir.connector.listener import start_listener
from vllm.bidir.connector.messages import (
    MAX_NAME,
    MalformedMessageError,
    SideChannel,
    ask_claim,
    read_claim,
)
from vllm.bidir.connector.rest import LOOKS_S
from vllm.bidir.reasons import Reason

from tests.connector.sim import FIRST_TURN, Engine

HOST = "127.0.0.1"
HANDOVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(1, 9))],
    "remote_engine_id": "p",
    "remote_request_id": "there",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    PARAM: VERSION,
}


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def handed(clock: Clock) -> HandedOver:
    """One handover, kept for 30 s."""
    made = HandedOver(clock)
    made.add("r", clock.now + 30)
    return made


def test_a_claim_says_for_how_long_the_blocks_stay(handed: HandedOver, clock: Clock) -> None:
    assert handed.claim("r", "d") == 30
    clock.now += 10
    assert handed.claim("r", "d") == 20, "its own reader may ask again"


def test_what_d_keeps_alive_beyond_its_time_stands_without_a_promise(
    handed: HandedOver, clock: Clock
) -> None:
    """The workers prolong it when D sends a heartbeat; the list is not told."""
    clock.now += 31
    assert handed.claim("r", "d") == 0


def test_what_has_been_freed_cannot_be_claimed(handed: HandedOver) -> None:
    handed.claim("r", "d")
    handed.end("r")
    handed.end("r")
    assert handed.claim("r", "d") is None
    assert handed.claim("never", "d") is None
    assert len(handed) == 0


def test_a_handover_is_one_readers(handed: HandedOver) -> None:
    """The first may say that it is done, and have it freed, while the second reads."""
    assert handed.claim("r", "d0") == 30
    assert handed.claim("r", "d1") is None
    assert handed.claim("r", "d0") == 30


@pytest.fixture
def port(handed: HandedOver) -> Iterator[int]:
    """Where the list is asked about."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        found: int = free.getsockname()[1]
    stop = threading.Event()
    channel = SideChannel(KeptTurns(), "p", 1, {}, b"get_meta", lambda: 0.0, handed=handed)
    thread = start_listener(channel, HOST, found, stop)
    yield found
    stop.set()
    thread.join(timeout=5)


def test_a_claim_over_the_wire(handed: HandedOver, port: int) -> None:
    asked = peer.claim(HOST, port, "r", "d", 5.0)
    assert (asked.stands_s, asked.reason, asked.address) == (30, None, (HOST, port))
    assert asked.asked > 0
    handed.end("r")
    asked = peer.claim(HOST, port, "r", "d", 5.0)
    assert (asked.stands_s, asked.reason) == (None, Reason.EXPIRED)


@pytest.mark.parametrize("names", [("", "d"), ("r", ""), ("r" * (MAX_NAME + 1), "d"), (1, "d")])
def test_a_claim_that_names_nothing_is_not_understood(
    handed: HandedOver, names: tuple[object, object]
) -> None:
    channel = SideChannel(KeptTurns(), "p", 1, {}, b"get_meta", lambda: 0.0, handed=handed)
    with pytest.raises(MalformedMessageError):
        channel.answer(msgspec.msgpack.encode((b"bidir_claim/1", *names)))


@pytest.mark.parametrize("answer", [-1.0, math.inf, math.nan, "soon", True, [1.0]])
def test_an_answer_that_is_no_time_is_not_believed(answer: object) -> None:
    with pytest.raises(MalformedMessageError):
        read_claim(msgspec.msgpack.encode(answer))


def test_p_lists_what_it_hands_over_until_its_blocks_are_freed(model: Path) -> None:
    p = Engine(model, "p")
    request = p.add(list(range(100)), FIRST_TURN)
    while not request.is_finished():
        p.step()
    params = p._finished[request.request_id]
    assert params is not None and params[PARAM] == VERSION
    channel = SideChannel(
        p.bidir.kept, "p", 1, {}, b"get_meta", time.perf_counter, handed=p.bidir.handed
    )
    ask = ask_claim(request.request_id, "d")
    stands_s = read_claim(channel.answer(ask)[0])
    assert stands_s is not None and 20 < stands_s <= 30, "kv_lease_duration"
    freed = p.free_blocks
    p.expire(request.request_id)
    assert p.free_blocks > freed
    assert read_claim(channel.answer(ask)[0]) is None
    assert len(p.bidir.handed) == 0


def test_what_a_turn_on_d_keeps_is_no_handover(model: Path) -> None:
    d = Engine(model, "d")
    params, _ = d.run(list(range(100)), {"do_remote_prefill": False}, max_tokens=3)
    assert params is not None and PARAM not in params
    assert len(d.bidir.handed) == 0


@pytest.mark.parametrize(
    ("change", "claims"),
    [
        ({}, True),
        ({PARAM: None}, False),
        ({PARAM: 2}, False),
        ({"remote_request_id": "r" * (MAX_NAME + 1)}, False),
    ],
)
def test_d_claims_what_p_says_can_be_claimed(
    model: Path, change: dict[str, object], claims: bool
) -> None:
    """A stock P, or another version, would not understand."""
    d = Engine(model, "d")
    request = d.add(list(range(100)), {**HANDOVER, **change})
    metadata = d.scheduler.schedule().kv_connector_metadata
    assert request.request_id in metadata.reqs_to_recv
    assert metadata.claims == ({request.request_id} if claims else set())
    assert d.bidir._claims == set(), "each is told once"


def test_d_claims_what_it_tells_p_to_free(model: Path) -> None:
    """A request that goes before it is scheduled; the engine may be at rest behind it."""
    d = Engine(model, "d")
    request = d.add(list(range(100)), HANDOVER)
    d.abort(request)
    assert d.bidir.rest.is_due()
    metadata = d.scheduler.schedule().kv_connector_metadata
    assert metadata.claims == {request.request_id}
    left = d.bidir.rest.seconds_left()
    assert left is not None and 0 < left <= LOOKS_S[0], "then the answer is looked for"
