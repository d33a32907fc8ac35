# SPDX-License-Identifier: Apache-2.0
"""The thread that serves the side channel, and that no message can end."""

from __future__ import annotations

import threading

import zmq
from vllm.bidir.connector.messages import MalformedMessageError, SideChannel
from vllm.logger import init_logger
from vllm.utils.network_utils import is_valid_ipv6_address, make_zmq_path

logger = init_logger(__name__)

_POLL_MS = 500
_MAX_FRAME = 1 << 16
# Answers that an asker has not taken; further ones to it are dropped.
_MAX_UNREAD = 1000
_NOTHING = b"\xc0"  # msgpack's nil: an answer that says nothing ends the asker's wait at once


def start_listener(
    channel: SideChannel, host: str, port: int, stop: threading.Event
) -> threading.Thread:
    """Listen until `stop` is set; returns once the socket is bound.

    RuntimeError, naming the address and what to change, when it cannot be had.
    """
    ready = threading.Event()
    failure: list[Exception] = []

    def listen() -> None:
        try:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVTIMEO, _POLL_MS)
                # Before bind: they hold for connections of later binds only.
                socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
                socket.setsockopt(zmq.SNDHWM, _MAX_UNREAD)
                socket.setsockopt(zmq.IPV6, is_valid_ipv6_address(host))
                socket.bind(make_zmq_path("tcp", host, port))
                ready.set()
                while not stop.is_set():
                    _serve_one(socket, channel)
        except Exception as error:
            # Before `ready` it is the starter's to raise; afterwards it must not pass unseen.
            failure.append(error)
            if ready.is_set():
                logger.exception("side channel: the listener has ended; no peer can reach us")
            ready.set()

    thread = threading.Thread(target=listen, daemon=True, name="bidir_listener")
    thread.start()
    ready.wait()
    if failure:
        raise RuntimeError(
            f"cannot open NIXL's side channel on {host}:{port}: {failure[0]}; set "
            "VLLM_NIXL_SIDE_CHANNEL_PORT (or _HOST) to an address that is free on this machine"
        ) from failure[0]
    return thread


def _serve_one(socket: zmq.Socket[bytes], channel: SideChannel) -> None:
    try:
        frames = socket.recv_multipart()
    except zmq.Again:
        return
    if len(frames) != 3:
        logger.warning("side channel: a message of %d frames is ignored", len(frames))
        return
    identity, _, message = frames
    try:
        answer = channel.answer(message)
    except MalformedMessageError as error:
        logger.warning("side channel: a message is not understood: %s", error)
        answer = [_NOTHING]
    except Exception:
        # Whatever one message does, the next asker must be answered.
        logger.exception("side channel: a message could not be answered")
        answer = [_NOTHING]
    socket.send_multipart([identity, b"", *answer])
