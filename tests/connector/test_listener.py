"""The side channel's thread, over a real socket: it answers, survives, and says when it cannot."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from vllm.bidir.connector import peer
from vllm.bidir.connector.kept import KeptTurn, KeptTurns
from vllm.bidir.connector.listener import start_listener
from vllm.bidir.connector.messages import SideChannel
from vllm.bidir.reasons import Reason

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        found: int = free.getsockname()[1]
        return found


@pytest.fixture
def kept(port: int) -> Iterator[KeptTurns]:
    """A listener at `port` that knows one kept turn."""
    made = KeptTurns()
    made.keep(KeptTurn("d0-1", "r", (4, 5), 40, b"digest"))
    stop = threading.Event()
    channel = SideChannel(made, "engine", 1, {(0, 0): b"payload"}, b"get_meta_msg", lambda: 0.0)
    thread = start_listener(channel, HOST, port, stop)
    yield made
    stop.set()
    thread.join(timeout=5)
    assert not thread.is_alive()


def send(port: int, frames: list[bytes]) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{HOST}:{port}")
    dealer.send_multipart(frames)
    context.destroy(linger=200)


def test_hold_and_confirm_over_the_wire(kept: KeptTurns, port: int) -> None:
    asked = peer.hold(HOST, port, "d0-1", 5.0)
    assert asked.hold is not None and asked.hold.block_ids == [4, 5]
    assert peer.confirm(HOST, port, "d0-1", asked.hold.epoch, 5.0).stood
    kept.end("r")
    assert peer.confirm(HOST, port, "d0-1", asked.hold.epoch, 5.0).reason is Reason.HOLD_LOST
    assert peer.hold(HOST, port, "d0-1", 5.0).reason is Reason.HOLD_LOST


def test_no_message_ends_it(kept: KeptTurns, port: int) -> None:
    """One that names a rank that does not exist ends the base's listener for good."""
    for frames in (
        [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 99))],
        [b"", b"\xc1" * 100],
        [b"", b""],
        [b"alone"],
        [b"", b"a", b"b", b"c"],
        [b"", b"x" * 100_000],
    ):
        send(port, frames)
    assert peer.hold(HOST, port, "d0-1", 5.0).hold is not None


def test_an_asker_of_a_rank_that_is_not_there_is_not_left_waiting(
    kept: KeptTurns, port: int
) -> None:
    context = zmq.Context()
    request = context.socket(zmq.REQ)
    request.setsockopt(zmq.RCVTIMEO, 5000)
    request.connect(f"tcp://{HOST}:{port}")
    request.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 99)))
    assert request.recv_multipart() == [b"\xc0"]
    context.destroy(linger=0)


def test_a_taken_port_fails_at_once_and_says_what_to_change(kept: KeptTurns, port: int) -> None:
    """The base waits for ever."""
    channel = SideChannel(kept, "engine", 1, {}, b"", lambda: 0.0)
    with pytest.raises(RuntimeError, match=f"{HOST}:{port}.*VLLM_NIXL_SIDE_CHANNEL_PORT"):
        start_listener(channel, HOST, port, threading.Event())


@pytest.mark.parametrize("host", ["", "no such host", "[::"])
def test_a_host_that_is_none_fails_at_once(host: str) -> None:
    channel = SideChannel(KeptTurns(), "engine", 1, {}, b"", lambda: 0.0)
    with pytest.raises(RuntimeError, match="cannot open NIXL's side channel"):
        start_listener(channel, host, 5600, threading.Event())


def test_nobody_there_is_a_timeout_within_the_bound(port: int) -> None:
    asked = peer.hold(HOST, port, "d0-1", 0.3)
    assert asked.reason is Reason.TIMEOUT
    assert asked.seconds < 3


def test_a_name_that_resolves_slowly_delays_nobody_else(
    kept: KeptTurns, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Params name hosts, and ZMQ would look them up one after the other."""
    look_up, let_go = socket.getaddrinfo, threading.Event()

    def slowly(host: str, *more: Any, **options: Any) -> Any:
        assert host == HOST or let_go.wait(10)
        return look_up(HOST, *more, **options)

    monkeypatch.setattr(peer.socket, "getaddrinfo", slowly)
    slow = threading.Thread(target=peer.hold, args=("slow.example", port, "d0-1", 5.0))
    slow.start()
    assert peer.hold(HOST, port, "d0-1", 5.0).hold is not None
    assert slow.is_alive()
    let_go.set()
    slow.join(10)


def test_a_name_that_is_none_is_a_peer_that_is_gone(port: int) -> None:
    for host in ("no.such.host.invalid", "", "\ud800", "a" * 300):
        assert peer.hold(host, port, "d0-1", 5.0).reason in (Reason.PEER_GONE, Reason.TIMEOUT)


def test_a_huge_message_is_cut_off_before_it_is_taken_in(kept: KeptTurns, port: int) -> None:
    """One that were merely too long to be understood would be answered with nothing."""
    context = zmq.Context()
    request = context.socket(zmq.REQ)
    request.setsockopt(zmq.LINGER, 0)
    request.setsockopt(zmq.RCVTIMEO, 1000)
    request.connect(f"tcp://127.0.0.1:{port}")
    request.send(b"x" * (1 << 20))
    with pytest.raises(zmq.Again):
        request.recv_multipart()
    context.destroy(linger=0)
    assert peer.hold("127.0.0.1", port, "nobody", 5.0).reason is Reason.HOLD_LOST
