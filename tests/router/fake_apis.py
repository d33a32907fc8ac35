"""What engines answer on /v1/responses and /v1/messages: whole and streamed, as vLLM 0.29 does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from tests.router.fake_engine import P_PARAMS, FakeEngine


def named(kind: str, data: dict[str, Any]) -> bytes:
    text = json.dumps({"type": kind, **data}, separators=(",", ":"), ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


def output(number: int) -> list[dict[str, Any]]:
    """Reasoning, text and a call of a tool."""
    text = {"type": "output_text", "text": f"answer {number} \u00fc\u4e2d\U0001f600"}
    return [
        {"type": "reasoning", "id": f"rs_{number}", "summary": []},
        {"type": "message", "role": "assistant", "id": f"msg_{number}", "content": [text]},
        {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"},
    ]


def response(number: int, params: Any, **more: Any) -> dict[str, Any]:
    details = {"input_tokens_details": {"cached_tokens": 7}}
    made = {"id": f"resp_{number}", "object": "response", "output": output(number)}
    return {**made, "usage": details, "kv_transfer_params": params, **more}


def responses_stream(number: int, params: Any) -> list[bytes]:
    begun = response(number, None, output=[])
    delta = {"delta": 'say "kv_transfer_params": {} and "response.completed"'}
    return [
        named("response.created", {"response": begun}),
        named("response.output_text.delta", delta),
        named("response.completed", {"response": response(number, params)}),
    ]


def messages_stream(params: Any) -> list[bytes]:
    delta = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
    return [
        named("message_start", {"message": {"id": "msg", "content": []}}),
        named("content_block_delta", {"index": 0, "delta": {"text": "hi \u00fc"}}),
        named("message_delta", {**delta, **({"kv_transfer_params": params} if params else {})}),
        named("message_stop", {}),
        b"data: [DONE]\n\n",
    ]


def without_params(pieces: Sequence[bytes]) -> bytes:
    """The same stream as a client must see it."""
    out = b""
    for piece in pieces:
        kind, _, text = piece.partition(b"\ndata: ")
        if b'"kv_transfer_params":' in piece and b'\\"kv_transfer_params' not in piece:
            data = json.loads(text)
            data.get("response", data).pop("kv_transfer_params")
            piece = named(kind.removeprefix(b"event: ").decode(), data)
        out += piece
    return out


def speak_all(engine: FakeEngine) -> None:
    """Let a fake engine answer on all APIs."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        number = len(engine.asked)
        params = P_PARAMS if engine.role == "prefill" else engine.params(number)
        if request.path == "/v1/responses":
            whole, pieces = response(number, params), responses_stream(number, params)
        elif request.path == "/v1/messages":
            whole = {"id": "m", "content": [], "usage": {"cache_read_input_tokens": 5}}
            whole["kv_transfer_params"] = params
            pieces = messages_stream(params)
        else:
            return None
        if not body.get("stream"):
            return web.json_response(whole)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in pieces:
            await answer.write(piece)
        return answer

    engine.script = script
