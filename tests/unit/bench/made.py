"""Records and runs with given figures, made without any server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.bench.fake import BLOCK, BYTES_PER_TOKEN
from tools.bench.arms import ARMS
from tools.bench.collect import Joined, Run
from tools.bench.plan import Workload
from tools.bench.records import Record

WORKLOAD = Workload(
    lengths=(400, 700),
    new_tokens=50,
    output_tokens=4,
    turns=3,
    first_tokens=200,
    hold_conversations=2,
    hold_tokens=200,
    stream_tokens=6,
)
RECORD = Record(
    ttft_ms=100.0,
    tpot_ms=5.0,
    latency_ms=200.0,
    start_time_ms=0.0,
    input_num_turns=3,
    input_num_tokens=700,
    output_num_tokens=4,
    output_num_chunks=4,
    output_num_first_chunk_tokens=1,
    approx_cached_percent=90.0,
    conversation_id="c",
    client_id=0,
    request_id="a1b2c3d4-000001",
    arm="on",
    repeat=0,
    unit="sweep-700",
    talk=0,
    turn=2,
    phase="sweep",
    held=0,
    mutation="",
    itl_ms=(),
    reply_digest="same",
)


def record(**changes: Any) -> Record:
    return replace(RECORD, **changes)


def read(tokens: int, moved: int | None = None, **changes: Any) -> Joined:
    """A request that has read so many tokens; whole blocks are moved unless told otherwise."""
    blocks = -(-tokens // BLOCK)
    made = record(**{"input_num_tokens": tokens + 50, **changes})
    return Joined(
        made,
        decision="hit",
        outcome="read",
        prefill_ms=40.0,
        tokens_verified=tokens,
        tokens_read=tokens,
        tokens_computed=50,
        bytes_moved=blocks * BLOCK * BYTES_PER_TOKEN if moved is None else moved,
        hold_ms=1.0,
        transfer_ms=8.0,
        confirm_ms=0.5,
    )


def computed(**changes: Any) -> Joined:
    """A request whose prompt P has computed."""
    made = record(**{"arm": "off", **changes})
    tokens = made.input_num_tokens
    return Joined(
        made,
        decision="miss",
        reason="no_params",
        prefill_ms=90.0,
        tokens_read=0,
        tokens_computed=tokens,
        bytes_moved=0,
    )


def about(arm: str, repeat: int = 0, **changes: Any) -> dict[str, Any]:
    made = ARMS[arm]
    return {
        "arm": arm,
        "repeat": repeat,
        "front": made.front,
        "bidirectional": made.bidirectional,
        "prefill_cache": made.prefill_cache,
        "must_move": made.must_move,
        "device": "cpu",
        "note": "",
        "model_name": "tiny",
        "model": {"num_hidden_layers": 4},
        "dtype": "float32",
        "max_model_len": 4096,
        "tensor_parallel": 1,
        "kv_bytes_per_token": BYTES_PER_TOKEN,
        "block_size": BLOCK,
        "workload": WORKLOAD.as_json(),
        "versions": {"vllm": "0.29.0+cpu.bidir.1"},
        "hardware": {"cpu": "c", "cores": 2, "memory_gib": 1, "gpus": [], "kernel": "k"},
        "connectors": {"prefill-0": {"bidirectional_kv_xfer": made.bidirectional}},
        "sessions": [
            {
                "begun": f"2026-01-0{repeat + 1}T00:00:0{0 if arm == 'off' else 1}",
                "busy_share": 0.02,
                "commands": {"prefill-0": ["vllm", "serve", "<m>"]},
                "environment": {"prefill-0": {"A": "1"}},
                "totals": None,
            }
        ],
        **changes,
    }


def run(arm: str, *joined: Joined, repeat: int = 0, **changes: Any) -> Run:
    return Run(about(arm, repeat, **changes), joined)


def pairs(repeats: int = 3) -> list[Run]:
    """Off and on, two prompt lengths each."""
    runs = []
    for repeat in range(repeats):
        for arm in ("off", "on"):
            ones = []
            for tokens in (400, 700):
                changes = {
                    "arm": arm,
                    "repeat": repeat,
                    "unit": f"sweep-{tokens}",
                    "request_id": f"{arm}-{repeat}-{tokens}",
                    "ttft_ms": (tokens / 2 if arm == "off" else 60) + repeat,
                }
                if arm == "on":
                    ones.append(read(tokens - 50, **changes))
                else:
                    ones.append(computed(input_num_tokens=tokens, **changes))
            runs.append(run(arm, *ones, repeat=repeat))
    return runs
