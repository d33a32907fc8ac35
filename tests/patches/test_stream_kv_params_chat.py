"""A stream of /v1/chat/completions carries `kv_transfer_params` on its finish chunk."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse

PATH = "/v1/chat/completions"
MODEL = "scripted"
KEY = "kv_transfer_params"
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_completion_tokens": 8,
}
PARAMS = {"remote_engine_id": "d0", "remote_block_ids": [[4, 5]], "remote_port": 5600}
END = {"text": "<eos>", "finish": "stop", "params": PARAMS}
ADD_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def finish_chunks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["choices"] and e["choices"][0].get("finish_reason")]


def carriers(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if KEY in event]


def test_finish_chunk_carries_params(serve: Any) -> None:
    """The chunk with the finish reason has the params; no other chunk has the key."""
    server = serve([[{"text": "Hello"}], [{"text": "big"}], [END]])
    events = server.stream(PATH, **ASK)
    (chunk,) = finish_chunks(events)
    assert chunk.get(KEY) == PARAMS
    assert carriers(events) == [chunk]


def test_usage_chunk_has_no_params(serve: Any) -> None:
    """With usage on, the last chunk has no choice and no params; the finish chunk keeps them."""
    server = serve([[{"text": "Hello"}], [END]])
    events = server.stream(PATH, **ASK, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert carriers(events) == finish_chunks(events) == [events[-2]]


@pytest.mark.parametrize("params", [None, {}])
def test_key_is_absent_without_params(serve: Any, params: dict[str, Any] | None) -> None:
    """A request that has no params has no such key on the wire, not even as null."""
    server = serve([[{"text": "Hello"}], [END | {"params": params}]])
    lines = server.lines(PATH, **ASK, stream_options={"include_usage": True})
    assert not [line for line in lines if KEY in line]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_only_token_is_the_last_one(serve: Any, finish: str) -> None:
    """A stream of a single token carries the params on that token's chunk."""
    events = serve([[END | {"finish": finish}]]).stream(PATH, **ASK)
    (chunk,) = finish_chunks(events)
    assert chunk["choices"][0]["finish_reason"] == finish
    assert carriers(events) == [chunk]


def test_params_survive_a_merge_with_a_waiting_delta(serve: Any) -> None:
    """A slow reader gets the last tokens as one output, with the params that came last."""
    events = serve([[{"text": "Hello"}], [{"text": "big"}, {"text": "world"}, END]]).stream(
        PATH, **ASK
    )
    (chunk,) = finish_chunks(events)
    assert chunk["choices"][0]["delta"]["content"].split() == ["big", "world"]
    assert carriers(events) == [chunk] and chunk[KEY] == PARAMS


def test_last_token_without_visible_text(serve: Any) -> None:
    """A parser that swallows the last token still sends a finish chunk, and it has the params."""
    server = serve([[{"text": "hm"}], [END | {"text": "</think>"}]], reasoning_parser="deepseek_r1")
    events = server.stream(PATH, **ASK)
    (chunk,) = finish_chunks(events)
    assert chunk["choices"][0]["delta"] == {}
    assert carriers(events) == [chunk] and chunk[KEY] == PARAMS


def test_tool_call(serve: Any) -> None:
    """A turn that ends in a tool call carries the params beside finish_reason tool_calls."""
    call = [[{"text": word}] for word in ("<tool_call>", '{"name":"add","arguments":{}}')]
    server = serve([*call, [END | {"text": "</tool_call>"}]], tool_parser="hermes")
    events = server.stream(PATH, **ASK, tools=[ADD_TOOL])
    (chunk,) = finish_chunks(events)
    assert chunk["choices"][0]["finish_reason"] == "tool_calls"
    assert carriers(events) == [chunk] and chunk[KEY] == PARAMS


@pytest.mark.parametrize("together", [False, True])
def test_several_choices_get_no_params(serve: Any, together: bool) -> None:
    """With n = 2 no chunk has params: the engine keeps one set, whichever choice it is of."""
    ends = [END | {"choice": i, "params": PARAMS | {"remote_port": i}} for i in range(2)]
    server = serve(
        [
            [{"text": "Hello", "choice": 0}, {"text": "Hello", "choice": 1}],
            *([ends] if together else [[end] for end in ends]),
        ]
    )
    events = server.stream(PATH, **ASK, n=2)
    assert {e["choices"][0]["index"] for e in finish_chunks(events)} == {0, 1}
    assert carriers(events) == []


def test_failed_request_has_no_params(serve: Any) -> None:
    """A generation that ends in an error sends the error, as before, and no params."""
    lines = serve([[{"text": "Hello"}], [END | {"finish": "error"}]]).lines(PATH, **ASK)
    assert '"error"' in lines[-2] and lines[-1] == "[DONE]"
    assert not [line for line in lines if KEY in line]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"return_token_ids": True},
        {"echo": True, "add_generation_prompt": False},
    ],
    ids=str,
)
def test_params_change_nothing_else(serve: Any, options: dict[str, Any]) -> None:
    """Apart from the key, a stream with params equals one without, chunk for chunk."""
    streams = []
    for params in (PARAMS, None):
        server = serve([[{"text": "Hello"}], [END | {"params": params}]])
        events = server.stream(PATH, **ASK, **options, request_id="fixed")
        streams.append([{k: v for k, v in e.items() if k not in (KEY, "created")} for e in events])
    assert streams[0] == streams[1]


def test_chunk_without_params_never_prints_null() -> None:
    """Endpoints that dump the chunk whole (derender) do not gain a null field."""
    chunk = ChatCompletionStreamResponse(model=MODEL, choices=[])
    assert KEY not in chunk.model_dump()
    assert KEY not in chunk.model_dump_json()


def test_openai_client_reads_params(serve: Any) -> None:
    """The openai client keeps the field as an extra of the finish chunk."""
    server = serve([[{"text": "Hello"}], [END]])

    async def read() -> list[Any]:
        async with (
            server.listen() as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            stream = await client.chat.completions.create(model=MODEL, stream=True, **ASK)
            return [chunk async for chunk in stream]

    chunks = asyncio.run(read())
    extras = [(chunk.model_extra or {}).get(KEY) for chunk in chunks]
    assert extras == [None] * (len(chunks) - 1) + [PARAMS]
    assert chunks[-1].choices[0].finish_reason == "stop"
