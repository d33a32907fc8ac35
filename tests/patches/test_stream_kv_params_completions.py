"""A stream of /v1/completions carries `kv_transfer_params` on each prompt's finish chunk."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse

PATH = "/v1/completions"
MODEL = "scripted"
KEY = "kv_transfer_params"
ASK: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8}
PARAMS = {"remote_engine_id": "d0", "remote_block_ids": [[4, 5]], "remote_port": 5600}
END = {"text": "<eos>", "finish": "stop", "params": PARAMS}


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
    (chunk,) = serve([[END | {"finish": finish}]]).stream(PATH, **ASK)
    assert chunk["choices"][0]["finish_reason"] == finish
    assert chunk[KEY] == PARAMS


def test_params_survive_a_merge_with_a_waiting_delta(serve: Any) -> None:
    """A slow reader gets the last tokens as one output, with the params that came last."""
    events = serve([[{"text": "Hello"}], [{"text": "big"}, {"text": "world"}, END]]).stream(
        PATH, **ASK
    )
    assert events[-1]["choices"][0]["text"].split() == ["big", "world"]
    assert carriers(events) == [events[-1]] and events[-1][KEY] == PARAMS


def test_prompt_list_gets_its_own_params_per_prompt(serve: Any) -> None:
    """Of a list of prompts each choice's finish chunk has that prompt's params, in any order."""
    mine = [PARAMS | {"remote_block_ids": [[index]]} for index in range(3)]
    server = serve(
        [[{"text": "Hello"}], [{"text": "big"}], [END | {"params": mine[0]}]],
        [[END | {"params": mine[1]}]],
        [[{"text": "Hello"}], [END | {"params": None}]],
    )
    events = server.stream(PATH, prompt=["a", "b", "c"], max_tokens=8)
    ends = {e["choices"][0]["index"]: e.get(KEY) for e in finish_chunks(events)}
    assert ends == {0: mine[0], 1: mine[1], 2: None}
    assert finish_chunks(events)[0]["choices"][0]["index"] == 1
    assert len(carriers(events)) == 2


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
@pytest.mark.parametrize("together", [False, True])
def test_several_choices_get_no_params(serve: Any, prompts: list[str], together: bool) -> None:
    """With n = 2 no chunk has params: the engine keeps one set, whichever choice it is of."""
    ends = [END | {"choice": i, "params": PARAMS | {"remote_port": i}} for i in range(2)]
    script = [
        [{"text": "Hello", "choice": 0}, {"text": "Hello", "choice": 1}],
        *([ends] if together else [[end] for end in ends]),
    ]
    events = serve(*[script for _ in prompts]).stream(PATH, prompt=prompts, max_tokens=8, n=2)
    assert len(finish_chunks(events)) == 2 * len(prompts)
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
        {"echo": True},
        {"echo": True, "return_token_ids": True},
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
    chunk = CompletionStreamResponse(model=MODEL, choices=[])
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
            stream = await client.completions.create(model=MODEL, stream=True, **ASK)
            return [chunk async for chunk in stream]

    chunks = asyncio.run(read())
    assert [(chunk.model_extra or {}).get(KEY) for chunk in chunks] == [None, PARAMS]
    assert chunks[-1].choices[0].finish_reason == "stop"
