"""The side channel answers what it understands, and survives what it does not."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.bidir.connector.kept import KeptTurn, KeptTurns, new_lease_id
from vllm.bidir.connector.messages import (
    HoldAnswer,
    MalformedMessageError,
    SideChannel,
    ask_confirm,
    ask_hold,
    read_confirm,
    read_hold,
)

META = b"get_meta_msg"
TURN = KeptTurn("d0-1", "r1", (4, 5, 6), 40, b"digest")


def channel(kept: KeptTurns) -> SideChannel:
    return SideChannel(kept, "engine", 1, {(0, 0): b"payload"}, META, lambda: 12.5)


@pytest.fixture
def kept() -> KeptTurns:
    made = KeptTurns()
    made.keep(TURN)
    return made


def hold(kept: KeptTurns, lease: str = "d0-1") -> HoldAnswer | None:
    (answer,) = channel(kept).answer(ask_hold(lease))
    return read_hold(answer)


def confirm(kept: KeptTurns, epoch: int, lease: str = "d0-1") -> bool:
    (answer,) = channel(kept).answer(ask_confirm(lease, epoch))
    return read_confirm(answer)


def test_a_held_turn_tells_its_blocks_and_is_confirmed(kept: KeptTurns) -> None:
    held = hold(kept)
    assert held is not None
    assert (held.engine_id, held.block_ids, held.valid_tokens) == ("engine", [4, 5, 6], 40)
    assert held.digest == b"digest"
    assert confirm(kept, held.epoch)
    assert confirm(kept, held.epoch), "a finished read ends nothing"


def test_an_unknown_lease_is_gone(kept: KeptTurns) -> None:
    assert hold(kept, "d0-2") is None
    assert not confirm(kept, 0, "d0-2")


def test_an_ended_turn_is_not_confirmed(kept: KeptTurns) -> None:
    held = hold(kept)
    assert held is not None
    kept.end("r1")
    assert not confirm(kept, held.epoch)
    assert hold(kept) is None


def test_a_reset_between_hold_and_confirm_is_noticed_even_if_the_turn_is_kept_again(
    kept: KeptTurns,
) -> None:
    held = hold(kept)
    assert held is not None
    kept.end_all()
    kept.keep(TURN)
    assert not confirm(kept, held.epoch)


def test_a_restarted_engine_never_repeats_an_epoch(kept: KeptTurns) -> None:
    held = hold(kept)
    assert held is not None
    restarted = KeptTurns()
    restarted.keep(TURN)
    assert not confirm(restarted, held.epoch)


def test_the_bases_own_message_is_answered_as_before(kept: KeptTurns) -> None:
    payload, clock = channel(kept).answer(msgspec.msgpack.encode((META, 0, 0)))
    assert payload == b"payload"
    assert msgspec.msgpack.decode(clock) == 12.5


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([META]),
        msgspec.msgpack.encode([META, 0, 7]),
        msgspec.msgpack.encode([META, [], {}]),
        msgspec.msgpack.encode([META, "0", 0]),
        msgspec.msgpack.encode([b"nonsense", 1, 2]),
        ask_hold(""),
        ask_hold("x" * 65),
        msgspec.msgpack.encode([b"bidir_hold/1", 7]),
        msgspec.msgpack.encode([b"bidir_confirm/1", "d0-1", True]),
        ask_hold("x" * 10_000),
        b"\x91" * 4000,
    ],
)
def test_a_malformed_message_is_named_and_answered_with_nothing(
    kept: KeptTurns, message: bytes
) -> None:
    with pytest.raises(MalformedMessageError):
        channel(kept).answer(message)


@given(st.binary(max_size=200))
def test_no_bytes_break_it(message: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        channel(KeptTurns()).answer(message)


@given(st.binary(max_size=100))
def test_no_answer_breaks_the_asker(answer: bytes) -> None:
    for read in (read_hold, read_confirm):
        with contextlib.suppress(MalformedMessageError):
            read(answer)


def test_an_answer_that_says_nothing_means_gone() -> None:
    nothing: Any = msgspec.msgpack.encode(None)
    assert read_hold(nothing) is None
    assert read_confirm(nothing) is False


def test_lease_ids_are_unguessable_and_name_their_rank() -> None:
    ids = {new_lease_id(3) for _ in range(100)}
    assert len(ids) == 100
    assert all(one.startswith("d3-") and len(one) == 3 + 32 for one in ids)
