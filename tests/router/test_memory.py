"""What is remembered of a conversation takes little beside D's params."""

from __future__ import annotations

import time
import tracemalloc

import msgspec
from vllm.bidir.router.conversations import Conversations, conversation_key
from vllm.bidir.router.leases import Leases
from vllm.bidir.router.metrics import Metrics

from tests.router.fake_engine import d_params
from tests.router.fake_leases import lease_id

COUNT = 2_000
MOST_BYTES = 620


def test_a_leased_conversation_takes_600_bytes_and_its_params() -> None:
    leases = Leases(Metrics())
    kept = Conversations(COUNT, 450.0, 600.0, leases, time.monotonic)
    params = d_params(1) | {"lease_id": lease_id(0), "lease_duration": 15.0}
    size = len(msgspec.json.encode(params))
    tracemalloc.start()
    try:
        for number in range(COUNT):
            mine = d_params(1) | {"lease_id": lease_id(number), "lease_duration": 15.0}
            kept.put(conversation_key("", str(number)), mine, "node")
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == len(leases) == COUNT
    assert taken / COUNT - size < MOST_BYTES
