"""A kept turn's record says the same to whoever reads a part of it as to whoever reads it all."""

from __future__ import annotations

import msgspec
import pytest
from vllm.bidir.router.conversations.record import KeptTurn, Records
from vllm.bidir.router.nodes.params import as_offered

LEASE = "d3-" + "0123456789abcdef" * 2


@pytest.mark.parametrize(
    "turn",
    [
        KeptTurn("n:1", None, LEASE, 300.0, 0.0, 1203, 1_767_225_600),
        KeptTurn("n:1", None, LEASE, None, 17.5, 0, 7),
        KeptTurn("n:2", None, None, None, 17.5),
    ],
)
def test_parts_of_a_record(turn: KeptTurn) -> None:
    records = Records()
    records.pack(KeptTurn("other:1"), 0.0)
    record = records.pack(turn, 41.25)
    assert records.unpack(record) == turn
    assert records.used(record) == 41.25 and records.stamp(record) == turn.stamp
    assert records.renewed_on(record) == (None if turn.renewed_s is None else turn.node)
    touched = records.touched(record, 42.5)
    assert records.unpack(touched) == turn and records.used(touched) == 42.5
    assert touched == records.pack(turn, 42.5)


@pytest.mark.parametrize(
    ("said", "as_it_is"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": False}, True),
        ({"do_remote_decode": False, "do_remote_prefill": True}, False),
        ({"do_remote_decode": True}, False),
        ({"do_remote_decode": 1, "do_remote_prefill": 0}, False),
        ({"do_remote_decode": True, "do_remote_prefill": {"x": []}}, False),
        ({}, False),
    ],
)
def test_what_p_is_offered_is_what_d_has_said_and_what_to_do_with_it(
    said: dict[str, object], as_it_is: bool
) -> None:
    params = {"remote_block_ids": [[1, 2]], **said, "lease_id": LEASE}
    offered = as_offered(params)
    orders = {"do_remote_decode": True, "do_remote_prefill": False}
    decoded = msgspec.json.decode(offered)
    assert decoded == params | orders
    assert all(decoded[name] is value for name, value in orders.items())
    assert (offered == msgspec.json.encode(params)) == as_it_is
