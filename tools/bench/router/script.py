"""What the scripted engines answer: bytes as vLLM 0.29.0 with this wheel writes them."""

from __future__ import annotations

import json
from typing import Any

BLOCK_SIZE = 16
_MAX_CHECKPOINTS = 128
_DIGEST = "k" * 22
# 32 digits, as many as a lease's own; each turn writes its number over them.
_NUMBER = "0" * 32

_ID = "chatcmpl-8f14e45fceea4b7a9c3d2e1f0a9b8c7d"
_CHUNK = {"id": _ID, "object": "chat.completion.chunk", "created": 1767225600, "model": "bench"}


def prefill_params(tokens: int) -> dict[str, Any]:
    """P's kv_transfer_params after a prompt of so many tokens."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(tokens // BLOCK_SIZE))],
        "remote_engine_id": "prefill-0",
        "remote_request_id": f"chatcmpl-{_NUMBER}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
        "transfer_mode": "pull",
        "readback": 1,
    }


def decode_params(tokens: int, lease_s: float | None = None) -> dict[str, Any]:
    """D's of a turn that has ended, its history so many tokens long: blocks and their proof."""
    blocks = tokens // BLOCK_SIZE
    last = max(0, blocks - 1)
    count = min(blocks, _MAX_CHECKPOINTS)
    indexes = sorted({last - last * k // max(1, count - 1) for k in range(count)})
    lease = {} if lease_s is None else {"lease_duration": lease_s}
    return {
        **prefill_params(tokens),
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_engine_id": "decode-0",
        "remote_port": 5700,
        "lease_id": f"d0-{_NUMBER}",
        **lease,
        "prefix_proof": {
            "v": 1,
            "hash": "sha256:9b1e5a6cc1f04e5f",
            "block_size": BLOCK_SIZE,
            "checkpoints": [[index, _DIGEST] for index in indexes],
            "tail": list(range(100_000, 100_000 + tokens % BLOCK_SIZE)),
        },
    }


def encoded(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def numbered(data: bytes, number: int) -> bytes:
    """The same with this turn's own number in it."""
    return data.replace(_NUMBER.encode(), b"%032x" % number)


def event(data: bytes) -> bytes:
    """One server-sent event as one chunk of the body, the way uvicorn sends it."""
    text = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


def content_event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return event(encoded({**_CHUNK, "choices": [choice], **more}))


def whole_answer(params: dict[str, Any]) -> bytes:
    """P's answer, one token long."""
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
    return encoded({**_CHUNK, "choices": [choice], "usage": usage, "kv_transfer_params": params})


def request_body(
    conversation: str, chunks: int, interval_ms: float, prompt_bytes: int, steps: bool = False
) -> bytes:
    """A client's request. The engines read their script from `bench`."""
    return encoded(
        {
            "model": "bench",
            "messages": [
                {"role": "system", "content": "You answer."},
                {"role": "user", "content": ("Some words, again. " * (prompt_bytes // 19 + 1))},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": chunks,
            "temperature": 0,
            "conversation_id": conversation,
            "bench": {"chunks": chunks, "interval_ms": interval_ms, "steps": steps},
        }
    )
